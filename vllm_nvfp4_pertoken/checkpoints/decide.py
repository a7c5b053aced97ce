"""How one module is served: what the config says and what the tensors say, brought together.

The engine asks this for every layer it builds, ``nvfp4-pertoken inspect`` for every module it sees.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from vllm_nvfp4_pertoken.checkpoints.compressed import algorithm_of_target
from vllm_nvfp4_pertoken.checkpoints.modules import (
    NVFP4_ALGORITHMS,
    Packed,
    algorithm_of,
    is_excluded,
    stored_algorithm,
)
from vllm_nvfp4_pertoken.checkpoints.quant_config import (
    COMPRESSED_TENSORS,
    MIXED,
    QuantDescription,
)
from vllm_nvfp4_pertoken.errors import CheckpointError

__all__ = ["DRAFT", "Served", "is_draft", "serve_as"]

# Layers for speculative decoding, which checkpoints carry beside the model's.
DRAFT = re.compile(r"^(?:model\.)?mtp\.")
_ANY_DRAFT = re.compile(r"(^|\.)mtp(\.|_|$)")
_LAYER = re.compile(r"(?:model\.|language_model\.|backbone\.)*layers\.([0-9]{1,6})\.")

# Parts of multimodal models that exporters leave alone, and often do not list.
_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")


class Served(NamedTuple):
    """How a module is served.

    Attributes:
        algorithm: a ModelOpt algorithm, such as ``"NVFP4"``; None: not quantized.
        contradiction: the format that the tensors are in where the config says another one.
    """

    algorithm: str | None
    contradiction: str | None = None


def is_draft(module: str, layers: int | None) -> bool:
    """Whether a module is of a draft: exporters leave those unquantized, and engines expect that.

    Args:
        module: its name in the checkpoint.
        layers: ``num_hidden_layers``; what lies beyond, some models use for drafts.
    """
    match = _LAYER.match(module)
    beyond = bool(match and layers is not None and int(match[1]) >= layers)
    return beyond or bool(_ANY_DRAFT.search(module))


def serve_as(
    module: str,
    description: QuantDescription,
    stored: Mapping[str, str],
    packed: Packed,
    *,
    tied_head: bool = False,
) -> Served:
    """How a module is served: as the config says, unless the tensors say otherwise.

    Args:
        module: a name in the words of the other arguments; ``….experts`` for routed experts.
        description: the checkpoint's quantization section.
        stored: formats of modules, from :func:`modules.stored_formats`.
        packed: fused modules and their parts, ``{"qkv_proj": ["q_proj", …]}``.
        tied_head: this is an ``lm_head`` that shares the embedding's weight.

    Raises:
        CheckpointError: for a module that is NVFP4 in one and FP8 in the other, or whose parts
            differ though they are served as one.
    """
    declared = _declared(module, description, packed)
    found = stored_algorithm(module, stored, packed)
    if found is None:
        # A tied head has no tensors of its own: it is the embedding, which is not quantized.
        return Served(None if tied_head else declared)
    if found == "NVFP4":
        if declared is None:
            return Served(found, found)
        agree = declared in NVFP4_ALGORITHMS
    elif found == "FP8":
        agree = declared is not None and "FP8" in declared
    else:
        return Served(None, found if declared is not None else None)
    if not agree:
        raise CheckpointError(
            f"{module} is stored in {found}, and the checkpoint's config says "
            f"{declared or 'unquantized'}",
            expected="tensors in the format that the config names",
            way_out="export the checkpoint again, or repair its quantization config",
        )
    return Served(declared)


def _declared(module: str, description: QuantDescription, packed: Packed) -> str | None:
    """What the config says of a module, in its dialect."""
    if any(name in module for name in _TOWERS):
        return None
    if description.dialect == COMPRESSED_TENSORS:
        return algorithm_of_target(module, description.layers, description.exclude_modules, packed)
    if is_excluded(module, description.exclude_modules, packed):
        return None
    if description.quant_algo == MIXED:
        return algorithm_of(module, description.layers, packed)
    return description.quant_algo
