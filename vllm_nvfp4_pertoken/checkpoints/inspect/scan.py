"""Read the scales of a checkpoint: the fp32 ones of every weight, and block scales in pieces."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from vllm_nvfp4_pertoken.checkpoints.convert.read import CHUNK_BYTES, Reader
from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader
from vllm_nvfp4_pertoken.checkpoints.inspect.weights import Weight
from vllm_nvfp4_pertoken.checkpoints.scales import E4M3_NAN, damaged_scales, invert_

__all__ = ["read_scales"]

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What a read costs beside its bytes, in bytes, so that progress is even.
_READ = 4096
_AT_A_TIME = 256


def read_scales(
    weights: Sequence[Weight],
    *,
    blocks: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill in the scales of ``weights``.

    Args:
        weights: in any order.
        blocks: read block scales too, a sixteenth of the values, to find damaged ones.
        progress: called with what is done and the total, about in bytes.

    Raises:
        CheckpointError: if a file changes meanwhile.
    """
    # In the order of the files, so that disks read on.
    todo = sorted(weights, key=lambda weight: weight.tensors["weight"].file)
    total = sum(_cost(weight, blocks) for weight in todo)
    pieces = [todo[i : i + _AT_A_TIME] for i in range(0, len(todo), _AT_A_TIME)]
    done = 0
    with Reader() as reader, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

        def work(piece: Sequence[Weight]) -> int:
            _read_scalars(reader, piece)
            if blocks:
                for weight in piece:
                    _read_blocks(reader, weight)
            return sum(_cost(weight, blocks) for weight in piece)

        try:
            for cost in pool.map(work, pieces):
                done += cost
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)  # before the reader closes its files
            raise


def _cost(weight: Weight, blocks: bool) -> int:
    scale = weight.tensors.get("weight_scale")
    return _READ + (scale.nbytes if scale is not None and blocks else 0)


def _read_scalars(reader: Reader, weights: Sequence[Weight]) -> None:
    for kind in ("weight_scale_2", "input_scale"):
        having = [weight for weight in weights if _is_scalar(weight.tensors.get(kind))]
        values = torch.tensor(
            [_scalar(reader, weight.tensors[kind]) for weight in having], dtype=torch.float32
        )
        inverse = torch.tensor([weight.inverse for weight in having], dtype=torch.bool)
        inverted = values.clone()
        invert_(inverted)
        values = torch.where(inverse, inverted, values)
        for weight, value in zip(having, values.tolist(), strict=True):
            setattr(weight, kind, value)


def _is_scalar(header: TensorHeader | None) -> bool:
    return header is not None and header.shape in ((), (1,)) and header.dtype in _FLOATS


def _scalar(reader: Reader, header: TensorHeader) -> float:
    return float(reader.raw(header, 0, header.nbytes).view(_FLOATS[header.dtype]).item())


def _read_blocks(reader: Reader, weight: Weight) -> None:
    header = weight.tensors.get("weight_scale")
    if weight.format != "NVFP4" or header is None or header.dtype != "F8_E4M3":
        return
    for begin in range(0, header.nbytes, CHUNK_BYTES):
        scales = reader.raw(header, begin, min(CHUNK_BYTES, header.nbytes - begin))
        # Positive numbers are the bytes between zero and NaN, and finding that out is quick.
        smallest, largest = (int(edge) for edge in scales.aminmax())
        # Of an all-zero matrix, ModelOpt writes NaN; it is served as zeros.
        if (smallest == 0 or largest >= E4M3_NAN) and weight.weight_scale_2 != 0:
            weight.damaged |= bool(damaged_scales(scales))
            weight.zero_blocks |= bool(((scales & E4M3_NAN) == 0).any())
