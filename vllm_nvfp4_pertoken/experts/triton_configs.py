"""Tile sizes of the Triton GEMMs: a table by device and shape, and a default for all others.

``benchmarks/tune_triton.py`` measures the candidates and prints the table; nothing is tuned while
serving. A configuration changes speed only: results differ at most in the order of sums inside a
tensor-core instruction, and among configurations with the same instruction not at all.
"""

import functools
from typing import NamedTuple

import torch

__all__ = ["BATCH_INVARIANT", "TABLE", "Config", "config_for", "default_config"]


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
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    for limit, config in TABLE.get(name, {}).get((n, k), ()):
        if rows_per_expert <= limit:
            return config
    return default_config(rows_per_expert, n)


def default_config(rows_per_expert: float, n: int) -> Config:
    """A sane choice for GPUs that nobody measured: small shared memory, no rare instructions."""
    bn = 64 if rows_per_expert <= 1 or n < 128 else 128
    if rows_per_expert <= 4:
        return Config(8, bn, 256, 4, 3)
    if rows_per_expert <= 16:
        return Config(16, bn, 128, 4, 3)
    if rows_per_expert <= 48:
        return Config(32, bn, 128, 4, 3)
    if rows_per_expert <= 96:
        return Config(64, bn, 128, 8, 3)
    return Config(128, bn, 64, 8, 3, half=True)
