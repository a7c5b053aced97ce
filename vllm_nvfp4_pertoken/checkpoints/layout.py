"""How expert tensors are named, and how a checkpoint directory is written.

One table for the names; everything that has to know them takes them from here.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_nvfp4_pertoken.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = [
    "COMPRESSED_KINDS",
    "EXPERT_TENSOR",
    "FUSED_TENSOR",
    "INDEX_NAME",
    "LAYOUTS",
    "MODELOPT_KINDS",
    "ExpertLayout",
    "layout_of",
    "new_directory",
    "save_shard",
    "write_index",
    "write_json",
]

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class ExpertLayout:
    """The names of one expert's projections: ``down(act(gate(x)) * up(x))``."""

    families: str
    gate: str
    up: str
    down: str

    @property
    def projections(self) -> tuple[str, str, str]:
        return (self.gate, self.up, self.down)


LAYOUTS = (
    ExpertLayout("Qwen3-MoE, DeepSeek-V3, GLM, Nemotron-H", "gate_proj", "up_proj", "down_proj"),
    ExpertLayout("Mixtral", "w1", "w3", "w2"),
)

# What an NVFP4 weight consists of, and what checkpoints call it. The last one of compressed-tensors
# is the inverse of ModelOpt's.
MODELOPT_KINDS = {
    "weight": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_scale_2",
}
COMPRESSED_KINDS = {
    "weight": "weight_packed",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_global_scale",
}

# One expert's tensor: container, expert, projection, kind. The container is what a router chooses
# from, such as `model.layers.3.mlp.experts`.
EXPERT_TENSOR = re.compile(
    r"^(?P<container>.*\bexperts)\.(?P<expert>[0-9]{1,6})\."
    rf"(?P<projection>{'|'.join(name for layout in LAYOUTS for name in layout.projections)})"
    r"\.(?P<kind>\w+)$"
)

# All experts' tensors in one: `….experts.gate_up_proj`, `….experts.gate_up_proj_weight_scale`.
FUSED_TENSOR = re.compile(
    r"^(?P<container>.*\bexperts)\.(?P<projection>gate_up_proj|up_proj|down_proj)"
    r"(?:_(?P<kind>weight_scale|weight_scale_2|input_scale|bias))?$"
)


def layout_of(projection: str) -> ExpertLayout:
    """The layout that has a projection of this name."""
    return next(layout for layout in LAYOUTS if projection in layout.projections)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which appears under ``path`` only when the block ends without error.

    Raises:
        CheckpointError: if ``path`` exists. Nothing is ever overwritten.
    """
    path = path.absolute()
    if path.exists() or path.is_symlink():
        raise CheckpointError(
            f"{path} exists",
            expected="a path where a new directory can be made",
            way_out="choose another path, or remove it first",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_shard(tensors: "dict[str, torch.Tensor]", file: Path) -> int:
    """Write one safetensors file, readable for whoever may read its directory; its bytes."""
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)
    return sum(tensor.nbytes for tensor in tensors.values())


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """The index of a sharded checkpoint, as transformers writes it."""
    write_json(
        directory / INDEX_NAME,
        {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))},
    )
