"""The command ``nvfp4-pertoken inspect``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_nvfp4_pertoken.cli_output import progress_bar, size_text
from vllm_nvfp4_pertoken.errors import PerTokenError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_nvfp4_pertoken.checkpoints.inspect import Report, Row

__all__ = ["inspect"]

_WIDTH_OF_FILES = 140


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of the checkpoint.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object instead of tables.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw the experts' input scales, by layer: a .png, .svg or .pdf. Needs the "
            "extra `vllm-nvfp4-pertoken[plot]`.",
        ),
    ] = None,
    blocks: Annotated[
        bool,
        typer.Option(
            "--blocks/--no-blocks",
            help="Read block scales as well, a tenth of the checkpoint, and find damaged ones.",
        ),
    ] = True,
) -> None:
    """Show what is in a checkpoint, what is wrong with it, and how it will be served.

    Reads configs, headers and scales, no weights. Problems come first; then, for each kind of
    layer, formats, shapes, sizes, what the plugin does with it, and its scales: the range of
    `weight_scale_2`, input scales that are missing or suspicious, and parts of one layer (gate and
    up; q, k and v) whose scales differ.

        nvfp4-pertoken inspect Qwen3-30B-A3B-NVFP4

        nvfp4-pertoken inspect Qwen3-30B-A3B-NVFP4 --json | jq '.problems[0]'

        nvfp4-pertoken inspect Qwen3-30B-A3B-NVFP4 --plot scales.png

    The exit status is 0 if the checkpoint will serve with `--quantization nvfp4_per_token`, 1 if a
    problem will stop that, and 2 if files are missing or cannot be read, or for a wrong option.
    """
    from rich.console import Console

    from vllm_nvfp4_pertoken.checkpoints.inspect import inspect_checkpoint
    from vllm_nvfp4_pertoken.checkpoints.inspect.plot import check_plot, draw_input_scales

    try:
        if plot is not None:
            check_plot(plot)
        with progress_bar(Console(stderr=True, highlight=False), "reading scales") as progress:
            report = inspect_checkpoint(checkpoint, blocks=blocks, progress=progress)
        if plot is not None:
            draw_input_scales(report.weights, checkpoint.absolute().name).savefig(plot, dpi=150)
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(130) from None
    except (PerTokenError, OSError) as error:
        if as_json:
            typer.echo(json.dumps(_unreadable(checkpoint, error), indent=2))
        else:
            typer.echo(f"Error: {printable(str(error))}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console.width = _WIDTH_OF_FILES
        _print(console, report)
    raise typer.Exit(0 if report.serves else 1)


def _unreadable(checkpoint: Path, error: Exception) -> dict[str, Any]:
    return {
        "schema": 1,
        "checkpoint": str(checkpoint),
        "serves": False,
        "error": {
            "message": getattr(error, "found", str(error)),
            "expected": getattr(error, "expected", ""),
            "way_out": getattr(error, "way_out", ""),
        },
    }


def _print(console: "Console", report: "Report") -> None:
    def say(text: str) -> None:
        console.print(printable(text), soft_wrap=True)

    say(
        f"{report.path}: {report.tensors} tensors in "
        f"{report.files} {'file' if report.files == 1 else 'files'}, "
        f"{size_text(report.nbytes)}, {_quantization(report)}"
    )
    if report.serves:
        say("Will serve with --quantization nvfp4_per_token.")
    else:
        say("Will NOT serve with --quantization nvfp4_per_token.")
    for problem in report.problems:
        say("")
        say(f"{problem.severity.capitalize()}: {problem.message}.")
        if problem.expected:
            say(f"  Expected: {problem.expected}.")
        if problem.way_out:
            say(f"  Way out: {problem.way_out}.")
    say("")
    _print_layers(console, report)
    _print_scales(console, report.rows)


def _quantization(report: "Report") -> str:
    description = report.description
    if description is None:
        return "not quantized" if not report.source else "quantized, but not for this plugin"
    by = report.producer or description.dialect
    cache = description.kv_cache_quant_algo
    return f"{description.quant_algo} by {by} ({report.source})" + (
        f", KV cache in {cache}" if cache else ""
    )


def _print_layers(console: "Console", report: "Report") -> None:
    table = _table("layers", "format", "shape", "weights>", "served as>", "size>", "served")
    for row in report.rows:
        shapes = [" x ".join(map(str, shape)) for shape, _ in row.shapes]
        table.add_row(
            row.kind,
            row.format,
            ", ".join(shapes[:4]) + (f" and {len(shapes) - 4} others" if len(shapes) > 4 else ""),
            str(row.weights),
            f"{row.layers} layers" if row.layers > 1 else "1 layer",
            size_text(row.nbytes),
            row.served,
        )
    table.add_row(
        "embeddings, norms, …", "", "", "", "", size_text(report.other_nbytes), "as stored"
    )
    console.print(table)


def _print_scales(console: "Console", rows: "tuple[Row, ...]") -> None:
    table = _table(
        "scales of", "weight_scale_2", "input_scale", "with>", "without>", "suspicious", "unequal"
    )
    for row in rows:
        scales = row.input_scale
        if row.format != "NVFP4" and not scales.present:
            continue
        counts = {"weight": row.unequal_weight_scale_2, "input": row.unequal_input_scale}
        table.add_row(
            row.kind,
            _range(row.weight_scale_2),
            _range(scales.range),
            str(scales.present),
            str(scales.missing),
            ", ".join(f"{count} {what}" for what, count in scales.suspicious.items()),
            ", ".join(f"{count} {what}" for what, count in counts.items() if count),
        )
    if table.row_count:
        console.print(table)


def _range(values: Any) -> str:
    if values.smallest is None:
        return ""
    return f"{values.smallest:.3g} to {values.largest:.3g}"


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold"
        )
    return table
