"""The same function with weights that left their range, as training moves them."""

import shutil
from pathlib import Path

from vllm_nvfp4_pertoken.checkpoints.headers import read_headers
from vllm_nvfp4_pertoken.checkpoints.layout import (
    EXPERT_TENSOR,
    layout_of,
    new_directory,
    save_shard,
)

__all__ = ["drift_experts"]


def drift_experts(src: Path, dst: Path, *, largest: int = 12) -> Path:
    """Write the NVFP4 checkpoint ``src`` to ``dst`` with ``up * 2^k`` and ``down * 2^-k``.

    The function stays, and so does every code and block scale: only ``weight_scale_2`` carries the
    factor, with a ``k`` near ``largest`` for one expert and near ``-largest`` for the next. The
    input of ``down`` moves by 2^k, far out of the range of any activation scale fixed beforehand,
    while per-token scales move with it and give the same bits.
    """
    from safetensors.torch import load_file

    files = sorted({header.file for header in read_headers(src).values()})
    with new_directory(dst) as directory:
        for file in files:
            tensors = load_file(file)
            for name in tensors:
                match = EXPERT_TENSOR.match(name)
                if match and match["kind"] == "weight_scale_2":
                    layout = layout_of(match["projection"])
                    expert = int(match["expert"])
                    k = (largest - expert % 4) * (-1) ** expert
                    factors = {layout.up: 2.0**k, layout.down: 2.0**-k}
                    tensors[name] = tensors[name] * factors.get(match["projection"], 1.0)
            save_shard(tensors, directory / file.name)
        for other in src.iterdir():
            if other.is_file() and other not in files and not other.name.startswith("."):
                shutil.copy(other, directory / other.name)
    return dst
