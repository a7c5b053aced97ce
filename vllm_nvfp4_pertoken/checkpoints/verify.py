"""Check the files of an NVFP4 checkpoint from their headers, before any weight is read.

Nothing is loaded: safetensors headers carry every tensor's name, dtype, shape and place, so a
truncated file, a missing expert or a wrong shape is found in milliseconds, before a server starts
or a running one lets go of its weights.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_nvfp4_pertoken.checkpoints.headers import (
    TensorHeader,
    config_number,
    read_headers,
    read_json,
)
from vllm_nvfp4_pertoken.checkpoints.layout import (
    COMPRESSED_KINDS,
    EXPERT_TENSOR,
    FUSED_TENSOR,
    LAYOUTS,
    MODELOPT_KINDS,
)
from vllm_nvfp4_pertoken.errors import CheckpointError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = [
    "CheckpointSummary",
    "WrongTensor",
    "find_wrong_tensors",
    "verify_checkpoint",
]

# The tensors of one module, by kind: ``weight``, ``weight_scale`` …
Kinds = dict[str, TensorHeader]

_E4M3 = "F8_E4M3"
_SECOND_SCALES = {names["weight_scale_2"] for names in (MODELOPT_KINDS, COMPRESSED_KINDS)}

_DOWN = tuple(layout.down for layout in LAYOUTS)
# Names that model families use for the number of routed experts.
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHOWN_PROBLEMS = 5


class WrongTensor(NamedTuple):
    """A tensor that is not as it must be; ``file`` is None for one that is missing."""

    name: str
    file: Path | None
    found: str
    expected: str

    def __str__(self) -> str:
        where = f" in {self.file.name}" if self.file is not None else ""
        return f"{self.name}{where} is {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class CheckpointSummary:
    """What :func:`verify_checkpoint` saw.

    Attributes:
        moe_layers: MoE layers with NVFP4 experts.
        unquantized_moe_layers: MoE layers whose experts are BF16 or FP16.
        dense_layers: NVFP4 linears outside of the experts.
        expert_bytes: bytes of the NVFP4 experts, scales included.
    """

    moe_layers: int
    unquantized_moe_layers: int
    dense_layers: int
    expert_bytes: int


def verify_checkpoint(
    path: Path, headers: Mapping[str, TensorHeader] | None = None
) -> CheckpointSummary:
    """Check that every tensor of every NVFP4 weight is there and has its shape and dtype.

    Activation scales are not looked at: nothing reads them.

    Args:
        path: the checkpoint's directory.
        headers: what :func:`read_headers` gave, if it was called before.

    Raises:
        CheckpointError: that names the file, the tensor, what was found and what was expected.
    """
    headers = read_headers(path) if headers is None else headers
    summary, problems = find_wrong_tensors(headers, read_json(path / "config.json"))
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = f"; and {more} more" if more > 0 else ""
        raise CheckpointError(
            f"{path} is not a complete NVFP4 checkpoint: "
            + "; ".join(map(str, problems[:_SHOWN_PROBLEMS]))
            + tail,
            way_out="export or copy the checkpoint again",
        )
    if not summary["moe_layers"]:
        raise CheckpointError(
            f"{path} has no NVFP4 experts: {summary['other_moe_layers']} MoE layers in other "
            "formats, "
            f"{summary['dense_layers']} NVFP4 dense layers",
            expected="a mixture-of-experts model whose experts are NVFP4",
            way_out="serve it without --quantization nvfp4_per_token",
        )
    return CheckpointSummary(
        moe_layers=summary["moe_layers"],
        unquantized_moe_layers=summary["unquantized_moe_layers"],
        dense_layers=summary["dense_layers"],
        expert_bytes=summary["expert_bytes"],
    )


def find_wrong_tensors(
    headers: Mapping[str, TensorHeader], config: Mapping[str, Any]
) -> tuple[Counter[str], list[WrongTensor]]:
    """What :func:`verify_checkpoint` counts, and every tensor that is wrong, in order.

    Args:
        headers: from :func:`read_headers`.
        config: the content of ``config.json``, for the number of experts.
    """
    containers: dict[str, dict[tuple[int, str], Kinds]] = defaultdict(lambda: defaultdict(dict))
    fused: dict[str, dict[str, Kinds]] = defaultdict(lambda: defaultdict(dict))
    modules: dict[str, Kinds] = defaultdict(dict)
    for name, header in headers.items():
        if match := EXPERT_TENSOR.match(name):
            key = (int(match["expert"]), match["projection"])
            containers[match["container"]][key][match["kind"]] = header
        elif match := FUSED_TENSOR.match(name):
            fused[match["container"]][match["projection"]][match["kind"] or "weight"] = header
        else:
            module, _, kind = name.rpartition(".")
            modules[module][kind] = header

    summary = Counter[str]()
    problems: list[WrongTensor] = []
    count = config_number(config, *_NUM_EXPERTS_KEYS)
    for name, container in containers.items():
        if _count_experts(container.values(), summary):
            problems += _check_container(name, container, count)
    for name, projections in fused.items():
        if _count_experts(projections.values(), summary):
            problems += _check_fused(name, projections, count)
    for module, kinds in modules.items():
        if _is_nvfp4(kinds):
            summary["dense_layers"] += 1
            problems += _check_dense(module, kinds)
    summary["other_moe_layers"] = len(containers) + len(fused) - summary["moe_layers"]
    return summary, problems


def _is_nvfp4(kinds: Kinds) -> bool:
    """Whether a module's tensors are, or were meant to be, an NVFP4 weight.

    Only NVFP4 has a second scale; packed codes alone are other formats' too.
    """
    if not kinds.keys().isdisjoint(_SECOND_SCALES):
        return True
    weight = kinds.get("weight_packed") or kinds.get("weight")
    scale = kinds.get("weight_scale")
    return weight is not None and weight.dtype == "U8" and bool(scale and scale.dtype == _E4M3)


def _count_experts(experts: Iterable[Kinds], summary: Counter[str]) -> bool:
    """Count one layer's experts; whether they are NVFP4, in part at least."""
    tensors = [header for kinds in experts for header in kinds.values()]
    if not any(header.dtype == "U8" for header in tensors):
        summary["unquantized_moe_layers"] += 1
        return False
    summary["moe_layers"] += 1
    summary["expert_bytes"] += sum(header.nbytes for header in tensors)
    return True


