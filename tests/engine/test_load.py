"""What is loaded from which checkpoint, and what is refused, without an engine around it."""

import json
import re
import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from cases import (
    ALL_NVFP4,
    EXPERTS,
    EXPERTS_ONLY,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    NO_CALIBRATION,
    Tensors,
    assert_bitwise,
    expert_tensor,
    expert_weights,
    make_case,
    read_tensors,
)
from harness import engine_config, loaded_model, moe_inputs, moe_layers, run_moe, snapshot

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.experts.linear import linear_forward
from vllm_nvfp4_pertoken.experts.reference import Activation, moe_forward
from vllm_nvfp4_pertoken.experts.select import ACCEPTED_BACKENDS
from vllm_nvfp4_pertoken.testing import assert_rows_close, matmul_bound

SILU = Activation("silu")
STATIC_LINEAR = {"nvfp4_per_token": {"linear": "static"}}


@pytest.fixture
def unchecked_files(monkeypatch):
    """As with a model from a hub: files are not there yet when headers would be checked."""
    from vllm_nvfp4_pertoken.engine.config import NvFp4PerTokenConfig

    monkeypatch.setattr(NvFp4PerTokenConfig, "_verify_files", lambda self, model: None)


def load(path, **arguments: Any) -> Tensors:
    with loaded_model(path, **arguments) as (config, model):
        return snapshot(config, model)


def is_expert_input_scale(name: str) -> bool:
    return ".experts." in name and name.endswith("input_scale")


def assert_layers_match_reference(path, config: Any, model: Any) -> None:
    """Every MoE layer's output has the bits of the reference on the checkpoint's own tensors."""
    tensors = read_tensors(path)
    hidden, weights, ids = moe_inputs()
    for index, layer in enumerate(moe_layers(model)):
        expected = moe_forward(hidden, weights, ids, expert_weights(tensors, index), SILU)
        assert expected.abs().sum() > 0
        assert_bitwise({"out": run_moe(config, layer, hidden, weights, ids)}, {"out": expected})


# Activation scales of the experts


@pytest.fixture(scope="module")
def experts_only() -> Tensors:
    return load(EXPERTS_ONLY)


def test_experts_have_no_input_scale_parameter(experts_only):
    names = [name for name in experts_only if ".mlp.experts." in name]
    assert len(names) == 6 * LAYERS
    assert not [name for name in names if "input_scale" in name]


def _scales_absent(tensors: Tensors) -> None:
    for name in filter(is_expert_input_scale, list(tensors)):
        del tensors[name]


def _scales_partly_absent(tensors: Tensors) -> None:
    for name in list(filter(is_expert_input_scale, list(tensors)))[::3]:
        del tensors[name]


def _scales_are(value: torch.Tensor):
    def edit(tensors: Tensors) -> None:
        for name in filter(is_expert_input_scale, list(tensors)):
            tensors[name] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(_scales_absent, id="absent"),
        pytest.param(_scales_partly_absent, id="partly absent"),
        pytest.param(_scales_are(torch.tensor(float("nan"))), id="nan"),
        pytest.param(_scales_are(torch.tensor(0.0)), id="zero"),
        pytest.param(_scales_are(torch.ones(3, 5)), id="wrong shape"),
    ],
)
def test_input_scales_of_experts_change_nothing(edit, experts_only, tmp_path):
    assert any(map(is_expert_input_scale, read_tensors(EXPERTS_ONLY)))
    assert_bitwise(load(make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit)), experts_only)


# Values


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0, 10.0])
def test_gate_and_up_keep_their_own_weight_scale_2(ratio, tmp_path):
    def edit(tensors: Tensors) -> None:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                gate = tensors[expert_tensor(layer, expert, "gate", "weight_scale_2")]
                tensors[expert_tensor(layer, expert, "up", "weight_scale_2")] = gate * ratio

    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit)
    with loaded_model(path) as (config, model):
        assert_layers_match_reference(path, config, model)


@pytest.mark.parametrize("path", [ALL_NVFP4, EXPERTS_ONLY], ids=lambda path: path.name)
def test_emulation_computes_the_same_bits(path):
    fast = load(path)
    slow = load(path, moe_backend="emulation")
    # Parameters differ, as each backend has its own order.
    outputs = [name for name in fast if name.startswith("moe") or name.endswith("proj")]
    assert len(outputs) == 3 * LAYERS
    assert_bitwise({name: slow[name] for name in outputs}, {name: fast[name] for name in outputs})


