"""Read matrices out of safetensors files, a few rows at a time.

Plain ``pread``, not a memory map: pages of a map count as this process's memory for as long as the
file is open, and a shard can be larger than the machine.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader, tensor_bytes
from vllm_nvfp4_pertoken.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["CHUNK_BYTES", "Matrix", "Reader", "torch_dtype"]

CHUNK_BYTES = 16 << 20
_FP8 = "F8_E4M3"


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] that is, or lies in, a tensor of the source.

    Attributes:
        source: the tensor: [rows, columns], or fused experts [E, rows, columns], or transposed
            [E, columns, rows].
        rows, columns: of the matrix: outputs and inputs of the linear.
        expert: its index along the first dimension of fused experts.
        first_row: where it begins in the expert, whose gate and up lie one after the other.
        transposed: whether the tensor holds it as [columns, rows].
        scale: of FP8 weights, their ``weight_scale_inv``: float, one for ``block`` values.
        block: rows and columns that share an FP8 scale.
    """

    source: TensorHeader
    rows: int
    columns: int
    expert: int | None = None
    first_row: int = 0
    transposed: bool = False
    scale: TensorHeader | None = None
    block: tuple[int, int] = (128, 128)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in the source's dtype."""
        return tensor_bytes(self.source.dtype, (self.rows, self.columns))


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a safetensors dtype that weights can have."""
    import torch

    return {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        _FP8: torch.float8_e4m3fn,
        "U8": torch.uint8,
    }[name]


class Reader:
    """Reads from any thread; files are opened once and closed with the reader."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[int, dict[str, int]]] = {}
        self._lock = Lock()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def raw(self, header: TensorHeader, begin: int, size: int) -> "torch.Tensor":
        """``size`` bytes of a tensor from its byte ``begin`` on, uint8."""
        import torch

        descriptor, begins = self._open(header.file)
        buffer = torch.empty(size, dtype=torch.uint8)
        view = buffer.numpy().data
        done = 0
        while done < size:
            count = os.preadv(descriptor, [view[done:]], begins[header.name] + begin + done)
            if not count:
                raise CheckpointError(
                    f"{header.file} ends inside of {header.name}",
                    expected="a whole safetensors file, which nobody changes meanwhile",
                    way_out="copy the file again",
                )
            done += count
        return buffer

    def rows(self, matrix: Matrix, start: int, stop: int) -> "torch.Tensor":
        """Rows of a matrix: [stop - start, columns] in its own dtype, FP8 as bfloat16."""
        header = matrix.source
        dtype = torch_dtype(header.dtype)
        size = dtype.itemsize
        if matrix.transposed:
            _, columns, width = header.shape
            nbytes = columns * width * size
            whole = self.raw(header, (matrix.expert or 0) * nbytes, nbytes)
            part = slice(matrix.first_row + start, matrix.first_row + stop)
            return whole.view(dtype).view(columns, width).T[part].contiguous()
        first = matrix.first_row + start
        if matrix.expert is not None:
            first += matrix.expert * header.shape[1]
        length = matrix.columns * size
        bytes_ = self.raw(header, first * length, (stop - start) * length)
        rows = bytes_.view(dtype).view(stop - start, matrix.columns)
        return rows if matrix.scale is None else self._dequantize(matrix, rows, start, stop)

    def chunks(self, matrix: Matrix) -> Iterator[tuple[int, "torch.Tensor"]]:
        """The matrix in pieces of about ``CHUNK_BYTES``: first row, rows."""
        step = matrix.rows
        if not matrix.transposed:
            step = max(1, CHUNK_BYTES * matrix.rows // max(1, matrix.nbytes))
            step = max(step // matrix.block[0], 1) * matrix.block[0]
        for start in range(0, matrix.rows, step):
            yield start, self.rows(matrix, start, min(start + step, matrix.rows))

    def _dequantize(
        self, matrix: Matrix, rows: "torch.Tensor", start: int, stop: int
    ) -> "torch.Tensor":
        """FP8 blocks times their scales, rounded to bfloat16 as DeepSeek's own script does."""
        import torch

        scale_header = matrix.scale
        assert scale_header is not None
        height, width = matrix.block
        scales = self.raw(scale_header, 0, scale_header.nbytes)
        scales = scales.view(torch_dtype(scale_header.dtype)).view(scale_header.shape).float()
        scales = scales[start // height : -(-stop // height)]
        scales = scales.repeat_interleave(height, 0)[start % height :][: stop - start]
        scales = scales.repeat_interleave(width, 1)[:, : matrix.columns]
        return rows.float().mul_(scales).to(torch.bfloat16)

    def _open(self, file: Path) -> tuple[int, dict[str, int]]:
        with self._lock:
            if file not in self._files:
                descriptor = os.open(file, os.O_RDONLY)
                length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
                header = json.loads(os.pread(descriptor, length, 8))
                begins = {
                    name: 8 + length + entry["data_offsets"][0]
                    for name, entry in header.items()
                    if name != "__metadata__"
                }
                self._files[file] = (descriptor, begins)
            return self._files[file]
