"""Tile sizes of the Triton GEMMs: a table by device and shape, and a default for all others.

``benchmarks/tune_triton.py`` measures the candidates and prints the table; nothing is tuned while
serving. A configuration changes speed only: results differ at most in the order of sums inside a
tensor-core instruction, and among configurations with the same instruction not at all.
"""

import functools
import math
from typing import NamedTuple

import torch

__all__ = ["BATCH_INVARIANT", "TABLE", "Config", "config_for", "default_configs", "limits_for"]


class Config(NamedTuple):
    """How a grouped GEMM is cut up.

    Attributes:
        bm: rows (tokens) per block, 8 to 256.
        bn: columns (weight rows) per tile, a multiple of 16.
        bk: elements of k per step, a multiple of 64.
        warps: per program.
        stages: of the software pipeline.
        half: whether blocks that are at most half full get half the rows.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    half: bool = False


# For engines that need a row's result not to depend on its batch (RL): one for everything.
BATCH_INVARIANT = Config(64, 128, 128, 8, 3)

# device name -> (N, K) -> ((rows per expert up to which it holds, configuration), …), ascending.
TABLE: dict[str, dict[tuple[int, int], tuple[tuple[float, Config], ...]]] = {}


@functools.cache
def config_for(device: torch.device, rows_per_expert: float, n: int, k: int) -> Config:
    """The configuration of the table, or the default.

    Args:
        device: where it runs.
        rows_per_expert: entries (tokens x top_k) over local experts.
        n, k: of the GEMM: weights are [n, k].
    """
    rows = _rows(device, n, k)
    return next(config for limit, config in rows if rows_per_expert <= limit)


def limits_for(device: torch.device, n: int, k: int) -> tuple[float, ...]:
    """The rows per expert up to which each configuration holds, without the last one's."""
    return tuple(limit for limit, _ in _rows(device, n, k)[:-1])


def _rows(device: torch.device, n: int, k: int) -> tuple[tuple[float, Config], ...]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return TABLE.get(name, {}).get((n, k)) or default_configs(n)


def default_configs(n: int) -> tuple[tuple[float, Config], ...]:
    """A sane choice for GPUs and sizes that nobody measured: little shared memory."""
    wide = 64 if n < 128 else 128
    return (
        (1, Config(8, 64, 256, 4, 3)),
        (4, Config(8, wide, 256, 4, 3)),
        (16, Config(16, wide, 128, 4, 3)),
        (48, Config(32, wide, 128, 4, 3)),
        (96, Config(64, wide, 128, 8, 3)),
        (math.inf, Config(128, wide, 64, 8, 3, half=True)),
    )
