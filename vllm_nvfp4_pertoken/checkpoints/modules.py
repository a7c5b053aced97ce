"""Which module of a model is stored how: from the names in a config, and from the tensors.

Checkpoints name modules in several dialects. All of these mean the attention of layer 0:
``model.layers.0.self_attn.q_proj`` (exact), ``model.layers.0.self_attn*`` (wildcard),
``model.layers.0.self_attn`` (a container), ``model.layers.0.self_attn.qkv_proj`` (the engine's
fused name), ``model.language_model.layers.0.self_attn`` (multimodal). Names match at dots only:
``mlp.gate``, a router, is not part of ``mlp.gate_up_proj``.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from vllm_nvfp4_pertoken.errors import CheckpointError

__all__ = [
    "NVFP4_ALGORITHMS",
    "ROOTS",
    "Packed",
    "algorithm_of",
    "format_of",
    "is_excluded",
    "parts_of",
    "rootless",
    "stored_algorithm",
    "stored_formats",
]

# Weights in NVFP4: these are what runs per-token.
NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")

# Where the language model sits inside a larger one; exporters and engines disagree about it.
_ROOT = re.compile(r"^(?:model\.|language_model\.)+")
ROOTS = ("", "model.", "model.language_model.", "language_model.model.")
_WILDCARDS = frozenset("*?[")
# A routed expert's own modules, as in `experts.3.down_proj`.
_EXPERT_CHILD = re.compile(r"^\d+\.")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
# safetensors' names of dtypes that need no scales.
_FLOATS = {"BF16": "BF16", "F16": "FP16", "F32": "FP32"}

Packed = Mapping[str, Iterable[str]]


def rootless(name: str) -> str:
    """A module's name without the place of the language model in a larger one."""
    return _ROOT.sub("", name)


def parts_of(module: str, packed: Packed) -> list[str]:
    """What a fused module consists of in a checkpoint; empty for others."""
    head, _, last = module.rpartition(".")
    prefix = f"{head}." if head else ""
    return [f"{prefix}{part}" for part in packed.get(last, ()) if part != last]


def _names(module: str, pattern: str) -> bool:
    """Whether one entry of an exclude list means this module or a container around it."""
    if _WILDCARDS.intersection(pattern):
        return fnmatchcase(module, pattern) or fnmatchcase(rootless(module), rootless(pattern))
    if _ROOT.match(pattern):
        return f"{rootless(module)}.".startswith(f"{rootless(pattern)}.")
    # Old exports name modules without their path, such as `lm_head` and `vision_model`.
    return f".{pattern}." in f".{module}."


def is_excluded(module: str, patterns: Iterable[str], packed: Packed) -> bool:
    """Whether a module is to stay unquantized.

    Args:
        module: the engine's name; ``….experts`` for routed experts.
        patterns: the checkpoint's exclude list, in any dialect.
        packed: fused modules and their parts, ``{"qkv_proj": ["q_proj", …]}``.

    Raises:
        CheckpointError: if only some parts of a fused module are excluded.
    """
    patterns = list(patterns)
    if any(_names(module, pattern) for pattern in patterns):
        return True
    if module.endswith(".experts"):
        # `….experts.3.down_proj` and `….experts.*.down_proj` name what is inside.
        inside = f"{rootless(module)}."
        return any(
            (rootless(pattern).startswith(inside))
            or (_WILDCARDS.intersection(pattern) and _names(f"{module}.0.down_proj", pattern))
            for pattern in patterns
        )
    parts = parts_of(module, packed)
    excluded = [part for part in parts if any(_names(part, pattern) for pattern in patterns)]
    if excluded and len(excluded) < len(parts):
        raise CheckpointError(
            f"{module}: {', '.join(excluded)} is excluded from quantization, but not "
            + ", ".join(part for part in parts if part not in excluded),
            expected="the same format for projections that are served as one layer",
            way_out="quantize, or exclude, all of them",
        )
    return bool(excluded)


