"""Matrices to NVFP4 bytes, in pieces that fit into memory, by ModelOpt's rule.

``weight_scale_2`` is the largest magnitude of all matrices that share it, over 2688. It needs every
value before the first is quantized, so each matrix is read twice: once for the maximum, once for
the codes. Small matrices are kept between the two.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING

from vllm_nvfp4_pertoken.checkpoints.convert.plan import Member, Task
from vllm_nvfp4_pertoken.checkpoints.convert.read import CHUNK_BYTES, Matrix, Reader
from vllm_nvfp4_pertoken.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["Quantizer", "largest_magnitude"]

# Name of a tensor of the result, byte in it, and the bytes that belong there.
Write = Callable[[str, int, "torch.Tensor"], None]


class Quantizer:
    """Runs tasks, from any thread.

    Args:
        reader: of the source.
        device: where values are computed; the bytes are the same on each.
    """

    def __init__(self, reader: Reader, device: str = "cpu") -> None:
        self._reader = reader
        self._device = device
        self._amax: dict[tuple[Matrix, ...], Future[torch.Tensor]] = {}
        self._lock = Lock()

    def run(self, task: Task, write: Write) -> None:
        """Do one task and hand its bytes to ``write``, in pieces and any order."""
        if task.kind == "copy":
            assert task.source is not None
            size = task.source.nbytes
            for begin in range(0, size, CHUNK_BYTES):
                data = self._reader.raw(task.source, begin, min(CHUNK_BYTES, size - begin))
                write(task.source.name, begin, data)
        elif task.kind == "decode":
            (member,) = task.members
            (matrix,) = member.matrices
            for start, rows in self._reader.chunks(matrix):
                write(member.module, start * matrix.columns * rows.itemsize, rows)
        else:
            self._quantize(task, write)

    def _quantize(self, task: Task, write: Write) -> None:
        from vllm_nvfp4_pertoken.nvfp4 import scale_of_weights

        mine = [matrix for member in task.members for matrix in member.matrices]
        cache: dict[Matrix, list[tuple[int, torch.Tensor]]] = {}
        if sum(matrix.nbytes for matrix in mine) <= CHUNK_BYTES:
            cache = {matrix: list(self._chunks(matrix)) for matrix in mine}

        def chunks(matrix: Matrix) -> Iterator[tuple[int, "torch.Tensor"]]:
            return iter(cache[matrix]) if matrix in cache else self._chunks(matrix)

        # On the CPU, as the maximum is.
        scale_2 = scale_of_weights(self._shared_amax(task, chunks))
        for member in task.members:
            for i, matrix in enumerate(member.matrices):
                for start, rows in chunks(matrix):
                    self._write_rows(task, member, i, start, rows, scale_2, write)
            name = task_output(task, member, 2)
            write(name, 0, scale_2 if name.endswith("_scale_2") else scale_2.reciprocal())

    def _chunks(self, matrix: Matrix) -> Iterator[tuple[int, "torch.Tensor"]]:
        for start, rows in self._reader.chunks(matrix):
            yield start, rows.to(self._device)

    def _write_rows(
        self,
        task: Task,
        member: Member,
        expert: int,
        start: int,
        rows: "torch.Tensor",
        scale_2: "torch.Tensor",
        write: Write,
    ) -> None:
        from vllm_nvfp4_pertoken.nvfp4 import quantize_weight

        quantized = quantize_weight(rows, scale_2.to(rows.device))
        for kind, values in enumerate((quantized.weight, quantized.weight_scale)):
            if member.fused:
                # A whole expert at once: fused experts lie transposed, so they come in one chunk.
                values = values.T.contiguous()
                begin = expert * values.nbytes
            else:
                begin = start * values.shape[-1]
            write(task_output(task, member, kind), begin, values.cpu())

    def _shared_amax(
        self, task: Task, chunks: Callable[[Matrix], Iterator[tuple[int, "torch.Tensor"]]]
    ) -> "torch.Tensor":
        """Largest magnitude of a group, float32 []: computed once, by whoever asks first."""
        with self._lock:
            future = self._amax.get(task.group)
            mine = future is None
            if future is None:
                future = self._amax[task.group] = Future()
        if mine:
            try:
                future.set_result(self._compute_amax(task, chunks))
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()

    def _compute_amax(
        self, task: Task, chunks: Callable[[Matrix], Iterator[tuple[int, "torch.Tensor"]]]
    ) -> "torch.Tensor":
        import torch

        largest = torch.zeros(())
        for matrix in task.group:
            for start, rows in chunks(matrix):
                amax = largest_magnitude(rows)
                if not amax.isfinite():
                    raise _not_finite(matrix, start, rows)
                largest = torch.maximum(largest, amax)
        return largest


def largest_magnitude(rows: "torch.Tensor") -> "torch.Tensor":
    """float32 [] on the CPU; NaN or infinity where there is one."""
    import torch

    return torch.maximum(rows.amax(), -rows.amin()).float().cpu()


def task_output(task: Task, member: Member, kind: int) -> str:
    """The name of a member's weight (0), block scales (1) or second scale (2)."""
    return task.outputs[3 * task.members.index(member) + kind].name


def _not_finite(matrix: Matrix, start: int, rows: "torch.Tensor") -> CheckpointError:
    row, column = (~rows.isfinite()).nonzero()[0].tolist()
    expert = f", expert {matrix.expert}" if matrix.expert is not None else ""
    return CheckpointError(
        f"{matrix.source.name} in {matrix.source.file} has {rows[row, column].item()} at row "
        f"{matrix.first_row + start + row}, column {column}{expert}",
        expected="finite weights, since NVFP4 has neither NaN nor infinity",
        way_out="export the source checkpoint again",
    )