def test_rows_do_not_depend_on_their_batch():
    hidden, weights, ids = moe_inputs(rows=64)
    with loaded_model(EXPERTS_ONLY) as (config, model):
        layer = moe_layers(model)[0]
        together = run_moe(config, layer, hidden, weights, ids)
        for row in (0, 17, 63):
            one = slice(row, row + 1)
            alone = run_moe(config, layer, hidden[one], weights[one], ids[one])
            assert_bitwise({"row": alone}, {"row": together[one]})
        backwards = run_moe(config, layer, hidden.flip(0), weights.flip(0), ids.flip(0))
        assert_bitwise({"rows": backwards.flip(0)}, {"rows": together})


@pytest.fixture(params=sorted(b for b in ACCEPTED_BACKENDS if not b.startswith("flashinfer")))
def backend(request, monkeypatch):
    """Every backend that runs on a CPU; Triton in its interpreter (see tests/conftest.py)."""
    if request.param == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return request.param


def test_expert_of_zeros_with_nan_scales_gives_zeros(backend, tmp_path):
    dead = 3

    def edit(tensors: Tensors) -> None:
        for projection in ("gate", "up", "down"):
            name = expert_tensor(0, dead, projection, "weight")
            tensors[name].zero_()
            tensors[name + "_scale"].view(torch.uint8).fill_(0xFF)
            tensors[name + "_scale_2"].zero_()

    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit)
    hidden, weights, ids = moe_inputs()
    with loaded_model(path, moe_backend=backend) as (config, model):
        layer = moe_layers(model)[0]
        only_dead = run_moe(config, layer, hidden, weights, torch.full_like(ids, dead))
        assert torch.count_nonzero(only_dead) == 0
        mixed = run_moe(config, layer, hidden, weights, ids)
    # The same as if the slot were empty: zero times anything is added exactly.
    without = torch.where(ids == dead, -1, ids)
    expected = moe_forward(
        hidden, weights, without, expert_weights(read_tensors(EXPERTS_ONLY), 0), SILU
    )
    assert (mixed == expected).all()


# Corrupt checkpoints


def test_truncated_file_is_named(tmp_path):
    path = make_case(EXPERTS_ONLY, tmp_path / "case")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    text = rf"{re.escape(str(file))} \(2229728 bytes\) cannot be read.*truncated or damaged"
    with pytest.raises(ValueError, match=text):
        engine_config(path)


def test_truncated_file_fails_in_the_loader_too(tmp_path, unchecked_files):
    path = make_case(EXPERTS_ONLY, tmp_path / "case")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exception, match="not fully covered"):
        load(path)


@pytest.mark.parametrize("kind", ["weight", "weight_scale", "weight_scale_2"])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_missing_expert_tensor_is_named_from_the_headers(kind, projection, tmp_path):
    name = expert_tensor(1, 5, projection, kind)
    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"not a complete NVFP4.*{re.escape(name)} is missing"):
        engine_config(path)


@pytest.mark.parametrize("kind", ["weight", "weight_scale", "weight_scale_2"])
@pytest.mark.parametrize("projection", ["gate", "down"])
def test_missing_expert_tensor_is_named_by_the_loader(kind, projection, tmp_path, unchecked_files):
    name = expert_tensor(1, 5, projection, kind)
    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=lambda tensors: tensors.pop(name))
    text = rf"layers\.1\..*1 expert tensors were not in the checkpoint: .*5\.{projection}_proj"
    with pytest.raises(CheckpointError, match=text + rf"\.{kind}\b") as caught:
        load(path)
    assert "export or send the checkpoint again" in str(caught.value)


