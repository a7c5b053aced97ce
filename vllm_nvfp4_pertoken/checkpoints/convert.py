"""BF16 experts to ModelOpt NVFP4: the weights by ModelOpt's rule, and no activation scales.

Per-token serving computes activation scales as it goes, so no calibration data and no forward pass
are needed, and shards are converted one after the other without ever holding the model. Everything
but the experts stays as it is.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from vllm_nvfp4_pertoken import __version__
from vllm_nvfp4_pertoken.checkpoints.layout import (
    EXPERT_TENSOR,
    INDEX_NAME,
    layout_of,
    new_directory,
    save_shard,
    write_index,
    write_json,
)
from vllm_nvfp4_pertoken.checkpoints.verify import TensorHeader, read_headers
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

if TYPE_CHECKING:
    import torch

__all__ = ["Sizes", "convert_experts", "drift_experts", "sizes"]

_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
# Weights in other formats, which must not travel along, and what other tools leave behind.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}

Progress = Callable[[int, int], None]
Read = Callable[[str], "torch.Tensor"]


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
    """Write the checkpoint ``src`` to the new directory ``dst`` with its experts in NVFP4.

    Gate and up of an expert share one ``weight_scale_2``, taken over both, as ModelOpt does.

    Args:
        src: a Hugging Face checkpoint whose experts are separate BF16, FP16 or FP32 matrices, under
            one of the names in :data:`~vllm_nvfp4_pertoken.checkpoints.layout.LAYOUTS`.
        dst: must not exist. It appears when everything is written.
        progress: called with the bytes of expert weights done so far and their total.

    Raises:
        CheckpointError: ``src`` is broken, or ``dst`` exists. Checked before anything is written.
        UnsupportedError: ``src`` is quantized already, or has no experts that can be converted.
    """
    headers = read_headers(src)
    config = _read_config(src)
    experts = _check_source(src, config, headers)
    total = sum(header.nbytes for header in experts.values())
    done = 0
    lock = Lock()
    amax: dict[str, torch.Tensor] = {}

    def convert(name: str, weight: "torch.Tensor", read: Read) -> "State":
        nonlocal done
        if name not in experts:
            return {name: weight}
        converted = _quantize(name, weight, experts, read, amax)
        with lock:
            done += weight.nbytes
            progress(done, total)
        return converted

    with new_directory(dst) as directory:
        _rewrite_shards(src, directory, headers, convert)
        _copy_other_files(src, directory)
        _write_configs(directory, config, _ignored_modules(headers))
    return dst


def drift_experts(src: Path, dst: Path, *, largest: int = 12) -> Path:
    """Write the NVFP4 checkpoint ``src`` to ``dst`` with ``up * 2^k`` and ``down * 2^-k``.

    The function stays, and so does every code and block scale: only ``weight_scale_2`` carries the
    factor, with a ``k`` near ``largest`` for one expert and near ``-largest`` for the next. The
    input of ``down`` moves by 2^k, far out of the range of any activation scale fixed beforehand,
    while per-token scales move with it and give the same bits.
    """
    headers = read_headers(src)

    def drift(name: str, tensor: "torch.Tensor", read: Read) -> "State":
        match = EXPERT_TENSOR.match(name)
        if match and match["kind"] == "weight_scale_2":
            layout = layout_of(match["projection"])
            expert = int(match["expert"])
            k = (largest - expert % 4) * (-1) ** expert
            if match["projection"] == layout.up:
                tensor = tensor * 2.0**k
            elif match["projection"] == layout.down:
                tensor = tensor * 2.0**-k
        return {name: tensor}

    with new_directory(dst) as directory:
        _rewrite_shards(src, directory, headers, drift)
        _copy_other_files(src, directory)
    return dst


State = dict[str, "torch.Tensor"]


def _quantize(
    name: str,
    weight: "torch.Tensor",
    experts: Mapping[str, TensorHeader],
    read: Read,
    amax: "dict[str, torch.Tensor]",
) -> State:
    """The NVFP4 tensors of one expert's matrix. ``amax`` remembers the pairs of gate and up."""
    import torch

    from vllm_nvfp4_pertoken.nvfp4 import NVFP4, quantize_weight

    match = EXPERT_TENSOR.match(name)
    assert match is not None
    layout = layout_of(match["projection"])
    scale_2 = None
    if match["projection"] != layout.down:
        prefix = name.removesuffix(f"{match['projection']}.weight")
        if prefix not in amax:
            pair = (f"{prefix}{layout.gate}.weight", f"{prefix}{layout.up}.weight")
            values = [weight if n == name else read(n) for n in pair if n in experts]
            amax[prefix] = torch.stack([v.abs().max().float() for v in values]).max()
        if amax[prefix] != 0:
            scale_2 = amax[prefix] / NVFP4.range
    try:
        quantized = quantize_weight(weight, scale_2)
    except ValueError as error:
        raise CheckpointError(
            f"{name} in {experts[name].file}: {error}",
            expected="finite weights",
            way_out="export the BF16 checkpoint again",
        ) from error
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.weight": quantized.weight,
        f"{stem}.weight_scale": quantized.weight_scale,
        f"{stem}.weight_scale_2": quantized.weight_scale_2.clone(),
    }


