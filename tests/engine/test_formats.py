"""Every way in which ModelOpt checkpoints come, loaded: which layer becomes what, and its bits."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import (
    EXPERTS,
    EXPERTS_ONLY,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    NO_CALIBRATION,
    Tensors,
    assert_bitwise,
    expert_weights,
    make_case,
    read_tensors,
)
from harness import engine_config, loaded_model, moe_inputs, moe_layers, run_moe, snapshot

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.experts.linear import linear_forward
from vllm_nvfp4_pertoken.experts.reference import Activation, moe_forward

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def section(**changes: Any):
    """An edit of config.json's quantization section."""

    def edit(content: dict[str, Any]) -> None:
        content["quantization_config"].update(changes)

    return edit


def assert_experts_match_reference(path, config: Any, model: Any) -> None:
    tensors = read_tensors(path)
    inputs = moe_inputs()
    for index, layer in enumerate(moe_layers(model)):
        expected = moe_forward(*inputs, expert_weights(tensors, index), Activation("silu"))
        assert_bitwise({"out": run_moe(config, layer, *inputs)}, {"out": expected})


# Weights only


def test_weight_only_checkpoint_is_served_per_token_and_said_so(tmp_path, said):
    """As ModelOpt's W4A16 recipes write it: no input scales, and no group has input activations."""

    def weights_only(content: dict[str, Any]) -> None:
        content["quantization_config"]["quant_algo"] = "W4A16_NVFP4"
        del content["quantization_config"]["config_groups"]["group_0"]["input_activations"]

    path = make_case(NO_CALIBRATION, tmp_path / "case", config=weights_only)
    with loaded_model(path) as (config, model):
        assert_experts_match_reference(path, config, model)
        actual = snapshot(config, model)
    assert any("weights only (W4A16_NVFP4), activations are quantized" in line for line in said)
    with loaded_model(NO_CALIBRATION) as (config, model):
        assert_bitwise(actual, snapshot(config, model))


# Two configs


def test_disagreeing_configs_are_told_and_config_json_wins(tmp_path, said):
    def legacy(content: dict[str, Any]) -> None:
        content["quantization"].update(exclude_modules=["lm_head"], kv_cache_quant_algo="FP8")

    path = make_case(EXPERTS_ONLY, tmp_path / "case", hf_quant_config=legacy)
    with loaded_model(path) as (config, model):
        assert config.cache_config.cache_dtype == "auto"
        assert type(model.model.layers[0].self_attn.o_proj.quant_method).__name__ == (
            "UnquantizedLinearMethod"
        )
    text = "config.json has kv_cache_quant_algo None, hf_quant_config.json 'FP8'; config.json wins."
    assert f"nvfp4_per_token: {text}" in said
    text = "hf_quant_config.json does not exclude model.embed_tokens, model.layers.0.mlp.gate, "
    assert any(text in line for line in said)


def test_legacy_file_of_another_algorithm_is_told(tmp_path, said):
    def legacy(content: dict[str, Any]) -> None:
        content["quantization"]["quant_algo"] = "NVFP4_AWQ"

    engine_config(make_case(EXPERTS_ONLY, tmp_path / "case", hf_quant_config=legacy))
    assert any("'NVFP4_AWQ'" in line and "config.json wins" in line for line in said)


# Mixed precision


def fp8_attention(tensors: Tensors) -> None:
    for layer in range(LAYERS):
        for part in ATTENTION:
            name = f"model.layers.{layer}.self_attn.{part}.weight"
            weight = tensors[name].float()
            scale = weight.abs().amax() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.25)


def mixed_layers(per_expert: bool) -> dict[str, Any]:
    """`quantized_layers` as ModelOpt writes it with transformers 5, or 4 (per expert)."""
    layers: dict[str, Any] = {}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for part in ATTENTION:
            layers[f"{stem}.self_attn.{part}"] = {"quant_algo": "FP8"}
        names = [
            f"{stem}.mlp.experts.{expert}.{projection}_proj"
            for expert in range(EXPERTS)
            for projection in ("gate", "up", "down")
        ]
        for name in names if per_expert else [f"{stem}.mlp.experts"]:
            layers[name] = {"quant_algo": "NVFP4", "group_size": 16}
    return layers


