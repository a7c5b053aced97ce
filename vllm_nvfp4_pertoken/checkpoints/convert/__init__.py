"""BF16 (or FP8) checkpoints to NVFP4: the weights by ModelOpt's rule, and no activation scales.

Per-token serving computes activation scales as it goes, so no calibration data and no forward pass
are needed. ``plan`` decides from headers what becomes of every tensor, ``read`` and ``quantize`` do
it a few megabytes at a time, ``write`` keeps unfinished work apart and resumable, ``check``
measures what quantization cost.
"""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

from vllm_nvfp4_pertoken import __version__
from vllm_nvfp4_pertoken.checkpoints.convert.plan import FORMATS, Options, Plan, Task, make_plan
from vllm_nvfp4_pertoken.checkpoints.convert.quantize import Quantizer
from vllm_nvfp4_pertoken.checkpoints.convert.read import Reader
from vllm_nvfp4_pertoken.checkpoints.convert.write import (
    ShardWriter,
    Workspace,
    check_space,
    copied_files,
)
from vllm_nvfp4_pertoken.checkpoints.headers import fingerprint, read_headers
from vllm_nvfp4_pertoken.checkpoints.layout import (
    EXPERT_TENSOR,
    INDEX_NAME,
    write_index,
    write_json,
)
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "FORMATS",
    "Options",
    "Plan",
    "Sizes",
    "convert_checkpoint",
    "convert_experts",
    "make_plan",
    "sizes",
]

Progress = Callable[[int, int], None]
DEFAULTS = Options()
_MEMORY = 1 << 30  # bytes that all tasks use together, unless one alone needs more


@dataclass(frozen=True)
class Sizes:
    """Bytes of a checkpoint's tensors."""

    experts: int
    total: int


def sizes(path: Path) -> Sizes:
    """Bytes of the experts (their scales included) and of all tensors, from the headers."""
    experts = total = 0
    for header in read_headers(path).values():
        total += header.nbytes
        experts += header.nbytes if EXPERT_TENSOR.match(header.name) else 0
    return Sizes(experts, total)


def convert_experts(src: Path, dst: Path, *, progress: Progress = lambda done, total: None) -> Path:
    """Convert with default options, from scratch: nothing is resumed, and a failure leaves nothing.

    Two processes may do this with the same ``dst``: the second one to finish gets an ``OSError``.
    """
    work = dst.absolute().with_name(f".{dst.name}.{os.getpid()}.partial")
    try:
        return convert_checkpoint(src, dst, progress=progress, work=work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def convert_checkpoint(
    src: Path,
    dst: Path,
    options: Options = DEFAULTS,
    *,
    force: bool = False,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress = lambda done, total: None,
    work: Path | None = None,
) -> Path:
    """Write the checkpoint ``src`` to the directory ``dst`` in NVFP4, or finish doing so.

    Projections that are served as one (gate and up, q, k and v) share one ``weight_scale_2``, taken
    over all of them, as ModelOpt does.

    Args:
        src: a Hugging Face checkpoint in BF16, FP16, FP32 or block FP8 (``weight_scale_inv``).
            Its experts are one matrix each, or fused as ``experts.gate_up_proj``.
        dst: must not exist, or ``force``. It appears when everything is written.
        options: what to quantize and how to write it.
        force: replace ``dst``, and start over where other work is unfinished.
        device: where to compute, ``"cpu"`` or ``"cuda"``; the bytes are the same.
        threads: how many tensors at a time; by default as many as torch uses threads.
        progress: called with the bytes of the source done so far and their total.
        work: the working directory; by default ``.NAME.partial`` beside ``dst``.

    Raises:
        CheckpointError: ``src`` is broken, ``dst`` exists, or the disk is too small.
        UnsupportedError: ``src`` or ``options`` cannot be converted. Both before anything is
            written, but for weights that are NaN or infinite.
    """
    if options.format not in FORMATS:
        raise ValueError(f"format must be one of {FORMATS}, not {options.format!r}")
    plan = make_plan(src, options)
    key = json.dumps(
        {
            "source": [str(src.absolute()), fingerprint(src)],
            "options": asdict(options),
            "version": __version__,
        }
    )
    workspace = Workspace(src, dst, key, force=force, directory=work)
    if workspace.check():
        return dst
    check_space(plan, workspace.directory, dst)
    with workspace.open():
        _write_shards(plan, workspace.directory, device, threads, progress)
        for file in copied_files(src):
            shutil.copy(file, workspace.directory / file.name)
        _write_configs(plan, workspace.directory)
        workspace.publish()
    return dst


def _write_shards(
    plan: Plan, directory: Path, device: str, threads: int | None, progress: Progress
) -> None:
    total = plan.source_bytes
    done = 0
    lock = Lock()

    with Reader() as reader, _tensor_pool(threads) as pool:
        quantizer = Quantizer(reader, device)
        memory = _Budget(_MEMORY)
        for name, tasks in plan.files.items():
            if (directory / name).is_file():
                done += sum(task.source_bytes for task in tasks)
                progress(done, total)
                continue
            outputs = [output for task in tasks for output in task.outputs]
            writer = ShardWriter(directory / name, outputs)
            try:

                def run(task: Task, writer: ShardWriter = writer) -> None:
                    nonlocal done
                    with memory.take(task.memory):
                        quantizer.run(task, writer.write)
                    with lock:
                        done += task.source_bytes
                        progress(done, total)

                futures = [pool.submit(run, task) for task in tasks]
                try:
                    finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
                finally:
                    for future in futures:
                        future.cancel()
                    wait(futures)
                for future in finished:
                    future.result()
                writer.finish()
            finally:
                writer.close()


class _Budget:
    """Bytes that tasks may use at a time; one that is larger than all waits for the others."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = Condition()

    @contextmanager
    def take(self, size: int) -> "Iterator[None]":
        size = min(size, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


@contextmanager
def _tensor_pool(threads: int | None) -> "Iterator[ThreadPoolExecutor]":
    """Threads that work on a tensor each: experts are too small to be worth splitting.

    (Measured beside another busy process: 10 ms a matrix on one core, 210 ms split over two.)
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or before) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _write_configs(plan: Plan, directory: Path) -> None:
    """The index, and the quantization: in config.json and, for ModelOpt, in a file of its own."""
    if (plan.src / INDEX_NAME).is_file():
        outputs = [(output, task.file) for task in plan.tasks for output in task.outputs]
        total = sum(output.nbytes for output, _ in outputs)
        write_index(directory, {output.name: file for output, file in outputs}, total)
    producer = {"name": "vllm-nvfp4-pertoken", "version": __version__}
    ignored = list(plan.ignored)
    quantization: dict[str, Any]
    if plan.options.format == "compressed-tensors":
        quantization = _compressed_tensors(ignored)
    else:
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
        group = {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
        quantization = {
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "quant_algo": "NVFP4",
            "producer": producer,
            "quant_method": "modelopt",
        }
        legacy = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": ignored,
        }
        content = {"producer": producer, "quantization": legacy}
        write_json(directory / "hf_quant_config.json", content)
    write_json(directory / "config.json", {**plan.config, "quantization_config": quantization})


def _compressed_tensors(ignored: list[str]) -> dict[str, Any]:
    """Weights only: there are no activation scales, and other engines must not look for any."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": BLOCK_SIZE,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }

    def pattern(name: str) -> str:
        """compressed-tensors has no wildcards, but regular expressions."""
        escaped = name.removesuffix("*").replace(".", r"\.")
        return f"re:{escaped}.*" if name.endswith("*") else name

    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [pattern(name) for name in ignored],
        "kv_cache_scheme": None,
    }