def test_missing_expert_is_named_from_config_and_headers(tmp_path):
    """The last expert: its absence shows only against the number in config.json."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.0.mlp.experts.7." in name]:
            del tensors[name]

    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit)
    missing = re.escape(expert_tensor(0, 7, "down", "weight"))
    with pytest.raises(ValueError, match=rf"{missing} is missing"):
        engine_config(path)


_WRONG = {
    # kind: tensor, as headers call what was found and expected, and as torch does
    "wrong shape": (
        ("up", "weight", lambda t: t[:-1]),
        r"is U8 \[127, 128\], expected U8 \[128, 128\]",
        r"is torch\.uint8 \[127, 128\]\. Expected: torch\.uint8 \[128, 128\]",
    ),
    "wrong dtype": (
        ("down", "weight", lambda t: t.view(torch.int8)),
        r"is I8 \[256, 64\], expected U8 \[256, 64\]",
        r"is torch\.int8 \[256, 64\]\. Expected: torch\.uint8 \[256, 64\]",
    ),
    "wrong scale shape": (
        ("gate", "weight_scale", lambda t: t[:, :8]),
        r"is F8_E4M3 \[128, 8\], expected F8_E4M3 \[128, 16\]",
        r"is torch\.float8_e4m3fn \[128, 8\]\. Expected: torch\.float8_e4m3fn \[128, 16\]",
    ),
    "wrong scale dtype": (
        ("down", "weight_scale", lambda t: t.bfloat16()),
        r"is BF16 \[256, 8\], expected F8_E4M3 \[256, 8\]",
        r"is torch\.bfloat16 \[256, 8\]\. Expected: torch\.float8_e4m3fn \[256, 8\]",
    ),
    "wrong scale 2": (
        ("up", "weight_scale_2", lambda t: t.repeat(2)),
        r"is F32 \[2\], expected F32 \[\]",
        r"is torch\.float32 \[2\]\. Expected: one torch\.float32 value",
    ),
}


@pytest.mark.parametrize("wrong", _WRONG)
def test_wrong_shape_or_dtype_is_told_with_both_values_from_the_headers(wrong, tmp_path):
    (projection, kind, change), in_header, _ = _WRONG[wrong]
    name = expert_tensor(0, 2, projection, kind)
    path = make_case(
        EXPERTS_ONLY, tmp_path / "case", edit=lambda ts: ts.update({name: change(ts[name])})
    )
    text = rf"{re.escape(name)} in model\.safetensors {in_header}"
    with pytest.raises(ValueError, match=text):
        engine_config(path)


@pytest.mark.parametrize("wrong", _WRONG)
def test_wrong_shape_or_dtype_is_told_with_both_values_by_the_loader(
    wrong, tmp_path, unchecked_files
):
    (projection, kind, change), _, in_loader = _WRONG[wrong]
    name = expert_tensor(0, 2, projection, kind)
    path = make_case(
        EXPERTS_ONLY, tmp_path / "case", edit=lambda ts: ts.update({name: change(ts[name])})
    )
    with pytest.raises(CheckpointError, match=rf"\.2\.{projection}_proj\.{kind} {in_loader}"):
        load(path)


@pytest.mark.parametrize(
    ("projection", "kind", "value", "text"),
    [
        ("gate", "weight_scale", float("nan"), "NaN or negative in places"),
        ("down", "weight_scale", -1.0, "NaN or negative in places"),
        ("up", "weight_scale_2", -0.5, r"-0\.5"),
        ("gate", "weight_scale_2", float("nan"), "nan"),
        ("down", "weight_scale_2", float("inf"), "inf"),
    ],
)
def test_damaged_scale_is_named(projection, kind, value, text, tmp_path):
    name = expert_tensor(1, 4, projection, kind)

    def edit(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[:1] = value

    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit)
    text = rf"layers\.1\..*\.4\.{projection}_proj\.{kind} is {text}\. Expected: finite scales"
    with pytest.raises(CheckpointError, match=text):
        load(path)


# Quantization sections


def _section(**changes: Any):
    """An edit of config.json's section; None removes a key."""

    def edit(content: dict[str, Any]) -> None:
        for key, value in changes.items():
            content["quantization_config"].pop(key, None)
            if value is not None:
                content["quantization_config"][key] = value

    return edit


