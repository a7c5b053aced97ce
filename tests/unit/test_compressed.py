"""Config sections of compressed-tensors, and the modules that their targets and patterns mean."""

import json
import subprocess
import sys
from typing import Any

import pytest
from cases import ALL_NVFP4, COMPRESSED

from vllm_nvfp4_pertoken.checkpoints.compressed import algorithm_of_target, renamed
from vllm_nvfp4_pertoken.checkpoints.quant_config import QuantDescription, parse_quant_config
from vllm_nvfp4_pertoken.checkpoints.verify import verify_checkpoint
from vllm_nvfp4_pertoken.errors import CheckpointError

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"
LINEAR = {"Linear": "NVFP4"}


def section(**changes: Any) -> dict[str, Any]:
    config = json.loads((COMPRESSED / "config.json").read_text())["quantization_config"]
    return {**config, **changes}


def group(**changes: Any) -> dict[str, Any]:
    return {**section()["config_groups"]["group_0"], **changes}


def numbers(**changes: Any) -> dict[str, Any]:
    return {**group()["weights"], **changes}


def parse(config: dict[str, Any]) -> QuantDescription:
    return parse_quant_config(config, source="the config")


def test_what_llm_compressor_writes():
    description = parse(section())
    assert description.quant_algo == "NVFP4"
    assert description.dialect == "compressed-tensors"
    assert description.layers == LINEAR
    assert "lm_head" in description.exclude_modules
    assert description.kv_cache_quant_algo is None


@pytest.mark.parametrize(
    "groups",
    [
        {"group_0": group(input_activations=None)},
        {"NVFP4A16": ["Linear"]},  # a scheme of the package, by name
    ],
    ids=["described", "named"],
)
def test_weight_only(groups):
    description = parse(section(config_groups=groups))
    assert description.quant_algo == "W4A16_NVFP4"
    assert description.layers == {"Linear": "W4A16_NVFP4"}


def test_groups_of_one_format_and_a_format_for_each():
    groups = {"a": group(targets=["re:.*mlp.*"]), "b": group(targets=[f"{ATTENTION}.o_proj"])}
    description = parse(section(config_groups=groups, format="mixed-precision"))
    assert description.layers == {"re:.*mlp.*": "NVFP4", f"{ATTENTION}.o_proj": "NVFP4"}


def test_kv_cache():
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    attention = group(targets=["Qwen3MoeAttention"], weights=None, format=None)
    groups = {"group_0": group(), "attention": attention}
    description = parse(section(kv_cache_scheme=scheme, config_groups=groups))
    assert description.kv_cache_quant_algo == "FP8"
    assert description.layers == LINEAR
    with pytest.raises(CheckpointError, match=r"KV cache scheme .*Expected: FP8 or none"):
        parse(section(kv_cache_scheme={**scheme, "type": "int"}))


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"config_groups": {"g": group(format="pack-quantized")}}, r"groups\.g is .*'pack-quant"),
        ({"config_groups": {"g": group(format=None)}, "format": "int-quantized"}, "'int-quantized"),
        (
            {
                "format": "mixed-precision",
                "config_groups": {
                    "a": group(),
                    "b": group(
                        targets=["re:.*self_attn.*"],
                        weights=FP8,
                        input_activations=None,
                        format="float-quantized",
                    ),
                },
            },
            r"config_groups\.b is in the format 'float-quantized', for re:\.\*self_attn",
        ),
        ({"config_groups": {"g": group(weights=numbers(group_size=32))}}, r"g\.weights is .*32"),
        ({"config_groups": {"g": group(weights=None)}}, r"config_groups\.g\.weights is None"),
        (
            {"config_groups": {"g": group(input_activations=FP8 | {"strategy": "tensor"})}},
            r"inputs",
        ),
        ({"config_groups": {"g": group(output_activations=numbers())}}, r"output_activations is"),
        ({"config_groups": {}}, "has no config_groups"),
        ({"config_groups": {"g": {"targets": 3}}}, "not a section that compressed-tensors accepts"),
        ({"config_groups": {"W9A9": ["Linear"]}}, "not a section that compressed-tensors accepts"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "must be rotated or scaled"),
    ],
)
def test_refused(changes, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        parse(section(**changes))
    assert "Way out:" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "ignore"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers.0.mlp.gate", ["re:.*mlp.gate$"]),
        (f"{ATTENTION}.qkv_proj", [f"{ATTENTION}.{part}_proj" for part in "qkv"]),
        (f"{ATTENTION}.qkv_proj", ["re:.*self_attn.*"]),
        (EXPERTS, ["re:.*experts.*"]),
        (EXPERTS, [f"{EXPERTS}.0.down_proj"]),
        (EXPERTS, [EXPERTS]),
        ("language_model.model.layers.0.mlp.gate", [r"re:^model\.language_model\.layers\.0\."]),
        (f"{ATTENTION}.o_proj", ["Linear"]),
    ],
)
def test_ignored(module, ignore):
    assert algorithm_of_target(module, LINEAR, ignore, PACKED) is None
    assert algorithm_of_target(module, LINEAR, [], PACKED) == "NVFP4"


