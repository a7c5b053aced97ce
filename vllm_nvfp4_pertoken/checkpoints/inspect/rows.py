"""The table: weights by kind of layer, format, and how they are served."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_nvfp4_pertoken.checkpoints.inspect.findings import is_usable
from vllm_nvfp4_pertoken.checkpoints.inspect.weights import KINDS, Weight, unequal

__all__ = ["InputScales", "Range", "Row", "make_rows"]


@dataclass(frozen=True)
class Range:
    """The smallest and the largest of positive, finite values; None where there is none."""

    smallest: float | None
    largest: float | None


@dataclass(frozen=True)
class InputScales:
    """Activation scales as the checkpoint has them.

    Attributes:
        present, missing: weights with and without one.
        unusable: NaN, infinite or negative.
        zero, one: exactly that.
        untouched: experts that calibration did not reach, as it seems.
        range: of the good ones.
    """

    present: int
    missing: int
    unusable: int
    zero: int
    one: int
    untouched: int
    range: Range

    @property
    def suspicious(self) -> dict[str, int]:
        counts = {
            "NaN": self.unusable,
            "0": self.zero,
            "1.0": self.one,
            "untouched": self.untouched,
        }
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True)
class Row:
    """Weights that are of the same kind, stored alike and served alike.

    Attributes:
        kind: kind of layer.
        format: ``"NVFP4"``, ``"FP8"``, ``"BF16"`` …
        served: what the plugin does with them.
        weights: how many; one for each expert's projection, or for experts that are fused.
        layers: how many layers the engine makes of them.
        shapes: [rows, columns], or [E, inputs, outputs] of fused experts, to how many.
        nbytes: with their scales and biases.
        weight_scale_2: as ModelOpt defines it.
        input_scale: the same.
        unequal_weight_scale_2, unequal_input_scale: layers, or experts, whose parts (gate and up;
            q, k and v) have different ones.
    """

    kind: str
    format: str
    served: str
    weights: int
    layers: int
    shapes: tuple[tuple[tuple[int, ...], int], ...]
    nbytes: int
    weight_scale_2: Range
    input_scale: InputScales
    unequal_weight_scale_2: int
    unequal_input_scale: int

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        content["bytes"] = content.pop("nbytes")
        content["shapes"] = [
            {"shape": list(shape), "weights": count} for shape, count in self.shapes
        ]
        return content


def make_rows(
    weights: Iterable[Weight],
    served: Mapping[str, str],
    untouched: Collection[tuple[str, int]],
) -> Iterator[Row]:
    """Group weights.

    Args:
        weights: all of the checkpoint.
        served: how each layer of the engine is served.
        untouched: containers and numbers of experts that calibration did not reach.
    """
    groups: dict[tuple[str, str, str], list[Weight]] = defaultdict(list)
    for weight in weights:
        groups[weight.kind, weight.format, served[weight.unit]].append(weight)
    for (kind, form, how), members in sorted(
        groups.items(), key=lambda item: (KINDS.index(item[0][0]), item[0])
    ):
        yield Row(
            kind=kind,
            format=form,
            served=how,
            weights=len(members),
            layers=len({weight.unit for weight in members}),
            shapes=tuple(Counter(weight.shape for weight in members).most_common()),
            nbytes=sum(weight.nbytes for weight in members),
            weight_scale_2=_range(weight.weight_scale_2 for weight in members),
            input_scale=_input_scales(members, untouched),
            unequal_weight_scale_2=sum(1 for _ in unequal(members, "weight_scale_2")),
            unequal_input_scale=sum(1 for _ in unequal(members, "input_scale")),
        )


def _range(values: Iterable[float | None]) -> Range:
    good = [value for value in values if value is not None and 0 < value < math.inf]
    return Range(min(good, default=None), max(good, default=None))


def _input_scales(weights: Sequence[Weight], untouched: Collection[tuple[str, int]]) -> InputScales:
    values = [weight.input_scale for weight in weights if weight.input_scale is not None]
    return InputScales(
        present=len(values),
        missing=len(weights) - len(values),
        unusable=sum(not is_usable(value) for value in values),
        zero=values.count(0),
        one=values.count(1),
        untouched=len({(w.unit, w.expert) for w in weights} & set(untouched)),
        range=_range(values),
    )