def _group_size_inside(content: dict[str, Any]) -> None:
    groups = content["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["group_size"] = 32


def _empty_algorithm(content: dict[str, Any]) -> None:
    content["quantization_config"]["quant_algo"] = ""


def _null_algorithm(content: dict[str, Any]) -> None:
    content["quantization_config"]["quant_algo"] = None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (_section(quant_algo="FP8"), r"quant_algo 'FP8'\. Expected: quant_algo 'NVFP4', 'W4A16"),
        (_section(quant_algo="NVFP4_AWQ"), r"quant_algo 'NVFP4_AWQ' .*pre_quant_scale"),
        (_section(quant_algo="NVFP4_SVD"), r"quant_algo 'NVFP4_SVD' .*SVDQuant"),
        (_section(quant_algo="W4A8_NVFP4_FP8"), r"'W4A8_NVFP4_FP8' .*made for FP8 activations"),
        (_section(quant_algo="MIXED_PRECISION"), r"mixed checkpoint .*without a map of its layers"),
        (_section(quant_algo=None), r"quant_algo None\. Expected: quant_algo 'NVFP4'"),
        (_null_algorithm, r"quant_algo None\. Expected: quant_algo 'NVFP4'"),
        (_empty_algorithm, r"quant_algo ''\. Expected: quant_algo 'NVFP4'"),
        (_section(group_size=32), r"has group_size = 32\. Expected: 16 values per block scale"),
        (_group_size_inside, r"config_groups\.group_0\.weights\.group_size = 32\. Expected: 16"),
        (
            _section(quant_method="fp8"),
            r"quant_method 'fp8'\. Expected: an NVFP4 checkpoint of ModelOpt .* or llm-compressor",
        ),
        (_section(kv_cache_scheme="INT4"), r"KV cache scheme 'INT4'\. Expected: FP8, NVFP4 or"),
        (_section(ignore="lm_head"), r"list of excluded modules is 'lm_head'"),
    ],
)
def test_other_quantization_is_refused_at_the_start(config, text, tmp_path):
    path = make_case(EXPERTS_ONLY, tmp_path / "case", config=config)
    with pytest.raises(ValueError, match=text) as caught:
        engine_config(path)
    assert "Way out:" in str(caught.value)
    assert str(path) in str(caught.value)


def test_lower_case_algorithm_is_the_same_algorithm(tmp_path, experts_only):
    path = make_case(EXPERTS_ONLY, tmp_path / "case", config=_section(quant_algo="nvfp4"))
    assert_bitwise(load(path), experts_only)


def test_model_without_experts_is_refused_from_its_headers(tmp_path):
    """NVFP4, but dense: nothing in it would run per-token."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            del tensors[name]

    path = make_case(ALL_NVFP4, tmp_path / "case", edit=edit)
    text = r"has no NVFP4 experts: 0 MoE layers .* 8 NVFP4 dense layers.*--quantization"
    with pytest.raises(ValueError, match=text):
        engine_config(path)


def _excluding(*modules: str):
    def edit(content: dict[str, Any]) -> None:
        section = content.get("quantization_config") or content["quantization"]
        key = "ignore" if "ignore" in section else "exclude_modules"
        section[key] = [*section[key], *modules]

    return edit


def _to_bf16(tensors: Tensors, layers: range) -> None:
    """Undo the quantization of some layers' experts."""
    for layer in layers:
        for expert in range(EXPERTS):
            for projection in ("gate", "up", "down"):
                name = expert_tensor(layer, expert, projection, "weight")
                tensors.pop(expert_tensor(layer, expert, projection, "input_scale"))
                tensors[name] = nvfp4.dequantize(
                    tensors[name], tensors.pop(name + "_scale"), tensors.pop(name + "_scale_2")
                ).bfloat16()


def test_model_whose_experts_are_all_excluded_is_refused_by_the_loader(tmp_path, unchecked_files):
    path = make_case(
        EXPERTS_ONLY,
        tmp_path / "case",
        edit=lambda tensors: _to_bf16(tensors, range(LAYERS)),
        config=_excluding("model.layers.*.mlp.experts*"),
    )
    text = r"no MoE layer with NVFP4 experts \(excluded modules: .*layers\.\*\.mlp\.experts.*\)"
    with pytest.raises(CheckpointError, match=text):
        load(path)