def mixed_case(target, *, per_expert: bool = False, layers_in_config: bool = True):
    layers = mixed_layers(per_expert)

    def config(content: dict[str, Any]) -> None:
        quantization = content["quantization_config"]
        quantization.update(quant_algo="MIXED_PRECISION", ignore=[])
        if layers_in_config:
            quantization["quantized_layers"] = layers

    def legacy(content: dict[str, Any]) -> None:
        quantization = content["quantization"]
        quantization.update(quant_algo="MIXED_PRECISION", quantized_layers=layers)
        del quantization["exclude_modules"], quantization["group_size"]

    return make_case(
        EXPERTS_ONLY, target, edit=fp8_attention, config=config, hf_quant_config=legacy
    )


@pytest.fixture
def not_a_cpu(monkeypatch):
    """vLLM's FP8 linears do not run on CPUs: everything up to their arithmetic is shown here."""
    from vllm.model_executor.layers.quantization import modelopt

    from vllm_nvfp4_pertoken.engine import host

    other = SimpleNamespace(device_type="other", is_rocm=lambda: False, is_cuda=lambda: False)
    monkeypatch.setattr(host, "current_platform", other)
    monkeypatch.setattr(
        modelopt.ModelOptLinearMethod, "process_weights_after_loading", lambda self, layer: None
    )


@pytest.mark.parametrize("layers_in_config", [True, False], ids=["config.json", "legacy file"])
@pytest.mark.parametrize("per_expert", [False, True], ids=["containers", "per expert"])
def test_mixed_checkpoint(per_expert, layers_in_config, tmp_path, not_a_cpu, said):
    path = mixed_case(tmp_path / "case", per_expert=per_expert, layers_in_config=layers_in_config)
    tensors = read_tensors(path)
    with loaded_model(path) as (config, model):
        assert_experts_match_reference(path, config, model)
        assert type(model.lm_head.quant_method).__name__ == "UnquantizedLinearMethod"
        for index, layer in enumerate(model.model.layers):
            assert type(layer.mlp.gate.quant_method).__name__ == "UnquantizedLinearMethod"
            dense = layer.self_attn.qkv_proj
            assert type(dense.quant_method).__name__ == "ModelOptLinearMethod"
            assert dense.weight.dtype == torch.float8_e4m3fn
            parts = [f"model.layers.{index}.self_attn.{part}_proj" for part in "qkv"]
            expected = torch.cat([tensors[f"{part}.weight"].view(torch.uint8) for part in parts])
            assert torch.equal(dense.weight.data.view(torch.uint8), expected)
            assert dense.weight_scale.tolist() == [
                tensors[f"{part}.weight_scale"].item() for part in parts
            ]
            assert dense.input_scale.tolist() == [0.25] * 3
    assert any("; 4 layers in FP8, as the checkpoint has them." in line for line in said)


def test_mixed_checkpoint_on_a_cpu_is_refused_with_the_reason(tmp_path):
    text = r"layers\.0\.self_attn\.qkv_proj is quantized with FP8, .*no kernels on CPUs"
    with pytest.raises(UnsupportedError, match=text):
        with loaded_model(mixed_case(tmp_path / "case")):
            pass


def test_algorithm_that_vllm_would_leave_unquantized_is_refused(tmp_path, not_a_cpu):
    def config(content: dict[str, Any]) -> None:
        quantized = content["quantization_config"]["quantized_layers"]
        for name in quantized:
            if "self_attn" in name:
                quantized[name] = {"quant_algo": "W4A8_AWQ"}

    mixed = mixed_case(tmp_path / "mixed")
    path = make_case(mixed, tmp_path / "case", config=config)
    with pytest.raises(CheckpointError, match=r"stored in FP8, .*config says W4A8_AWQ"):
        with loaded_model(path):
            pass


# Tensors that are not what the config says


