"""Names of modules in every dialect, and formats from tensors."""

import pytest

from vllm_nvfp4_pertoken.checkpoints.modules import (
    algorithm_of,
    is_excluded,
    stored_algorithm,
    stored_formats,
)
from vllm_nvfp4_pertoken.errors import CheckpointError

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = "model.layers.0.self_attn"
QKV = [f"{ATTENTION}.{part}_proj" for part in "qkv"]
EXPERTS = "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("module", "patterns"),
    [
        pytest.param("lm_head", ["lm_head"], id="exact"),
        pytest.param(f"{ATTENTION}.qkv_proj", [f"{ATTENTION}*"], id="wildcard"),
        pytest.param(f"{ATTENTION}.o_proj", [f"{ATTENTION}.*"], id="wildcard of children"),
        pytest.param(f"{ATTENTION}.o_proj", ["*self_attn*"], id="wildcard on both sides"),
        pytest.param(f"{ATTENTION}.o_proj", [ATTENTION], id="container"),
        pytest.param(f"{ATTENTION}.qkv_proj", QKV, id="all parts"),
        pytest.param(f"{ATTENTION}.qkv_proj", [f"{ATTENTION}.qkv_proj"], id="fused name"),
        pytest.param(f"{ATTENTION}.o_proj", ["self_attn.o_proj"], id="without a path"),
        pytest.param("language_model.model.layers.0.mlp.gate", ["model.layers.0.mlp.gate"], id="1"),
        pytest.param("model.layers.0.mlp.gate", ["language_model.model.layers.0.mlp.gate"], id="2"),
        pytest.param(
            "language_model.model.layers.0.mlp.gate",
            ["model.language_model.layers.0.mlp.gate*"],
            id="language model inside, and outside",
        ),
        pytest.param("language_model.lm_head", ["lm_head"], id="head of a language model"),
        pytest.param("visual.blocks.0.attn.qkv", ["visual"], id="tower"),
        pytest.param(EXPERTS, [EXPERTS], id="experts"),
        pytest.param(EXPERTS, [f"{EXPERTS}*"], id="experts by wildcard"),
        pytest.param(EXPERTS, [f"{EXPERTS}.0.down_proj"], id="an expert's module"),
        pytest.param(EXPERTS, ["*.experts.*.down_proj"], id="modules of all experts"),
        pytest.param(EXPERTS, ["model.layers.3*"], id="a layer"),
    ],
)
def test_excluded(module, patterns):
    assert is_excluded(module, patterns, PACKED)
    assert is_excluded(module, ["something.else", *patterns], PACKED)


@pytest.mark.parametrize(
    ("module", "patterns"),
    [
        pytest.param("lm_head", ["head"], id="part of a word"),
        pytest.param("model.layers.0.mlp.gate_up_proj", ["model.layers.0.mlp.gate"], id="router"),
        pytest.param("model.layers.10.mlp.gate", ["model.layers.1"], id="number"),
        pytest.param(f"{ATTENTION}.o_proj", QKV, id="siblings"),
        pytest.param(EXPERTS, ["model.layers.3.mlp.shared_experts*"], id="shared experts"),
        pytest.param("model.layers.3.mlp.shared_expert.down_proj", ["shared_expert_gate"], id="sg"),
        pytest.param("mtp.layers.0.mlp.gate", ["model.layers.0.mlp.gate"], id="draft"),
        pytest.param("anything", [], id="nothing"),
    ],
)
def test_not_excluded(module, patterns):
    assert not is_excluded(module, patterns, PACKED)


def test_half_of_a_fused_layer_is_refused():
    with pytest.raises(CheckpointError, match=r"q_proj is excluded .* but not .*k_proj, .*v_proj"):
        is_excluded(f"{ATTENTION}.qkv_proj", QKV[:1], PACKED)