def test_excluded_moe_layer_stays_bf16_beside_the_others(tmp_path, experts_only):
    path = make_case(
        EXPERTS_ONLY,
        tmp_path / "case",
        edit=lambda tensors: _to_bf16(tensors, range(1, 2)),
        config=_excluding("model.layers.1.mlp.experts*"),
    )
    with loaded_model(path) as (config, model):
        quantized, plain = moe_layers(model)
        assert type(quantized.quant_method).__name__ == "ModelOptNvFp4PerTokenMoEMethod"
        assert type(plain.quant_method).__name__ == "UnquantizedFusedMoEMethod"
        assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
        out = run_moe(config, quantized, *moe_inputs())
    assert_bitwise({"out": out}, {"out": experts_only["moe 0"]})


def _drop_section(content: dict[str, Any]) -> None:
    del content["quantization_config"]


def test_legacy_file_alone(tmp_path, experts_only):
    path = make_case(EXPERTS_ONLY, tmp_path / "case", config=_drop_section)
    assert_bitwise(load(path), experts_only)


def test_config_json_alone(tmp_path, experts_only):
    path = make_case(EXPERTS_ONLY, tmp_path / "case")
    (path / "hf_quant_config.json").unlink()
    assert_bitwise(load(path), experts_only)


def test_ignore_list_may_be_called_exclude_modules(tmp_path, experts_only):
    def rename(content: dict[str, Any]) -> None:
        section = content["quantization_config"]
        section["exclude_modules"] = section.pop("ignore")

    path = make_case(EXPERTS_ONLY, tmp_path / "case", config=rename)
    (path / "hf_quant_config.json").unlink()
    assert_bitwise(load(path), experts_only)


def test_section_without_quant_method_and_groups(tmp_path, experts_only):
    """As ModelOpt 0.31 to 0.34 wrote it."""
    path = make_case(
        EXPERTS_ONLY, tmp_path / "case", config=_section(quant_method=None, config_groups=None)
    )
    assert_bitwise(load(path), experts_only)


def test_mixtral_with_the_same_experts_computes_the_same(tmp_path, experts_only):
    """Other names for the same tensors: `block_sparse_moe.experts.E.w1`, `w3` and `w2`."""
    renames = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if "q_norm" not in name and "k_norm" not in name:
                tensors[".".join(renames.get(part, part) for part in name.split("."))] = tensor

    def config(content: dict[str, Any]) -> None:
        content.update(
            architectures=["MixtralForCausalLM"],
            model_type="mixtral",
            intermediate_size=INTERMEDIATE,
        )
        section = content["quantization_config"]
        section["ignore"] = [name.replace("mlp", "block_sparse_moe") for name in section["ignore"]]

    path = make_case(EXPERTS_ONLY, tmp_path / "case", edit=edit, config=config)
    with loaded_model(path) as (engine, model):
        outputs = [run_moe(engine, layer, *moe_inputs()) for layer in moe_layers(model)]
    for index, output in enumerate(outputs):
        assert_bitwise({"out": output}, {"out": experts_only[f"moe {index}"]})
    # And the errors are in this family's words.
    missing = "model.layers.1.block_sparse_moe.experts.2.w3.weight_scale"
    bad = make_case(path, tmp_path / "bad", edit=lambda tensors: tensors.pop(missing))
    with pytest.raises(ValueError, match=rf"{re.escape(missing)} is missing"):
        engine_config(bad)


def test_legacy_file_is_checked_as_well(tmp_path):
    def fp8(content: dict[str, Any]) -> None:
        content["quantization"]["quant_algo"] = "FP8"

    path = make_case(EXPERTS_ONLY, tmp_path / "case", config=_drop_section, hf_quant_config=fp8)
    with pytest.raises(ValueError, match=r"quant_algo 'FP8'\. Expected: quant_algo 'NVFP4'"):
        engine_config(path)