def test_modules_are_served_as_they_are_stored(tmp_path, said):
    """An NVFP4 head in the exclude list, and a BF16 layer that is not in it."""
    source = read_tensors(EXPERTS_ONLY)
    weight, scale, scale_2 = nvfp4.quantize_weight(source["lm_head.weight"])

    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = weight
        tensors["lm_head.weight_scale"] = scale
        tensors["lm_head.weight_scale_2"] = scale_2.reshape(())

    ignore = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit, config=section(ignore=ignore))
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    with loaded_model(path) as (config, model):
        assert_experts_match_reference(path, config, model)
        dense = model.model.layers[1].self_attn.o_proj
        assert type(dense.quant_method).__name__ == "UnquantizedLinearMethod"
        logits = model.lm_head.quant_method.apply(model.lm_head, rows)
    expected = linear_forward(rows, weight, scale, scale_2.reshape(1), [weight.shape[0]])
    assert_bitwise({"logits": logits}, {"logits": expected})
    (line,) = [line for line in said if "not stored as the checkpoint's config says" in line]
    assert "5 modules are not stored" in line
    assert "lm_head (NVFP4)" in line
    assert "model.layers.0.self_attn.qkv_proj (BF16)" in line


def test_tied_head_is_the_embedding(tmp_path):
    def config(content: dict[str, Any]) -> None:
        content["tie_word_embeddings"] = True
        content["quantization_config"]["ignore"].remove("lm_head")

    path = make_case(
        EXPERTS_ONLY, tmp_path / "case", edit=lambda ts: ts.pop("lm_head.weight"), config=config
    )
    embedding = read_tensors(path)["model.embed_tokens.weight"]
    rows = torch.eye(HIDDEN)[:4].bfloat16()
    with loaded_model(path) as (_, model):
        assert type(model.lm_head.quant_method).__name__ == "UnquantizedLinearMethod"
        logits = model.lm_head.quant_method.apply(model.lm_head, rows)
    # Rows with a single 1 pick columns of the embedding, without rounding.
    assert torch.equal(logits[:, : len(embedding)], embedding.T[:4])


def test_draft_layers_in_the_checkpoint_are_left_to_the_draft(tmp_path):
    """As ModelOpt leaves them: in BF16, and with an exclude list that forgets `mtp.fc`."""

    def edit(tensors: Tensors) -> None:
        tensors["mtp.fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN).bfloat16()
        for expert in range(EXPERTS):
            shape = (INTERMEDIATE, HIDDEN)
            name = f"mtp.layers.0.mlp.experts.{expert}.up_proj.weight"
            tensors[name] = torch.randn(shape).bfloat16()

    content = json.loads((EXPERTS_ONLY / "config.json").read_text())
    ignore = [*content["quantization_config"]["ignore"], "mtp.layers.0*"]
    path = make_case(
        EXPERTS_ONLY,
        tmp_path / "case",
        edit=edit,
        config=section(ignore=ignore),
    )
    with loaded_model(path) as (config, model):
        assert_experts_match_reference(path, config, model)


# KV cache


def test_kv_cache_in_nvfp4_is_passed_on(tmp_path):
    path = make_case(EXPERTS_ONLY, tmp_path / "case", config=section(kv_cache_scheme="NVFP4"))
    assert engine_config(path).cache_config.cache_dtype == "nvfp4"


def test_kv_cache_that_the_engine_does_not_take_over_is_told(tmp_path, said):
    """vLLM looks for the scheme only beside a `quant_method`, which ModelOpt 0.31 to 0.34 lack."""

    def config(content: dict[str, Any]) -> None:
        del content["quantization_config"]["quant_method"]
        content["quantization_config"]["kv_cache_scheme"] = "FP8"

    def edit(tensors: Tensors) -> None:
        for layer in range(LAYERS):
            for part in "kv":
                name = f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"
                tensors[name] = torch.tensor(0.5)

    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit, config=config)
    with loaded_model(path) as (config_, model):
        assert config_.cache_config.cache_dtype == "auto"
        assert_experts_match_reference(path, config_, model)
    assert any("KV cache in FP8" in line and "--kv-cache-dtype fp8" in line for line in said)