def _check_source(
    src: Path, config: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> dict[str, TensorHeader]:
    """The expert matrices to convert; everything about them that headers tell is checked."""
    text_config = config.get("text_config") or {}
    for section, where in ((config, "config.json"), (text_config, "config.json, text_config")):
        if section.get("quantization_config"):
            method = section["quantization_config"].get("quant_method", "unnamed")
            raise UnsupportedError(
                f"{src} is quantized already ({where} has a quantization_config of {method!r})",
                expected="a checkpoint in BF16",
                way_out="convert the original checkpoint; if this one is ModelOpt NVFP4, serve it "
                "as it is",
            )
    if (src / "hf_quant_config.json").is_file():
        raise UnsupportedError(
            f"{src} is quantized already (it has a hf_quant_config.json)",
            expected="a checkpoint in BF16",
            way_out="convert the original checkpoint; if this one is NVFP4, serve it as it is",
        )
    experts: dict[str, TensorHeader] = {}
    projections: dict[str, set[str]] = {}
    for name, header in headers.items():
        match = EXPERT_TENSOR.match(name)
        if match is None:
            continue
        if match["kind"] != "weight":
            raise UnsupportedError(
                f"{name} in {header.file} is not a weight",
                expected="experts that consist of weights alone",
                way_out="expert biases and scales cannot be converted",
            )
        experts[name] = header
        projections.setdefault(match["container"], set()).add(match["projection"])
        good = len(header.shape) == 2 and header.shape[1] % BLOCK_SIZE == 0
        if not good or header.dtype not in _ITEM_BYTES:
            raise UnsupportedError(
                f"{name} in {header.file} is {header.dtype} {list(header.shape)}",
                expected=f"BF16, F16 or F32 [rows, a multiple of {BLOCK_SIZE}]",
                way_out="NVFP4 cannot hold this matrix; serve the model unquantized",
            )
    if not experts:
        fused = sorted(name for name in headers if ".experts." in name)
        found = f"; it has {fused[0]!r}, experts fused in one tensor" if fused else ""
        raise UnsupportedError(
            f"{src} has no tensors of single experts{found}",
            expected="names such as model.layers.0.mlp.experts.0.gate_proj.weight (Qwen3-MoE, "
            "DeepSeek-V3) or model.layers.0.block_sparse_moe.experts.0.w1.weight (Mixtral)",
            way_out="export the model with ModelOpt",
        )
    for name in experts:
        match = EXPERT_TENSOR.match(name)
        assert match is not None
        for projection in sorted(projections[match["container"]]):
            other = f"{match['container']}.{match['expert']}.{projection}.weight"
            if other not in experts:
                raise CheckpointError(
                    f"{other} is missing in {src}, where {name} is in {experts[name].file.name}",
                    expected="all projections of every expert",
                    way_out="finish the download or copy the checkpoint again",
                )
    return experts


def _rewrite_shards(
    src: Path,
    dst: Path,
    headers: Mapping[str, TensorHeader],
    rewrite: Callable[[str, "torch.Tensor", Read], State],
) -> None:
    """Every weight file of ``src`` again in ``dst``, each tensor put through ``rewrite``."""
    from safetensors import safe_open

    def read(name: str) -> "torch.Tensor":
        with safe_open(headers[name].file, framework="pt") as other:
            return other.get_tensor(name)

    weight_map: dict[str, str] = {}
    total = 0
    for file in sorted({header.file for header in headers.values()}):
        tensors: State = {}
        # The pool ends before the file does: closed under a thread that still reads, safetensors
        # raises "Already borrowed" in place of the error, or the Ctrl-C, that ended the block.
        with safe_open(file, framework="pt") as opened, _tensor_pool() as pool:
            for rewritten in pool.map(
                lambda name, opened=opened: rewrite(name, opened.get_tensor(name), read),
                opened.keys(),
            ):
                tensors |= rewritten
        total += save_shard(tensors, dst / file.name)
        weight_map |= dict.fromkeys(tensors, file.name)
    if (src / INDEX_NAME).is_file():
        write_index(dst, weight_map, total)


@contextmanager
def _tensor_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that work on a tensor each: experts are too small to be worth splitting.

    (Measured beside another busy process: 10 ms a matrix on one core, 210 ms split over two.)
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _copy_other_files(src: Path, dst: Path) -> None:
    """Configuration, tokenizer, code: all files beside the weights."""
    for file in src.iterdir():
        weights = file.suffix in _NOT_COPIED or file.name.endswith(".index.json")
        if file.is_file() and not weights and not file.name.startswith("."):
            shutil.copy(file, dst / file.name)


def _ignored_modules(headers: Mapping[str, TensorHeader]) -> list[str]:
    """The modules that stay in BF16, in the form in which ModelOpt lists them."""

    def modules() -> Iterator[str]:
        yield "lm_head"  # listed also where it is tied to the embedding
        for name, header in headers.items():
            module, _, kind = name.rpartition(".")
            if kind != "weight" or len(header.shape) < 2 or EXPERT_TENSOR.match(name):
                continue
            before, attention, _ = module.rpartition(".self_attn.")
            yield f"{before}.self_attn*" if attention else module

    return sorted(set(modules()))


def _write_configs(dst: Path, config: Mapping[str, Any], ignore: list[str]) -> None:
    """The quantization, in config.json and again in the older hf_quant_config.json."""
    producer = {"name": "vllm-nvfp4-pertoken", "version": __version__}
    group = {"input_activations": _NVFP4, "weights": _NVFP4, "targets": ["Linear"]}
    quantization = {
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "quant_algo": "NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
    }
    write_json(dst / "config.json", {**config, "quantization_config": quantization})
    legacy = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK_SIZE,
        "exclude_modules": ignore,
    }
    write_json(dst / "hf_quant_config.json", {"producer": producer, "quantization": legacy})


def _read_config(src: Path) -> dict[str, Any]:
    file = src / "config.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist",
            expected="a Hugging Face checkpoint directory",
            way_out="check the path, and that the download finished",
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