@pytest.mark.parametrize("where", ["dict", "string", "legacy"])
def test_fp8_kv_cache_scales_are_loaded(where, tmp_path):
    def edit(tensors: Tensors) -> None:
        for layer in range(LAYERS):
            attention = f"model.layers.{layer}.self_attn"
            tensors[f"{attention}.k_proj.k_scale"] = torch.tensor(0.25 + layer)
            tensors[f"{attention}.v_proj.v_scale"] = torch.tensor(0.5 + layer)

    def legacy(content: dict[str, Any]) -> None:
        content["quantization"]["kv_cache_quant_algo"] = "FP8"

    schemes = {"dict": {"dynamic": False, "num_bits": 8, "type": "float"}, "string": "FP8"}
    path = make_case(
        ALL_NVFP4,
        tmp_path / "case",
        edit=edit,
        config=_drop_section if where == "legacy" else _section(kv_cache_scheme=schemes[where]),
        hf_quant_config=legacy if where == "legacy" else None,
    )
    with loaded_model(path) as (config, model):
        assert config.cache_config.cache_dtype.startswith("fp8")
        for layer in range(LAYERS):
            attention = model.model.layers[layer].self_attn.attn
            assert type(attention.quant_method).__name__ == "_KVCacheMethod"
            assert attention._k_scale.item() == 0.25 + layer
            assert attention._v_scale.item() == 0.5 + layer


# Arguments of the engine


def _backends() -> list[str]:
    from vllm.config.kernel import MoEBackend

    return list(get_args(MoEBackend))


def test_vllm_still_knows_the_accepted_backends():
    assert set(ACCEPTED_BACKENDS) <= set(_backends())


def test_accepted_backends_compute_what_the_reference_does(backend):
    with loaded_model(EXPERTS_ONLY, moe_backend=backend) as (config, model):
        assert_layers_match_reference(EXPERTS_ONLY, config, model)


@pytest.mark.parametrize("backend", ["triton", "flashinfer_trtllm", "flashinfer_cutedsl"])
def test_backends_for_gpus_need_one(backend):
    text = rf"--moe-backend {backend} cannot run here: .*platform is cpu.*leave --moe-backend out"
    with pytest.raises(UnsupportedError, match=text):
        load(EXPERTS_ONLY, moe_backend=backend)


# vLLM itself keeps this one to a single family of models.
_REFUSED_BY_VLLM = "flashinfer_moe_ep_mega_deep_gemm"


@pytest.mark.parametrize(
    "backend", [b for b in _backends() if b not in (*ACCEPTED_BACKENDS, _REFUSED_BY_VLLM)]
)
def test_other_backends_are_refused(backend):
    text = rf"--moe-backend {backend} cannot run .*Expected: auto \(.*or emulation \("
    with pytest.raises(UnsupportedError, match=text):
        load(EXPERTS_ONLY, moe_backend=backend)


def test_backend_that_vllm_keeps_to_other_models_is_refused():
    text = rf"moe_backend='{_REFUSED_BY_VLLM}' is only supported for DeepSeek-V4"
    with pytest.raises(ValueError, match=text):
        engine_config(EXPERTS_ONLY, moe_backend=_REFUSED_BY_VLLM)


def test_the_4over6_recipe_of_flashinfer_is_refused(monkeypatch):
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    with pytest.raises(UnsupportedError, match=r"4over6 recipe.*unset FLASHINFER_NVFP4_4OVER6"):
        load(EXPERTS_ONLY)


def test_lora_is_refused():
    with pytest.raises(UnsupportedError, match=r"experts: LoRA is on \(--enable-lora\)"):
        load(EXPERTS_ONLY, enable_lora=True)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"liner": "static"}, r"\{'liner': 'static'\}: liner: Extra inputs.*linear \("),
        ({"linear": "fast"}, r"linear: Input should be 'static' or 'per_token'"),
        (["linear"], r"nvfp4_per_token: Input should be a valid dictionary"),
    ],
)
def test_options_that_are_not_known_are_refused(section, text):
    with pytest.raises(UnsupportedError, match=text):
        load(EXPERTS_ONLY, additional_config={"nvfp4_per_token": section})


def test_options_of_others_are_none_of_our_business(experts_only):
    assert_bitwise(load(EXPERTS_ONLY, additional_config={"other": {"liner": 1}}), experts_only)


# Dense layers


def test_dense_layers_run_with_the_static_scales_of_their_checkpoint():
    tensors = read_tensors(ALL_NVFP4)
    with loaded_model(ALL_NVFP4, additional_config=STATIC_LINEAR) as (_, model):
        for index, layer in enumerate(model.model.layers):
            for name, dense in _dense_of(layer.self_attn):
                _assert_dense(tensors, index, name, dense, static=True)