@pytest.mark.parametrize(
    ("module", "ignore"),
    [
        ("model.layers.0.mlp.gate_up_proj", ["re:.*mlp.gate$"]),
        (f"{ATTENTION}.o_proj", [ATTENTION, "o_proj"]),  # names are whole names here
        ("model.layers.10.mlp.gate_up_proj", ["model.layers.1"]),
        (EXPERTS, ["re:.*shared_expert.*"]),
    ],
)
def test_not_ignored(module, ignore):
    assert algorithm_of_target(module, LINEAR, ignore, PACKED) == "NVFP4"


def test_targets():
    layers = {"re:.*mlp.experts.*": "NVFP4", f"{ATTENTION}.o_proj": "W4A16_NVFP4"}
    assert algorithm_of_target(EXPERTS, layers, [], PACKED) == "NVFP4"
    assert algorithm_of_target(f"{ATTENTION}.o_proj", layers, [], PACKED) == "W4A16_NVFP4"
    assert algorithm_of_target(f"{ATTENTION}.qkv_proj", layers, [], PACKED) is None


def test_parts_that_differ_are_refused():
    with pytest.raises(CheckpointError, match=r"q_proj is None, .*k_proj is NVFP4"):
        algorithm_of_target(f"{ATTENTION}.qkv_proj", LINEAR, [f"{ATTENTION}.q_proj"], PACKED)


def test_names_are_renamed_and_patterns_are_not():
    names = ["model.layers.0.mlp.gate", "re:model.*", "Linear", "model.visual"]
    mapped = renamed(names, lambda name: None if "visual" in name else f"x.{name}")
    assert mapped == {
        "model.layers.0.mlp.gate": "x.model.layers.0.mlp.gate",
        "re:model.*": "re:model.*",
        "Linear": "Linear",
    }


def test_headers_are_verified():
    summary = verify_checkpoint(COMPRESSED)
    assert (summary.moe_layers, summary.dense_layers) == (2, 8)
    assert summary == verify_checkpoint(ALL_NVFP4)


def test_the_package_is_imported_only_for_its_checkpoints():
    """It takes seconds, and no ModelOpt checkpoint needs it."""
    program = f"""
import json, sys
from vllm_nvfp4_pertoken import cli
from vllm_nvfp4_pertoken.checkpoints import decide
from vllm_nvfp4_pertoken.checkpoints.quant_config import parse_quant_config
for path in {[str(ALL_NVFP4), str(COMPRESSED)]!r}:
    config = json.load(open(path + "/config.json"))["quantization_config"]
    parse_quant_config(config, source=path)
    print("compressed_tensors" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "True"], result.stderr
