"""What quantization cost: every quantized matrix against its source."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_nvfp4_pertoken.checkpoints.convert.plan import Member, Plan, Task
from vllm_nvfp4_pertoken.checkpoints.convert.quantize import task_output
from vllm_nvfp4_pertoken.checkpoints.convert.read import Matrix, Reader
from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader, read_headers
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

if TYPE_CHECKING:
    import torch

__all__ = ["SUSPICIOUS", "ModuleError", "measure_errors"]

# Normally distributed weights lose 0.095 of their norm, a matrix far smaller than its partner more.
SUSPICIOUS = 0.2


@dataclass(frozen=True)
class ModuleError:
    """How far a module's weights are from the source's.

    Attributes:
        module: its name.
        relative: norm of the difference over norm of the source; NaN if a value is not finite.
        largest: the largest difference of an element.
        file: where the result is.
    """

    module: str
    relative: float
    largest: float
    file: str


def measure_errors(
    plan: Plan, dst: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[ModuleError]:
    """Dequantize all that ``plan`` quantized and compare with the source; the worst first."""
    headers = read_headers(dst)
    jobs = [
        (task, member) for task in plan.tasks if task.kind == "quantize" for member in task.members
    ]
    total = sum(matrix.nbytes for _, member in jobs for matrix in member.matrices)
    done = 0
    errors = []
    with Reader() as reader, ThreadPoolExecutor(_threads(jobs)) as pool:
        results = pool.map(lambda job: _measure(job[0], job[1], reader, headers), jobs)
        for (_, member), error in zip(jobs, results, strict=True):
            errors.append(error)
            done += sum(matrix.nbytes for matrix in member.matrices)
            progress(done, total)
    return sorted(errors, key=lambda e: math.inf if math.isnan(e.relative) else e.relative)[::-1]


def _threads(jobs: list[tuple[Task, Member]]) -> int:
    """As many as torch uses, unless whole experts at a time would take more than a gigabyte."""
    import torch

    largest = max((task.memory for task, _ in jobs), default=1)
    return max(1, min(torch.get_num_threads(), (1 << 30) // max(largest, 1)))


def _measure(
    task: Task, member: Member, reader: Reader, headers: dict[str, TensorHeader]
) -> ModuleError:
    import torch

    codes, scales, last = (headers[task_output(task, member, kind)] for kind in range(3))
    scale_2 = reader.raw(last, 0, 4).view(torch.float32)[0]
    if not last.name.endswith("_scale_2"):
        scale_2 = scale_2.reciprocal()
    squares = difference_squares = largest = 0.0
    for i, matrix in enumerate(member.matrices):
        for start, rows in reader.chunks(matrix):
            values = _values(member, i, codes, scales, scale_2, start, rows.shape, reader)
            source = rows.float()
            difference = source - values
            squares += float(source.square().sum(dtype=torch.float64))
            difference_squares += float(difference.square().sum(dtype=torch.float64))
            largest = max(largest, float(difference.abs().max()))
    relative = math.sqrt(difference_squares / squares) if squares else math.sqrt(difference_squares)
    return ModuleError(member.module, relative, largest, codes.file.name)


def _values(
    member: Member,
    index: int,
    codes: TensorHeader,
    scales: TensorHeader,
    scale_2: "torch.Tensor",
    start: int,
    shape: tuple[int, ...],
    reader: Reader,
) -> "torch.Tensor":
    from vllm_nvfp4_pertoken.nvfp4 import dequantize

    rows, columns = shape
    expert = index if member.fused else None
    total = member.matrices[index].rows

    def part(header: TensorHeader, width: int) -> "torch.Tensor":
        matrix = Matrix(header, total, width, expert=expert, transposed=member.fused)
        return reader.rows(matrix, start, start + rows)

    return dequantize(part(codes, columns // 2), part(scales, columns // BLOCK_SIZE), scale_2)