def test_dense_layers_run_per_token_without_input_scales():
    tensors = read_tensors(NO_CALIBRATION)
    assert not [name for name in tensors if "input_scale" in name]
    with loaded_model(NO_CALIBRATION) as (config, model):
        assert not [name for name, _ in model.named_parameters() if "input_scale" in name]
        assert_layers_match_reference(NO_CALIBRATION, config, model)
        for index, layer in enumerate(model.model.layers):
            for name, dense in _dense_of(layer.self_attn):
                _assert_dense(tensors, index, name, dense, static=False)


@pytest.mark.parametrize("mode", ["static", "per_token"])
def test_fused_parts_keep_their_own_weight_scale_2(mode, tmp_path):
    def edit(tensors: Tensors) -> None:
        for name in tensors:
            for part, factor in (("q_proj", 1.0), ("k_proj", 3.0), ("v_proj", 0.1)):
                if f"{part}.weight_scale_2" in name:
                    tensors[name] = tensors[name] * factor
                if f"{part}.input_scale" in name:
                    tensors[name] = tensors[name] * (1 + factor)

    path = make_case(ALL_NVFP4, tmp_path / "case", edit=edit)
    tensors = read_tensors(path)
    options = {"nvfp4_per_token": {"linear": mode}}
    with loaded_model(path, additional_config=options) as (_, model):
        dense = model.model.layers[1].self_attn.qkv_proj
        assert dense.weight_scale_2.dtype == torch.float32
        assert torch.equal(
            dense.weight_scale_2.data,
            torch.stack(
                [
                    tensors[f"model.layers.1.self_attn.{part}_proj.weight_scale_2"]
                    for part in ("q", "k", "v")
                ]
            ),
        )
        assert len(set(dense.weight_scale_2.tolist())) == 3
        _assert_dense(tensors, 1, ("q", "k", "v"), dense, static=mode == "static")


def _dense_of(attention: Any) -> list[tuple[tuple[str, ...], Any]]:
    return [(("q", "k", "v"), attention.qkv_proj), (("o",), attention.o_proj)]


def _assert_dense(
    tensors: Tensors, layer: int, parts: tuple[str, ...], dense: Any, static: bool
) -> None:
    """Bits of the reference part by part; per-token also near the product in float64."""
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    actual = dense(rows)[0]
    start = 0
    for part in parts:
        stem = f"model.layers.{layer}.self_attn.{part}_proj"
        weight, scale, scale_2 = (
            tensors[f"{stem}.{kind}"] for kind in ("weight", "weight_scale", "weight_scale_2")
        )
        input_scale = tensors[f"{stem}.input_scale"].reshape(1) if static else None
        expected = linear_forward(
            rows, weight, scale, scale_2.reshape(1), [weight.shape[0]], input_scale
        )
        piece = actual[:, start : start + weight.shape[0]]
        start += weight.shape[0]
        assert_bitwise({part: piece}, {part: expected})
        if not static:
            exact_rows = nvfp4.dequantize(*nvfp4.quantize_per_token(rows))
            exact_weight = nvfp4.dequantize(weight, scale, scale_2)
            bound = matmul_bound(exact_rows, exact_weight, torch.bfloat16)
            # Two more roundings: of the product of the two scales, and of its product with a sum.
            exact = exact_rows.double() @ exact_weight.double().T
            assert_rows_close(piece, exact, bound * (1 + 2.0**-20) + exact.abs() * 2.0**-22)
    assert start == actual.shape[1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "nan"), (0.0, r"0\.0"), (float("inf"), "inf"), (float("nan"), "nan"), (-1.0, r"-1\.0")],
)
@pytest.mark.parametrize("part", ["k", "o"])
def test_unusable_static_scale_is_refused_with_the_way_out(part, value, shown, tmp_path):
    name = f"model.layers.1.self_attn.{part}_proj.input_scale"

    def edit(tensors: Tensors) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = torch.tensor(value)

    path = make_case(ALL_NVFP4, tmp_path / "case", edit=edit)
    layer = {"k": "qkv_proj", "o": "o_proj"}[part]
    text = rf"layers\.1\.self_attn\.{layer}: input_scale is \[.*{shown}.*\].*leave the option"
    with pytest.raises(CheckpointError, match=text):
        load(path, additional_config=STATIC_LINEAR)
    load(path)


