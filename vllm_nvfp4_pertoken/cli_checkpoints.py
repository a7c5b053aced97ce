"""The command ``nvfp4-pertoken convert``."""

import math
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_nvfp4_pertoken.cli_output import progress_bar, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_nvfp4_pertoken.checkpoints.convert import Plan

__all__ = ["convert"]


class Format(str, Enum):
    """How an NVFP4 checkpoint is written."""

    modelopt = "modelopt"
    compressed_tensors = "compressed-tensors"


class Device(str, Enum):
    """Where weights are quantized."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def convert(
    src: Annotated[Path, typer.Argument(help="Directory of the checkpoint to convert.")],
    dst: Annotated[Path, typer.Argument(help="Directory to make.")],
    all_linears: Annotated[
        bool,
        typer.Option(
            "--all/--experts-only",
            help="Quantize attention, MLP and shared-expert linears as well, or the routed experts "
            "alone. lm_head, embeddings, routers, vision towers and draft (MTP) layers stay as "
            "they are.",
        ),
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave these modules as they are: a name, a container such as "
            "`model.layers.0`, or a wildcard such as `'*.self_attn.*'`. Can be repeated.",
        ),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(
            help="**modelopt** writes what NVIDIA ModelOpt exports, **compressed-tensors** the "
            "same codes and block scales as llm-compressor's `nvfp4-pack-quantized`, weights only."
        ),
    ] = Format.modelopt,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace DST, and start over what was begun with other options."
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Afterwards read everything back, and list the matrices that lost most.",
        ),
    ] = False,
    device: Annotated[
        Device,
        typer.Option(help="Where to quantize: **auto** takes a GPU if there is one. Same bytes."),
    ] = Device.auto,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Tensors at a time; by default one per core.")
    ] = None,
) -> None:
    """Convert a BF16, FP16 or FP8 checkpoint to NVFP4, without calibration.

    Weights get the bytes that NVIDIA ModelOpt gives them; activation scales are not written, since
    per-token serving computes them. Sources: Hugging Face checkpoints in BF16, FP16 or FP32, or in
    FP8 with `weight_block_size`, as DeepSeek publishes them; experts one by one or fused.

        nvfp4-pertoken convert Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4

        vllm serve Qwen3-30B-A3B-NVFP4 --quantization nvfp4_per_token

    Files are converted one after the other, a few megabytes at a time: memory stays below 2 GiB
    and the largest tensor, however large the model. DST appears when it is whole. Until then the
    work is in `.DST.partial` beside it; after Ctrl-C, a kill or a full disk the same command goes
    on where it was.
    """
    from vllm_nvfp4_pertoken.errors import PerTokenError

    try:
        _convert(src, dst, all_linears, exclude or [], format.value, force, verify, device, threads)
    except KeyboardInterrupt:
        typer.echo("Stopped. The same command goes on where this one was.", err=True)
        raise typer.Exit(130) from None
    except PerTokenError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"Error: {error}. The same command goes on where this one was.", err=True)
        raise typer.Exit(1) from None


def _convert(
    src: Path,
    dst: Path,
    all_linears: bool,
    exclude: list[str],
    format: str,
    force: bool,
    verify: bool,
    device: Device,
    threads: int | None,
) -> None:
    import torch
    from rich.console import Console

    from vllm_nvfp4_pertoken.checkpoints.convert import (
        Options,
        convert_checkpoint,
        make_plan,
        sizes,
    )
    from vllm_nvfp4_pertoken.errors import UnsupportedError

    console = Console(highlight=False)
    where = device.value
    if device is Device.auto:
        where = "cuda" if torch.cuda.is_available() else "cpu"
    elif device is Device.cuda and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda, and torch finds no CUDA device",
            expected="a CUDA device",
            way_out="leave the option out",
        )
    options = Options(all_linears, tuple(exclude), format)
    plan = make_plan(src, options)
    console.print(
        f"{src}: {size_text(plan.source_bytes)} in {len(plan.files)} files; "
        f"{plan.quantized} modules to NVFP4 on {where}, everything else stays as it is",
        soft_wrap=True,
    )
    started = time.monotonic()
    with progress_bar(console, "converting") as progress:
        convert_checkpoint(
            src, dst, options, force=force, device=where, threads=threads, progress=progress
        )
    seconds = max(time.monotonic() - started, 1e-6)
    console.print(
        f"{dst}: {size_text(sizes(dst).total)}, written in {seconds:.1f} s "
        f"({plan.source_bytes / 1e6 / seconds:.0f} MB/s of the source)",
        soft_wrap=True,
    )
    if verify:
        _verify(console, plan, dst)
    console.print(f"vllm serve {dst} --quantization nvfp4_per_token", soft_wrap=True)


def _verify(console: "Console", plan: "Plan", dst: Path, shown: int = 10) -> None:
    from rich.table import Table

    from vllm_nvfp4_pertoken.checkpoints.convert.check import SUSPICIOUS, measure_errors
    from vllm_nvfp4_pertoken.errors import CheckpointError

    with progress_bar(console, "verifying") as progress:
        errors = measure_errors(plan, dst, progress=progress)
    table = Table(title=f"Worst of {len(errors)} matrices, dequantized against the source")
    table.add_column("module", overflow="fold")
    table.add_column("|difference| / |source|", justify="right")
    table.add_column("largest difference", justify="right")
    for error in errors[:shown]:
        table.add_row(error.module, f"{error.relative:.4f}", f"{error.largest:.3g}")
    console.print(table)
    bad = next((error for error in errors if not math.isfinite(error.relative)), None)
    if bad is not None:
        raise CheckpointError(
            f"{bad.module} in {dst / bad.file} dequantizes to values that are not finite",
            expected="finite values",
            way_out="check the disk, and convert again with --force",
        )
    many = [error for error in errors if error.relative > SUSPICIOUS]
    if many:
        console.print(
            f"{len(many)} matrices lost more than {SUSPICIOUS:.0%} of their norm (about 10% is "
            "usual). Look at their weights: a few outliers, or a gate far smaller than its up, "
            "do this; --exclude leaves them out.",
            soft_wrap=True,
        )