def algorithm_of(module: str, layers: Mapping[str, str], packed: Packed) -> str | None:
    """The algorithm that a ``quantized_layers`` map gives a module; None where it has none.

    Args:
        module: the engine's name; ``….experts`` for routed experts.
        layers: module to algorithm.
        packed: as for :func:`is_excluded`.

    Raises:
        CheckpointError: if parts of a module that is served as one have different algorithms.
    """
    name = rootless(module)
    own = {rootless(key): value for key, value in layers.items()}
    if name in own:
        return own[name]
    found = {key: value for key, value in own.items() if key.startswith(f"{name}.")}
    if not found:
        parts = [rootless(part) for part in parts_of(module, packed)]
        if any(part in own for part in parts):
            found = {part: own.get(part, "none") for part in parts}
    if not found and name.endswith(".experts"):
        parent = name.removesuffix("experts")
        found = {parent + p: own[parent + p] for p in _PROJECTIONS if parent + p in own}
    if not found:
        containers = [key for key in own if name.startswith(f"{key}.")]
        return own[max(containers, key=len)] if containers else None
    if len(set(found.values())) > 1:
        shown = {value: key for key, value in reversed(found.items())}  # one of each
        raise CheckpointError(
            f"{module}: " + ", ".join(f"{key} is {value}" for value, key in shown.items()),
            expected="the same algorithm for everything that is served as one layer",
            way_out="export the checkpoint again with one algorithm for these modules",
        )
    return next(iter(found.values()))


def stored_formats(tensors: Iterable[tuple[str, str, int]]) -> dict[str, str]:
    """How each module's weight is stored, whatever a config says.

    Args:
        tensors: name, dtype in safetensors' spelling, and number of dimensions of every tensor.

    Returns:
        Module to ``"NVFP4"``, ``"FP8"``, ``"BF16"``, ``"FP16"`` or ``"FP32"``. Of routed experts
        only the container, ``….experts``, if all are stored alike. Modules with weights in any
        other format, and weights that are no matrices, are left out.
    """
    dtypes: dict[str, dict[str, tuple[str, int]]] = defaultdict(dict)
    for name, dtype, dimensions in tensors:
        module, _, kind = name.rpartition(".")
        dtypes[module][kind] = (dtype, dimensions)
    modules: dict[str, str] = {}
    experts: dict[str, set[str]] = defaultdict(set)
    for module, kinds in dtypes.items():
        form = format_of(kinds)
        if form is None:
            continue
        container, expert, rest = module.rpartition(".experts.")
        if expert and _EXPERT_CHILD.match(rest):
            experts[f"{container}.experts"].add(form)
        else:
            modules[module] = form
    modules.update({name: forms.pop() for name, forms in experts.items() if len(forms) == 1})
    return modules


def format_of(kinds: Mapping[str, tuple[str, int]]) -> str | None:
    """The format of one module's weight, as in :func:`stored_formats`.

    Args:
        kinds: dtype and number of dimensions of its tensors, by their kind.
    """
    for weight in ("weight", "weight_packed", "gate_up_proj", "up_proj"):
        if weight in kinds:
            dtype, dimensions = kinds[weight]
            break
    else:
        return None
    if dimensions < 2:
        return None
    if dtype == "U8":
        scale = "weight_scale" if weight.startswith("weight") else f"{weight}_weight_scale"
        return "NVFP4" if kinds.get(scale, ("",))[0] == "F8_E4M3" else None
    return "FP8" if dtype == "F8_E4M3" else _FLOATS.get(dtype)


def stored_algorithm(module: str, stored: Mapping[str, str], packed: Packed) -> str | None:
    """How a module of the engine is stored; None where its tensors are not known by this name.

    Raises:
        CheckpointError: if parts of a module that is served as one are stored differently.
    """
    if module in stored:
        return stored[module]
    found = {part: stored[part] for part in parts_of(module, packed) if part in stored}
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"{module}: "
            + ", ".join(f"{part} is stored in {form}" for part, form in found.items()),
            expected="the same format for projections that are served as one layer",
            way_out="export the checkpoint again with one format for these modules",
        )
    return next(iter(found.values()), None)
