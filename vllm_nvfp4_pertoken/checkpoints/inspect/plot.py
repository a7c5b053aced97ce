"""A picture of the input scales of experts: how far apart calibration left them."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_nvfp4_pertoken.checkpoints.inspect.findings import is_usable, untouched
from vllm_nvfp4_pertoken.checkpoints.inspect.weights import W2, W13, Weight
from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import NVFP4

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_plot", "draw_input_scales"]

_PANELS = ((W13, "input of gate and up"), (W2, "input of down"))
_NUMBER = re.compile(r"\.([0-9]{1,6})\.")
# Of Okabe and Ito, which color-blind readers can tell apart.
_BLUE, _BLACK, _ORANGE, _RED = "#0072B2", "#000000", "#E69F00", "#D55E00"


def check_plot(file: Path) -> None:
    """Find out before the work whether a picture can be drawn, and written there.

    Raises:
        UnsupportedError: matplotlib is missing, or does not write such files.
        OSError: if the directory does not exist.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise UnsupportedError(
            f"--plot needs matplotlib, which cannot be imported ({error})",
            expected="the optional extra 'plot'",
            way_out="pip install 'vllm-nvfp4-pertoken[plot]'",
        ) from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix.lower().lstrip(".") not in kinds:
        raise UnsupportedError(
            f"--plot {file} ends in {file.suffix or 'nothing'!r}",
            expected=f"one of .{', .'.join(kinds)}",
            way_out=f"--plot {file.with_suffix('.png') if file.name else 'out.png'}",
        )
    if not file.parent.is_dir():
        raise FileNotFoundError(f"the directory of --plot {file} does not exist")


def draw_input_scales(weights: Sequence[Weight], title: str) -> "Figure":
    """Draw what calibration took for the largest input of every expert, by layer.

    Args:
        weights: with their scales.
        title: the first line of the picture.

    Returns:
        What ``savefig`` writes.

    Raises:
        UnsupportedError: if no expert has an input scale.
    """
    from matplotlib.figure import Figure

    experts = [weight for weight in weights if weight.kind in (W13, W2)]
    if not any(weight.input_scale for weight in experts):
        raise UnsupportedError(
            "no expert of the checkpoint has an input scale, so there is nothing to plot",
            expected="a checkpoint that was calibrated",
            way_out="leave --plot out; per-token serving needs no input scales",
        )
    layers = list(dict.fromkeys(weight.unit for weight in experts))
    layers.sort(key=lambda unit: [int(number) for number in _NUMBER.findall(f"{unit}.")])
    places = {unit: place for place, unit in enumerate(layers)}
    cold = untouched(experts)
    figure = Figure(figsize=(max(9, min(24, 3 + 0.25 * len(layers))), 8), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (kind, what) in zip(panels, _PANELS, strict=True):
        members = [weight for weight in experts if weight.kind == kind]
        _draw(axes, members, places, cold)
        axes.set_title(f"{what}{_spread(members)}", loc="left", fontsize=10)
        axes.set_ylabel("amax that calibration saw")
    step = max(1, len(layers) // 30)
    numbers = [_NUMBER.findall(f"{unit}.") or [unit] for unit in layers]
    panels[-1].set_xticks(range(0, len(layers), step), [n[0] for n in numbers[::step]])
    panels[-1].set_xlabel("layer")
    panels[-1].set_xlim(-0.5, len(layers) - 0.5)
    figure.legend(*_legend(panels), fontsize=8, loc="outside lower center", ncols=2)
    figure.suptitle(
        f"{title}\nOne static scale per expert or layer: what exceeds it clips, "
        "what stays far below it loses bits",
        fontsize=11,
    )
    return figure


def _legend(panels: Any) -> tuple[list[Any], list[str]]:
    """One entry for each label, wherever it is drawn."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return list(entries.values()), list(entries)


def _amax(weight: Weight) -> float | None:
    """The input that becomes 6 * 448, the largest that NVFP4 holds; None if there is no scale."""
    scale = weight.input_scale
    return scale * NVFP4.range if scale and is_usable(scale) else None


def _by_layer(weights: Sequence[Weight]) -> dict[str, list[float]]:
    layers: dict[str, list[float]] = defaultdict(list)
    for weight in weights:
        if (value := _amax(weight)) is not None:
            layers[weight.unit].append(value)
    return layers


def _spread(weights: Sequence[Weight]) -> str:
    ratios = [max(values) / min(values) for values in _by_layer(weights).values()]
    return f": up to {max(ratios):.3g} times apart within a layer" if ratios else ": no scales"


def _draw(
    axes: "Axes",
    weights: Sequence[Weight],
    places: dict[str, int],
    cold: dict[tuple[str, int], str],
) -> None:
    good, odd, bad = [], [], []
    for weight in weights:
        value = _amax(weight)
        if value is None:
            bad.append(places[weight.unit])
        elif (weight.unit, weight.expert) in cold:
            odd.append((places[weight.unit], value))
        else:
            good.append((places[weight.unit], value))
    layers = _by_layer(weights)
    if layers:
        axes.set_yscale("log")
        units = [unit for unit in places if unit in layers]
        at = [places[unit] for unit in units]
        axes.vlines(
            at, [min(layers[u]) for u in units], [max(layers[u]) for u in units], _BLUE, alpha=0.3
        )
        axes.plot(
            at,
            [max(layers[unit]) for unit in units],
            color=_BLACK,
            linewidth=1,
            label="largest of a layer: what kernels with one scale for all experts take",
        )
    for points, color, label in (
        (good, _BLUE, "an expert"),
        (odd, _ORANGE, "an expert that calibration seems not to have reached"),
    ):
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=8, color=color, label=label, zorder=3)
    if bad:
        axes.scatter(
            bad,
            [0.02] * len(bad),
            marker="x",
            color=_RED,
            label="a scale is missing, 0 or no number",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
    axes.grid(alpha=0.3)