@pytest.mark.parametrize("part", ["q", "v"])
def test_dense_layer_without_block_scales_is_refused(part, tmp_path, unchecked_files):
    name = f"model.layers.0.self_attn.{part}_proj.weight_scale"
    path = make_case(ALL_NVFP4, tmp_path / "case", edit=lambda tensors: tensors.pop(name))
    text = rf"layers\.0.*qkv_proj: part {'qkv'.index(part)} of 3 has a weight_scale that is NaN"
    with pytest.raises(CheckpointError, match=text):
        load(path)


def test_dense_layer_of_zeros_with_nan_scales_gives_zeros(tmp_path):
    """As ModelOpt writes it."""

    def edit(tensors: Tensors) -> None:
        stem = "model.layers.0.self_attn.k_proj.weight"
        tensors[stem].zero_()
        tensors[f"{stem}_scale"].view(torch.uint8).fill_(0xFF)
        tensors[f"{stem}_scale_2"].zero_()

    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    with loaded_model(make_case(ALL_NVFP4, tmp_path / "case", edit=edit)) as (_, model):
        dense = model.model.layers[0].self_attn.qkv_proj
        q, k, v = dense(rows)[0].split(dense.logical_widths, dim=1)
    assert torch.count_nonzero(k) == 0
    assert q.isfinite().all()
    assert v.abs().sum() > 0


@pytest.mark.parametrize("mode", ["static", "per_token"])
def test_dense_layer_without_weight_scale_2_is_refused(mode, tmp_path, unchecked_files):
    name = "model.layers.0.self_attn.v_proj.weight_scale_2"
    path = make_case(ALL_NVFP4, tmp_path / "case", edit=lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"layers\.0.*qkv_proj: weight_scale_2 is .*absent"):
        load(path, additional_config={"nvfp4_per_token": {"linear": mode}})


def test_quantized_lm_head_is_a_dense_layer(tmp_path):
    tensors = read_tensors(ALL_NVFP4)
    weight, scale, scale_2 = nvfp4.quantize_weight(tensors["lm_head.weight"])

    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = weight
        tensors["lm_head.weight_scale"] = scale
        tensors["lm_head.weight_scale_2"] = scale_2.reshape(())
        tensors["lm_head.input_scale"] = torch.tensor(0.01)

    def config(content: dict[str, Any]) -> None:
        content["quantization_config"]["ignore"].remove("lm_head")

    path = make_case(ALL_NVFP4, tmp_path / "case", edit=edit, config=config)
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    for options, input_scale in ((STATIC_LINEAR, torch.tensor([0.01])), ({}, None)):
        with loaded_model(path, additional_config=options) as (_, model):
            logits = model.lm_head.quant_method.apply(model.lm_head, rows)
        expected = linear_forward(
            rows, weight, scale, scale_2.reshape(1), [weight.shape[0]], input_scale
        )
        assert_bitwise({"logits": logits}, {"logits": expected})


# Registration


def test_registering_again_changes_nothing(experts_only):
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        get_quantization_config,
    )

    import vllm_nvfp4_pertoken

    vllm_nvfp4_pertoken.register()
    before = list(QUANTIZATION_METHODS), get_quantization_config("nvfp4_per_token")
    vllm_nvfp4_pertoken.register()
    assert (list(QUANTIZATION_METHODS), get_quantization_config("nvfp4_per_token")) == before
    assert before[1].__module__ == "vllm_nvfp4_pertoken.engine.registration"
    assert len(set(before[0])) == len(before[0])
    assert_bitwise(load(EXPERTS_ONLY), experts_only)


def test_import_is_light():
    script = (
        "import json, sys, time; start = time.perf_counter(); import vllm_nvfp4_pertoken; "
        "took = time.perf_counter() - start; "
        "print(json.dumps([took, [m for m in ('vllm', 'torch', 'numpy') if m in sys.modules]]))"
    )
    results = [
        json.loads(
            subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
        )
        for _ in range(5)
    ]
    assert [heavy for _, heavy in results] == [[]] * 5
    assert min(took for took, _ in results) < 0.1