@pytest.mark.parametrize(
    ("module", "layers", "expected"),
    [
        pytest.param("lm_head", {"lm_head": "NVFP4"}, "NVFP4", id="exact"),
        pytest.param(f"{ATTENTION}.qkv_proj", dict.fromkeys(QKV, "FP8"), "FP8", id="parts"),
        pytest.param(EXPERTS, {EXPERTS: "NVFP4"}, "NVFP4", id="container, transformers 5"),
        pytest.param(EXPERTS, {f"{EXPERTS}.0.up_proj": "NVFP4"}, "NVFP4", id="transformers 4"),
        pytest.param(EXPERTS, {"model.layers.3.mlp.gate_proj": "NVFP4"}, "NVFP4", id="no experts"),
        pytest.param(EXPERTS, {"model.layers.3.mlp.shared_experts.up_proj": "FP8"}, None, id="sh"),
        pytest.param(f"{ATTENTION}.o_proj", {ATTENTION: "FP8"}, "FP8", id="container"),
        pytest.param(f"{ATTENTION}.o_proj", dict.fromkeys(QKV, "FP8"), None, id="absent"),
        pytest.param(
            "language_model.model.layers.3.mlp.experts",
            {"model.language_model.layers.3.mlp.experts": "NVFP4"},
            "NVFP4",
            id="multimodal",
        ),
    ],
)
def test_algorithm(module, layers, expected):
    assert algorithm_of(module, {"other": "MXFP8", **layers}, PACKED) == expected


@pytest.mark.parametrize(
    "layers", [{QKV[0]: "FP8", QKV[1]: "NVFP4", QKV[2]: "FP8"}, {QKV[0]: "FP8"}]
)
def test_different_algorithms_in_one_layer_are_refused(layers):
    with pytest.raises(CheckpointError, match=r"qkv_proj: .*q_proj is FP8.*Expected: the same"):
        algorithm_of(f"{ATTENTION}.qkv_proj", layers, PACKED)


def nvfp4(module: str) -> list[tuple[str, str, int]]:
    return [(f"{module}.weight", "U8", 2), (f"{module}.weight_scale", "F8_E4M3", 2)]


TENSORS = [
    *nvfp4("lm_head"),
    ("model.norm.weight", "BF16", 1),
    *((f"{part}.weight", "F8_E4M3", 2) for part in QKV),
    *((f"{part}.weight_scale", "F32", 0) for part in QKV),
    ("mtp.fc.weight", "BF16", 2),
    *(t for expert in range(3) for t in nvfp4(f"{EXPERTS}.{expert}.down_proj")),
    ("model.layers.4.mlp.experts.0.up_proj.weight", "F16", 2),
    *nvfp4("model.layers.5.mlp.experts.0.up_proj"),
    ("model.layers.5.mlp.experts.1.up_proj.weight", "BF16", 2),
    ("model.layers.6.mlp.experts.gate_up_proj", "U8", 3),
    ("model.layers.6.mlp.experts.gate_up_proj_weight_scale", "F8_E4M3", 3),
    ("packed.weight_packed", "U8", 2),
    ("packed.weight_scale", "F8_E4M3", 2),
    ("mxfp4.weight", "U8", 2),
    ("mxfp4.weight_scale", "U8", 2),
]


def test_formats_from_tensors():
    stored = stored_formats(TENSORS)
    assert stored == {
        "lm_head": "NVFP4",
        **dict.fromkeys(QKV, "FP8"),
        "mtp.fc": "BF16",
        EXPERTS: "NVFP4",
        "model.layers.4.mlp.experts": "FP16",
        "model.layers.6.mlp.experts": "NVFP4",
        "packed": "NVFP4",
    }
    assert stored_algorithm(f"{ATTENTION}.qkv_proj", stored, PACKED) == "FP8"
    assert stored_algorithm(EXPERTS, stored, PACKED) == "NVFP4"
    assert stored_algorithm("model.layers.5.mlp.experts", stored, PACKED) is None
    stored[QKV[1]] = "NVFP4"
    with pytest.raises(CheckpointError, match=r"q_proj is stored in FP8, .*k_proj .* in NVFP4"):
        stored_algorithm(f"{ATTENTION}.qkv_proj", stored, PACKED)
