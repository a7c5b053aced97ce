"""The weights of a checkpoint, by their kind of layer and by the layer that vLLM makes of them."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_nvfp4_pertoken.checkpoints.decide import is_draft
from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader
from vllm_nvfp4_pertoken.checkpoints.layout import (
    COMPRESSED_KINDS,
    EXPERT_TENSOR,
    FUSED_TENSOR,
    layout_of,
)
from vllm_nvfp4_pertoken.checkpoints.modules import format_of

__all__ = [
    "DRAFTS",
    "KINDS",
    "PACKED",
    "W2",
    "W13",
    "Weight",
    "by_unit",
    "collect_weights",
    "unequal",
]

# Projections that vLLM's models fuse into one layer, in their packed_modules_mapping.
PACKED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
W13, W2 = "routed experts w13", "routed experts w2"
# What the names of modules of a kind look like. The first that matches counts; experts and drafts
# are told apart before.
_PATTERNS = {
    "vision, audio": r"(^|\.)(visual|vision_\w+|vision|vit_\w+|audio_\w+|multi_modal_projector)\.",
    "shared experts": r"(^|\.)shared_(experts?|mlp)\.",
    "lm_head": r"(^|\.)(lm_head|output_layer)$",
    "routers": r"(^|\.)(gate|router|shared_expert_gate|router\.\w+)$",
    "linear attention, Mamba": r"(^|\.)(linear_attn|mamba|conv|ssm)\.|\.mixer\.(in|out)_proj$",
    "qkv": r"(^|\.)(qkv?|[qkv]_proj|qkv_proj|q_[ab]_proj|kv_[ab]_proj\w*|query_key_value|W?qkv)$",
    "o_proj": r"(^|\.)o_proj$|(^|\.)(self_)?att(n|ention)\.(out_proj|dense|proj|wo)$",
    "dense mlp": r"(^|\.)(gate_up_proj|gate_proj|up_proj|down_proj|w[123]|fc[12]|dense_\w+)$",
}
DRAFTS, _OTHER = "drafts", "other linears"
KINDS = (
    "qkv",
    "o_proj",
    "linear attention, Mamba",
    W13,
    W2,
    "shared experts",
    "dense mlp",
    "routers",
    "lm_head",
    "vision, audio",
    _OTHER,
    DRAFTS,
)
_KIND_OF = [(kind, re.compile(pattern)) for kind, pattern in _PATTERNS.items()]
# Matrices that are looked up, not multiplied, and convolutions.
_NO_LINEAR = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|\w*norm\w*|conv1d|conv)$")
# compressed-tensors' names of kinds to ours.
_OURS = {theirs: ours for ours, theirs in COMPRESSED_KINDS.items()}
_OURS["input_global_scale"] = "input_scale"


@dataclass
class Weight:
    """One matrix of a linear layer or of an expert, or all experts' in one tensor.

    Attributes:
        module: its name, as in ``model.layers.0.self_attn.q_proj``.
        unit: the layer that vLLM makes of it and its siblings, ``….qkv_proj`` or ``….experts``.
        kind: one of :data:`KINDS`.
        expert: its number, where experts are stored one by one.
        tensors: by kind, in ModelOpt's words.
        inverse: the second scale and the input scale are compressed-tensors' inverses.
        format: ``"NVFP4"``, ``"FP8"``, ``"BF16"`` …; the dtype's name where none of them fits.
        shape: [rows, columns], or of fused experts [E, inputs, outputs], in values.
        weight_scale_2: float32 as ModelOpt defines it; NaN for one that is unusable, None: absent.
        input_scale: the same: the largest input that calibration saw / (6 * 448).
        damaged: block scales are NaN or negative in places, in a matrix that is not all zero.
        zero_blocks: block scales are zero in places.
    """

    module: str
    unit: str
    kind: str
    expert: int | None
    tensors: dict[str, TensorHeader]
    inverse: bool
    format: str
    shape: tuple[int, ...]
    weight_scale_2: float | None = None
    input_scale: float | None = None
    damaged: bool = False
    zero_blocks: bool = False

    @property
    def nbytes(self) -> int:
        return sum(header.nbytes for header in self.tensors.values())


def collect_weights(
    headers: Mapping[str, TensorHeader], layers: int | None
) -> tuple[list[Weight], list[TensorHeader]]:
    """All weights of linears and experts, and the tensors that belong to none of them.

    Args:
        headers: of the checkpoint.
        layers: ``num_hidden_layers``; layers from there on are drafts.
    """
    modules: dict[str, dict[str, TensorHeader]] = defaultdict(dict)
    for name, header in headers.items():
        if match := FUSED_TENSOR.match(name):
            module = f"{match['container']}.{match['projection']}"
            modules[module][match["kind"] or "weight"] = header
        else:
            module, _, kind = name.rpartition(".")
            modules[module][kind] = header
    weights = []
    others: list[TensorHeader] = []
    for module, tensors in modules.items():
        weight = _weight(module, tensors, modules, layers)
        if weight is None:
            others += tensors.values()
        else:
            weights.append(weight)
    return weights, others


def _weight(
    module: str,
    tensors: dict[str, TensorHeader],
    modules: Mapping[str, Any],
    layers: int | None,
) -> Weight | None:
    inverse = not tensors.keys().isdisjoint({"weight_global_scale", "input_global_scale"})
    ours = {_OURS.get(kind, kind): header for kind, header in tensors.items()}
    header = ours.get("weight")
    if header is None or len(header.shape) not in (2, 3):
        return None
    known = {kind: (header.dtype, len(header.shape)) for kind, header in ours.items()}
    form = format_of(known) or header.dtype
    fused = FUSED_TENSOR.match(module)
    if form != "NVFP4" and not fused and (len(header.shape) == 3 or _NO_LINEAR.search(module)):
        return None
    shape = list(header.shape)
    if form == "NVFP4":
        shape[-1 if len(shape) == 2 else 1] *= 2
    expert = EXPERT_TENSOR.match(f"{module}.weight")
    in_experts = expert or fused
    unit = in_experts["container"] if in_experts else _fused_name(module, modules)
    return Weight(
        module=module,
        unit=unit,
        kind=_kind(module, layers),
        expert=int(expert["expert"]) if expert else None,
        tensors=ours,
        inverse=inverse,
        format=form,
        shape=tuple(shape),
    )


def _kind(module: str, layers: int | None) -> str:
    if is_draft(module, layers):
        return DRAFTS
    if match := FUSED_TENSOR.match(module):
        return W2 if match["projection"] == "down_proj" else W13
    if match := EXPERT_TENSOR.match(f"{module}.weight"):
        down = layout_of(match["projection"]).down
        return W2 if match["projection"] == down else W13
    return next((kind for kind, pattern in _KIND_OF if pattern.search(module)), _OTHER)


def _fused_name(module: str, modules: Mapping[str, Any]) -> str:
    """The layer that vLLM makes of this module and its siblings, if it has any."""
    head, _, last = module.rpartition(".")
    for fused, parts in PACKED.items():
        siblings = [part for part in parts if f"{head}.{part}" in modules]
        if last in parts and len(siblings) > 1:
            return f"{head}.{fused}"
    return module


def by_unit(weights: list[Weight]) -> dict[str, list[Weight]]:
    """Weights by the layer that they are served as."""
    units: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        units[weight.unit].append(weight)
    return units


def unequal(weights: list[Weight], attribute: str) -> Iterator[tuple[str, float]]:
    """Parts of one layer, or an expert's gate and up, that have different scales.

    Yields:
        What they are parts of, and the largest ratio between two of them.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for weight in weights:
        value = getattr(weight, attribute)
        if value is not None and value > 0 and value != float("inf") and weight.kind != W2:
            expert = "" if weight.expert is None else f".{weight.expert}"
            groups[f"{weight.unit}{expert}"].append(value)
    for name, values in groups.items():
        if len(set(values)) > 1:
            yield name, max(values) / min(values)
