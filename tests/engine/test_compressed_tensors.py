"""llm-compressor's checkpoints beside their ModelOpt twins: the same bits, and the same care."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    ALL_NVFP4,
    COMPRESSED,
    LAYERS,
    Tensors,
    assert_bitwise,
    expert_tensor,
    expert_weights,
    make_case,
    read_tensors,
)
from harness import engine_config, loaded_model, moe_inputs, moe_layers, run_moe, snapshot
from safetensors.torch import save_file

from vllm_nvfp4_pertoken.checkpoints.scales import invert_
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.experts.reference import Activation, moe_forward


def snapshot_of(path: Path, **arguments: Any) -> Tensors:
    with loaded_model(path, **arguments) as (config, model):
        return snapshot(config, model)


def twin_tensors(tensors: Tensors) -> Tensors:
    """The same weights under ModelOpt's names; the inverse is numpy's division in fp32."""
    twin = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            twin[f"{module}.weight"] = tensor
        elif kind == "weight_global_scale":
            inverse = np.float32(1) / tensor.numpy()
            twin[f"{module}.weight_scale_2"] = torch.from_numpy(inverse).reshape(())
        elif kind != "input_global_scale":
            twin[name] = tensor
    return twin


def make_twin(source: Path, target: Path) -> Path:
    target.mkdir()
    save_file(twin_tensors(read_tensors(source)), target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    modelopt = json.loads((ALL_NVFP4 / "config.json").read_text())["quantization_config"]
    modelopt["ignore"] = config["quantization_config"]["ignore"]
    config["quantization_config"] = modelopt
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


@pytest.fixture(scope="module")
def compressed() -> Tensors:
    return snapshot_of(COMPRESSED)


def other_scales(tensors: Tensors) -> None:
    """Global scales of every matrix its own, over many magnitudes; gate and up differ."""
    generator = torch.Generator().manual_seed(3)
    for name in tensors:
        if name.endswith("weight_global_scale"):
            exponent = torch.randint(-9, 9, (1,), generator=generator)
            factor = (1 + torch.rand(1, generator=generator)) * 2.0**exponent
            tensors[name] = tensors[name] * factor


@pytest.mark.parametrize("edit", [None, other_scales], ids=["exported", "other scales"])
def test_bits_of_the_modelopt_twin(edit, tmp_path):
    path = make_case(COMPRESSED, tmp_path / "case", edit=edit)
    twin = make_twin(path, tmp_path / "twin")
    actual = snapshot_of(path)
    assert_bitwise(actual, snapshot_of(twin))
    assert any(name.startswith("moe ") for name in actual)


def test_layers_match_the_reference():
    tensors = twin_tensors(read_tensors(COMPRESSED))
    inputs = moe_inputs()
    with loaded_model(COMPRESSED) as (config, model):
        dense = model.model.layers[0].self_attn.qkv_proj
        assert type(dense.quant_method).__name__ == "PerTokenLinearMethod"
        assert type(model.lm_head.quant_method).__name__ == "UnquantizedLinearMethod"
        for index, layer in enumerate(moe_layers(model)):
            expected = moe_forward(*inputs, expert_weights(tensors, index), Activation("silu"))
            assert_bitwise({"out": run_moe(config, layer, *inputs)}, {"out": expected})


def test_inverse_is_exact_for_powers_of_two_and_else_rounded_once():
    powers = torch.ldexp(torch.ones(200), torch.arange(-100, 100))
    exact = powers.clone()
    invert_(exact)
    assert torch.equal(exact, torch.ldexp(torch.ones(200), -torch.arange(-100, 100)))
    scales = torch.rand(10000, generator=torch.Generator().manual_seed(1)) * 1e4 + 1e-3
    inverse = scales.clone()
    invert_(inverse)
    # Half an ulp, which is at most 2**-24 of the value.
    error = (inverse.double() * scales.double() - 1).abs()
    assert error.max() <= 2.0**-24
    # So that a scale which went both ways may have moved by an ulp: why each is served by its own.
    back = inverse.clone()
    invert_(back)
    assert ((back.double() - scales.double()).abs() <= scales.double() * 2.0**-23).all()
    assert not torch.equal(back, scales)


@pytest.mark.parametrize("value", [None, float("nan"), 0.0])
def test_activation_scales_are_not_read(value, tmp_path, compressed):
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("input_global_scale")]:
            if value is None:
                del tensors[name]
            else:
                tensors[name] = torch.tensor([value])

    assert_bitwise(snapshot_of(make_case(COMPRESSED, tmp_path / "case", edit=edit)), compressed)


def test_weight_only_is_served_the_same(tmp_path, compressed):
    def config(content: dict[str, Any]) -> None:
        groups = content["quantization_config"]["config_groups"]
        groups["group_0"]["input_activations"] = None

    path = make_case(COMPRESSED, tmp_path / "case", config=config)
    assert_bitwise(snapshot_of(path), compressed)


def test_zero_expert_computes_zero(tmp_path):
    """llm-compressor writes a global scale of 1 for a matrix of zeros."""

    def edit(tensors: Tensors) -> None:
        name = expert_tensor(0, 2, "down", "weight_packed")
        tensors[name] = torch.zeros_like(tensors[name])
        scale = name.replace("weight_packed", "weight_global_scale")
        tensors[scale] = torch.ones(1)

    with loaded_model(make_case(COMPRESSED, tmp_path / "case", edit=edit)) as (config, model):
        hidden, weights, ids = moe_inputs()
        output = run_moe(config, moe_layers(model)[0], hidden, weights, torch.full_like(ids, 2))
    assert not output.any()


def test_reload_gives_the_bits_of_a_fresh_load(tmp_path, compressed):
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    def edit(tensors: Tensors) -> None:
        other_scales(tensors)
        for name in tensors:
            if name.endswith("weight_packed"):
                tensors[name] = tensors[name] ^ 0x88

    other = make_case(COMPRESSED, tmp_path / "case", edit=edit)
    expected = snapshot_of(other)
    with loaded_model(COMPRESSED) as (config, model):
        reload_weights(config, model, None, str(other), True)
        assert_bitwise(snapshot(config, model), expected)
        reload_weights(config, model, None, str(COMPRESSED), True)
        assert_bitwise(snapshot(config, model), compressed)


@pytest.mark.parametrize("projection", ["gate", "down"])
def test_missing_tensor_is_named_as_the_checkpoint_names_it(projection, tmp_path):
    name = expert_tensor(1, 3, projection, "weight_global_scale")
    path = make_case(COMPRESSED, tmp_path / "case", edit=lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        engine_config(path)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize(
    ("module", "text"),
    [
        (expert_tensor(1, 3, "up", "weight_global_scale"), "experts.3.up_proj.weight_global_scale"),
        ("model.layers.0.self_attn.k_proj.weight_global_scale", "qkv_proj: weight_scale_2 is"),
    ],
)
def test_global_scale_without_an_inverse_is_refused(module, text, value, tmp_path):
    path = make_case(
        COMPRESSED,
        tmp_path / "case",
        edit=lambda tensors: tensors.update({module: torch.tensor([value])}),
    )
    with pytest.raises(CheckpointError, match=text):
        with loaded_model(path):
            pass


def test_static_linears_are_refused():
    options = {"nvfp4_per_token": {"linear": "static"}}
    with pytest.raises(UnsupportedError, match="'static', and the checkpoint is compressed-tens"):
        with loaded_model(COMPRESSED, additional_config=options):
            pass


@pytest.mark.parametrize("form", ["pack-quantized", "mxfp4-pack-quantized", "float-quantized"])
def test_other_formats_are_refused_at_the_start(form, tmp_path):
    def config(content: dict[str, Any]) -> None:
        section = content["quantization_config"]
        section["format"] = section["config_groups"]["group_0"]["format"] = form

    path = make_case(COMPRESSED, tmp_path / "case", config=config)
    with pytest.raises(ValueError, match=rf"in the format '{form}', for Linear") as caught:
        engine_config(path)
    assert str(path) in str(caught.value)


def test_kv_cache_scales(tmp_path):
    """As llm-compressor writes them: bf16 of one element, beside a scheme for every layer."""

    def edit(tensors: Tensors) -> None:
        for layer in range(LAYERS):
            for part in "kv":
                name = f"model.layers.{layer}.self_attn.{part}_scale"
                tensors[name] = torch.tensor([0.5 if part == "k" else 0.25]).bfloat16()

    def config(content: dict[str, Any]) -> None:
        content["quantization_config"]["kv_cache_scheme"] = {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        }

    path = make_case(COMPRESSED, tmp_path / "case", edit=edit, config=config)
    with loaded_model(path) as (config_, model):
        assert config_.cache_config.cache_dtype == "fp8"
        for layer in model.model.layers:
            assert layer.self_attn.attn._k_scale_float == 0.5
            assert layer.self_attn.attn._v_scale_float == 0.25