def _check_container(
    name: str, container: Mapping[tuple[int, str], Kinds], declared: int | None
) -> Iterable[WrongTensor]:
    """What is wrong in one MoE layer; experts of which nothing is there are named once."""
    projections = sorted({projection for _, projection in container})
    names = _names(*container.values())
    sizes = _layer_sizes(container, names["weight"])
    present = sorted({expert for expert, _ in container})
    if absent := _gaps(present, max(present[-1] + 1, declared or 0)):
        shape = (sizes[projections[0]][0], sizes[projections[0]][1] // 2)
        yield WrongTensor(
            f"{name}.{absent[0][0]}.{projections[0]}.{names['weight']}",
            None,
            "missing, with all else of the experts "
            + ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in absent[:_SHOWN_PROBLEMS])
            + (", …" if len(absent) > _SHOWN_PROBLEMS else ""),
            f"U8 {list(shape)}",
        )
    for expert in present:
        for projection in projections:
            kinds = container.get((expert, projection), {})
            rows, columns = sizes[projection]
            yield from _check_matrix(f"{name}.{expert}.{projection}.", kinds, names, rows, columns)


def _gaps(present: list[int], count: int) -> list[tuple[int, int]]:
    """First and last of every run of numbers below ``count`` that are not in a sorted list."""
    edges = [-1, *present, count]
    return [(a + 1, b - 1) for a, b in pairwise(edges) if b - a > 1]


def _check_dense(module: str, kinds: Kinds) -> Iterable[WrongTensor]:
    """What is wrong with a linear layer; its size is what its weight says, else its scales."""
    names = _names(kinds)
    weight, scale = kinds.get(names["weight"]), kinds.get("weight_scale")
    rows, columns = 0, 0
    if weight is not None and len(weight.shape) == 2:
        rows, columns = weight.shape[0], weight.shape[1] * 2
    elif scale is not None and len(scale.shape) == 2:
        rows, columns = scale.shape[0], scale.shape[1] * BLOCK_SIZE
    yield from _check_matrix(f"{module}.", kinds, names, rows, columns)


