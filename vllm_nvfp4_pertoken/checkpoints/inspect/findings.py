"""What is wrong with tensors and scales, or odd, or would be wrong for static scales."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy

from vllm_nvfp4_pertoken.checkpoints.inspect.weights import DRAFTS, W2, Weight, unequal
from vllm_nvfp4_pertoken.checkpoints.verify import WrongTensor
from vllm_nvfp4_pertoken.errors import PerTokenError
from vllm_nvfp4_pertoken.nvfp4 import NVFP4

__all__ = [
    "Problem",
    "input_scale_problems",
    "is_usable",
    "scale_problems",
    "tensor_problems",
    "untouched",
]

_EXPORT = "export or copy the checkpoint again"
# What ModelOpt gives an expert that saw no token, if it knows of no other: amax 0.5.
_FALLBACK = float(numpy.float32(0.5) / numpy.float32(NVFP4.range))
_IGNORED = "per-token serving does not read it"


@dataclass(frozen=True)
class Problem:
    """Something that a user should know.

    Attributes:
        severity: ``error`` stops serving, ``warning`` changes what is served or hints at damage,
            ``note`` matters only for static scales or is for information.
        code: which problem it is; stable.
        message: in words, with the numbers.
        count: tensors or modules that it is about.
        tensor, file, found: of the first tensor that is wrong; file None: the tensor is missing.
        expected, way_out: what would be right, and what to do.
    """

    severity: Literal["error", "warning", "note"]
    code: str
    message: str
    count: int = 1
    tensor: str | None = None
    file: str | None = None
    found: str | None = None
    expected: str = ""
    way_out: str = ""

    @classmethod
    def of_error(cls, code: str, error: PerTokenError) -> "Problem":
        return cls("error", code, error.found, expected=error.expected, way_out=error.way_out)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tensor_problems(wrong: Sequence[WrongTensor]) -> Iterator[Problem]:
    """Tensors that are missing, or of another shape or dtype: the first, and how many more."""
    if wrong:
        first = wrong[0]
        more = f" ({len(wrong) - 1} more tensors are wrong)" if len(wrong) > 1 else ""
        where = f" in {first.file}" if first.file else ""
        yield Problem(
            "error",
            "wrong-tensor",
            f"{first.name}{where} is {first.found}{more}",
            count=len(wrong),
            tensor=first.name,
            file=first.file.name if first.file else None,
            found=first.found,
            expected=first.expected,
            way_out=_EXPORT,
        )


def scale_problems(weights: Iterable[Weight]) -> Iterator[Problem]:
    """Scales that the engine refuses, and those that hint at a faulty export."""
    weights = [weight for weight in weights if weight.format == "NVFP4"]
    second = "weight_global_scale" if any(w.inverse for w in weights) else "weight_scale_2"
    yield from _about(
        [w for w in weights if w.weight_scale_2 is not None and not is_usable(w.weight_scale_2)],
        "weight_scale_2",
        "error",
        "bad-weight-scale-2",
        "not usable as a scale",
        f"a finite {second}, not negative",
    )
    yield from _about(
        [w for w in weights if w.damaged],
        "weight_scale",
        "error",
        "bad-block-scales",
        "NaN or negative in places",
        "positive block scales",
    )
    yield from _about(
        [w for w in weights if w.zero_blocks],
        "weight_scale",
        "warning",
        "zero-block-scales",
        "0 in places",
        "positive block scales: exporters write 1 for a block of zeros",
        "; the weights there are served as zeros",
    )
    yield from _about(
        [w for w in weights if w.weight_scale_2 == 0],
        "weight_scale_2",
        "note",
        "zero-weights",
        "0",
        consequence=": an all-zero matrix, and served as that",
    )
    pairs = list(unequal(weights, "weight_scale_2"))
    if pairs:
        name, ratio = max(pairs, key=lambda pair: pair[1])
        yield Problem(
            "note",
            "unequal-weight-scale-2",
            f"{len(pairs)} layers or experts have parts (gate and up, or q, k and v) of different "
            f"{second}, by up to {ratio:.3g} times ({name}); per-token serving keeps each, kernels "
            "with static scales take one for all",
            count=len(pairs),
        )


def is_usable(scale: float) -> bool:
    """Whether it is a number that can scale: finite, not negative."""
    return math.isfinite(scale) and scale >= 0


def _about(
    weights: Sequence[Weight],
    kind: str,
    severity: Literal["error", "warning", "note"],
    code: str,
    what: str,
    expected: str = "",
    consequence: str = "",
) -> Iterator[Problem]:
    """One problem about the tensors ``kind`` of these weights; names the first."""
    if not weights:
        return
    header = weights[0].tensors[kind]
    more = f", and {len(weights) - 1} more like it" if len(weights) > 1 else ""
    yield Problem(
        severity,
        code,
        f"{header.name} in {header.file.name} is {what}{more}{consequence}",
        count=len(weights),
        tensor=header.name,
        file=header.file.name,
        found=what,
        expected=expected,
        way_out=_EXPORT if severity == "error" else "",
    )


def input_scale_problems(
    weights: Iterable[Weight], cold: Mapping[tuple[str, int], str]
) -> Iterator[Problem]:
    """What would go wrong with static activation scales; ``cold`` is from :func:`untouched`."""
    weights = [w for w in weights if w.format == "NVFP4" and w.kind != DRAFTS]
    having = [w for w in weights if w.input_scale is not None]
    if not weights:
        return
    if not having:
        yield Problem(
            "note",
            "no-input-scales",
            f"no weight has an input_scale: static scales need a calibration, {_IGNORED}",
            count=len(weights),
        )
        return
    missing = [w for w in weights if w.input_scale is None]
    if missing:
        yield Problem(
            "note",
            "input-scale-missing",
            f"{len(missing)} of {len(weights)} weights have no input_scale, the first is "
            f"{missing[0].module}; {_IGNORED}",
            count=len(missing),
        )
    unusable = [w for w in having if w.input_scale is not None and not is_usable(w.input_scale)]
    for code, bad, what in (
        ("input-scale-unusable", unusable, "no usable number"),
        ("input-scale-zero", [w for w in having if w.input_scale == 0], "0"),
        ("input-scale-one", [w for w in having if w.input_scale == 1], "exactly 1: a placeholder"),
    ):
        yield from _about(bad, "input_scale", "note", code, what, consequence=f"; {_IGNORED}")
    if cold:
        (container, expert), how = next(iter(cold.items()))
        yield Problem(
            "note",
            "input-scale-untouched",
            f"{len(cold)} experts look as if calibration never reached them: the first is "
            f"{container}.{expert}, whose input_scale is {how}; {_IGNORED}",
            count=len(cold),
        )


def untouched(weights: Iterable[Weight]) -> dict[tuple[str, int], str]:
    """Experts that calibration never reached, and how that shows.

    Exporters leave out their input scales, or put in the amax 0.5, or the largest of the others. A
    copy shows where several experts have the layer's largest scale before both of their GEMMs;
    where most have it, it is rather one scale for all.
    """
    layers: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        if weight.expert is not None:
            layers[weight.unit].append(weight)
    found: dict[tuple[str, int], str] = {}
    for unit, experts in layers.items():
        scales: dict[int, dict[str, float | None]] = defaultdict(dict)
        for weight in experts:
            assert weight.expert is not None
            scales[weight.expert][weight.kind] = weight.input_scale
        largest = {
            kind: max((s[kind] or 0 for s in scales.values() if kind in s), default=0)
            for kind in {weight.kind for weight in experts}
        }
        any_scale = any(largest.values())
        copies = [
            expert
            for expert, own in scales.items()
            if W2 in own and all(own.get(kind) == value for kind, value in largest.items())
        ]
        for expert, own in sorted(scales.items()):
            if any_scale and all(value is None for value in own.values()):
                found[unit, expert] = "missing"
            elif all(value == _FALLBACK for value in own.values()):
                found[unit, expert] = "the exporter's default"
            elif 1 < len(copies) <= len(scales) // 2 and expert in copies:
                found[unit, expert] = "a copy of the largest"
    return found
