"""Both places where ModelOpt describes a checkpoint, in the shapes that its versions wrote."""

import json
from typing import Any

import pytest
from cases import ALL_NVFP4, EXPERTS_ONLY

from vllm_nvfp4_pertoken.checkpoints.quant_config import (
    QuantDescription,
    parse_quant_config,
    reconcile,
)
from vllm_nvfp4_pertoken.errors import CheckpointError


def section(**changes: Any) -> dict[str, Any]:
    config = json.loads((EXPERTS_ONLY / "config.json").read_text())["quantization_config"]
    return {**config, **changes}


def legacy(**changes: Any) -> dict[str, Any]:
    config = json.loads((EXPERTS_ONLY / "hf_quant_config.json").read_text())
    return {**config, "quantization": {**config["quantization"], **changes}}


def parse(config: dict[str, Any]) -> QuantDescription:
    return parse_quant_config(config, source="the config")


@pytest.mark.parametrize("path", [EXPERTS_ONLY, ALL_NVFP4], ids=lambda path: path.name)
def test_both_places_say_the_same(path):
    new = json.loads((path / "config.json").read_text())["quantization_config"]
    old = json.loads((path / "hf_quant_config.json").read_text())
    assert parse(new) == parse(old)
    assert parse(new).quant_algo == "NVFP4"
    assert "lm_head" in parse(new).exclude_modules
    assert reconcile(parse(new), parse(old)) == (parse(new), [])


def test_weight_only_by_name_and_by_its_groups():
    assert parse(section(quant_algo="w4a16_nvfp4")).quant_algo == "W4A16_NVFP4"
    groups = section()["config_groups"]
    del groups["group_0"]["input_activations"]
    assert parse(section(config_groups=groups)).quant_algo == "W4A16_NVFP4"
    assert parse(section(config_groups={})).quant_algo == "NVFP4"


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (None, None),
        ("FP8", "FP8"),
        ("fp8", "FP8"),
        ("NVFP4", "NVFP4"),
        ({"dynamic": False, "num_bits": 8, "type": "float"}, "FP8"),
        ({"dynamic": True, "num_bits": 4, "type": "float"}, "NVFP4"),
    ],
)
def test_kv_cache(scheme, expected):
    assert parse(section(kv_cache_scheme=scheme)).kv_cache_quant_algo == expected


@pytest.mark.parametrize("scheme", ["INT8", {"num_bits": 8, "type": "int"}, 8])
def test_other_kv_cache_is_refused(scheme):
    with pytest.raises(CheckpointError, match=r"KV cache scheme .*Expected: FP8, NVFP4 or none"):
        parse(section(kv_cache_scheme=scheme))


MIXED = {
    "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.self_attn.o_proj": {"quant_algo": "fp8"},
}


@pytest.mark.parametrize("nesting", range(3))
def test_mixed(nesting):
    layers: dict[str, Any] = MIXED
    for _ in range(nesting):
        layers = {"quantized_layers": layers}
    for config in (
        section(quant_algo="mixed_precision", quantized_layers=layers, ignore=[]),
        legacy(quant_algo="MIXED_PRECISION", quantized_layers=layers, exclude_modules=[]),
    ):
        description = parse(config)
        assert description.quant_algo == "MIXED_PRECISION"
        assert description.layers == {
            "model.layers.0.mlp.experts": "NVFP4",
            "model.layers.0.self_attn.o_proj": "FP8",
        }


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"a": {"quant_algo": "NVFP4_AWQ"}}, r"config: a has quant_algo 'NVFP4_AWQ'.*pre_quant"),
        ({"a": {"quant_algo": "NVFP4", "group_size": 32}}, r"config: a has group_size = 32"),
        ({"a": "NVFP4"}, r"quantized_layers has 'a': 'NVFP4'\. Expected: an object"),
        (["a"], r"quantized_layers has .*\['a'\]\. Expected: an object"),
    ],
)
def test_mixed_that_cannot_be_served_is_refused(layers, text):
    with pytest.raises(CheckpointError, match=text):
        parse(section(quant_algo="MIXED_PRECISION", quantized_layers=layers))


def test_groups_of_fp8_layers_have_their_own_size():
    groups = {
        "group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": 128}},
        "group_1": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}},
    }
    mixed = section(quant_algo="MIXED_PRECISION", quantized_layers=MIXED, config_groups=groups)
    assert parse(mixed).group_size == 16
    groups["group_1"]["weights"]["group_size"] = 32
    with pytest.raises(CheckpointError, match=r"group_1\.weights\.group_size = 32"):
        parse(mixed)


def test_sentinels_in_names_are_dropped():
    """As ModelOpt 0.46 and 0.47 write them for Nemotron-H."""
    names = ["lm_head.\x00backbone.pt_name_sentinel", "backbone.x\x00backbone.pt_name_sentinel"]
    assert parse(section(ignore=names)).exclude_modules == ("lm_head", "backbone.x")


def test_config_json_wins_and_the_difference_is_told():
    ours = parse(section(kv_cache_scheme=None))
    ignore = ["lm_head", "model.embed_tokens", "model.layers.0*", "extra"]
    theirs = parse(legacy(kv_cache_quant_algo="FP8", exclude_modules=ignore))
    description, disagreements = reconcile(ours, theirs)
    assert description == ours
    assert disagreements[0] == (
        "config.json has kv_cache_quant_algo None, hf_quant_config.json 'FP8'; config.json wins"
    )
    assert disagreements[1:] == [
        "hf_quant_config.json does not exclude model.layers.0.mlp.gate, model.layers.0.self_attn*, "
        "model.layers.1.mlp.gate, model.layers.1.self_attn*, which config.json does; config.json "
        "wins",
        "config.json does not exclude extra, model.layers.0*, which hf_quant_config.json does; "
        "config.json wins",
    ]


def test_order_of_excluded_modules_is_no_difference():
    ours = parse(section())
    theirs = parse(section(ignore=list(reversed(section()["ignore"]))))
    assert reconcile(ours, theirs) == (ours, [])


def test_map_of_layers_may_be_in_the_legacy_file_only():
    ours = parse(section(quant_algo="MIXED_PRECISION", ignore=[]))
    theirs = parse(legacy(quant_algo="MIXED_PRECISION", quantized_layers=MIXED, exclude_modules=[]))
    description, disagreements = reconcile(ours, theirs)
    assert ours.layers == {}
    assert description.layers == theirs.layers != {}
    assert disagreements == []