def _check_matrix(
    prefix: str, kinds: Kinds, names: Mapping[str, str], rows: int, columns: int
) -> Iterable[WrongTensor]:
    """What is wrong with the NVFP4 tensors of one matrix [rows, columns]."""
    yield from _check_no_extras(prefix, kinds)
    yield from _check_tensors(
        {
            names["weight"]: ("U8", (rows, columns // 2)),
            names["weight_scale"]: (_E4M3, (rows, columns // BLOCK_SIZE)),
            names["weight_scale_2"]: ("F32", ()),
        },
        kinds,
        prefix,
    )
    weight = kinds.get(names["weight"])
    if columns % BLOCK_SIZE and weight is not None:
        yield WrongTensor(
            weight.name,
            weight.file,
            f"{weight.dtype} {list(weight.shape)}",
            f"rows of a multiple of {BLOCK_SIZE // 2} bytes, {BLOCK_SIZE} values for a block scale",
        )


def _check_no_extras(prefix: str, kinds: Kinds) -> Iterable[WrongTensor]:
    if "pre_quant_scale" in kinds:
        yield WrongTensor(
            f"{prefix}pre_quant_scale",
            kinds["pre_quant_scale"].file,
            "there (an AWQ or SVDQuant export)",
            "none, as the per-token kernels cannot apply it",
        )


def _check_fused(
    name: str, projections: Mapping[str, Kinds], declared: int | None
) -> Iterable[WrongTensor]:
    """What is wrong in a layer whose experts are fused: [E, inputs / 2, outputs] and its scales.

    Sizes are what the weight of gate and up (or up alone) says, or else that of down.
    """
    first = "up_proj" if "up_proj" in projections else "gate_up_proj"
    halves = 1 if first == "up_proj" else 2
    sizes: dict[str, tuple[int, int]] = {}  # inputs, outputs
    count = declared
    for projection in (first, "down_proj"):
        weight = projections.get(projection, {}).get("weight")
        if weight is not None and len(weight.shape) == 3:
            experts, inputs, outputs = weight.shape[0], weight.shape[1] * 2, weight.shape[2]
            hidden, wide = (inputs, outputs) if projection == first else (outputs, inputs * halves)
            sizes = {first: (hidden, wide), "down_proj": (wide // halves, hidden)}
            count = experts if count is None else count
            break
    for projection in (first, "down_proj"):
        inputs, outputs = sizes.get(projection, (0, 0))
        stem = f"{name}.{projection}"
        yield from _check_tensors(
            {
                "weight": ("U8", (count or 0, inputs // 2, outputs)),
                "weight_scale": (_E4M3, (count or 0, inputs // BLOCK_SIZE, outputs)),
                "weight_scale_2": ("F32", ()),
            },
            projections.get(projection, {}),
            f"{stem}_",
            {"weight": stem},
        )


def _check_tensors(
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    kinds: Kinds,
    prefix: str,
    spelled: Mapping[str, str] = MappingProxyType({}),
) -> Iterable[WrongTensor]:
    """Tensors that are missing, or not of the dtype and shape expected of their kind.

    ``spelled`` has the names of those that are not called prefix and kind.
    """
    for kind, (dtype, shape) in expected.items():
        name = spelled.get(kind, f"{prefix}{kind}")
        header = kinds.get(kind)
        if header is None:
            yield WrongTensor(name, None, "missing", f"{dtype} {list(shape)}")
            continue
        # A scalar may also be stored with one dimension of one element.
        same_shape = header.shape == shape or (not shape and header.shape == (1,))
        if not same_shape or header.dtype != dtype:
            found = f"{header.dtype} {list(header.shape)}"
            yield WrongTensor(name, header.file, found, f"{dtype} {list(shape)}")


def _names(*experts: Kinds) -> Mapping[str, str]:
    """What the tensors are called: ModelOpt's words, or compressed-tensors'."""
    own = {name for kind, name in COMPRESSED_KINDS.items() if MODELOPT_KINDS[kind] != name}
    compressed = any(not kinds.keys().isdisjoint(own) for kinds in experts)
    return COMPRESSED_KINDS if compressed else MODELOPT_KINDS


def _layer_sizes(
    container: Mapping[tuple[int, str], Kinds], weight_name: str
) -> dict[str, tuple[int, int]]:
    """Rows and columns of each projection's matrix, as most of the layer's experts have them."""
    votes: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for (_, projection), kinds in container.items():
        votes[projection]
        weight = kinds.get(weight_name)
        if weight is not None and len(weight.shape) == 2:
            votes[projection][(weight.shape[0], 2 * weight.shape[1])] += 1
    sizes = {
        projection: counter.most_common(1)[0][0] for projection, counter in votes.items() if counter
    }
    # A projection without any weight takes its size from the one on the other side.
    for projection in votes:
        if projection not in sizes:
            other = [
                size for name, size in sizes.items() if (name in _DOWN) != (projection in _DOWN)
            ]
            same = [
                size for name, size in sizes.items() if (name in _DOWN) == (projection in _DOWN)
            ]
            sizes[projection] = same[0] if same else (other[0][::-1] if other else (0, 0))
    return sizes
