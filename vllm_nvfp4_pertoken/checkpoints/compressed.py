"""Checkpoints in the format of compressed-tensors, as llm-compressor writes them.

NVFP4 is ``nvfp4-pack-quantized`` there: the same codes (``weight_packed``) and block scales
(``weight_scale``) as ModelOpt's, with the inverse of its second scale (``weight_global_scale``).
Config groups say which modules are quantized: their ``targets`` and an ``ignore`` list, each of
names, of regular expressions (``re:…``) and of classes (``Linear``). The package's own classes and
matching read both. It is imported only here, and late: it takes seconds and brings transformers,
and checkpoints of ModelOpt need none of it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm_nvfp4_pertoken.checkpoints.modules import ROOTS, parts_of, rootless
from vllm_nvfp4_pertoken.checkpoints.quant_config import (
    COMPRESSED_TENSORS,
    STATIC_ALTERNATIVE,
    QuantDescription,
)
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

__all__ = ["algorithm_of_target", "parse_compressed_tensors", "renamed"]

_FORMAT = "nvfp4-pack-quantized"
_REGEX = "re:"


def parse_compressed_tensors(config: Mapping[str, Any], *, source: str) -> QuantDescription:
    """Turn the ``quantization_config`` of a compressed-tensors checkpoint into a description.

    Args:
        config: the section of ``config.json``.
        source: where it came from, for error messages.

    Raises:
        CheckpointError: for a section that the package refuses, for any group that is not NVFP4,
            and for transforms of activations.
        UnsupportedError: if the package is not installed.
    """
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError as error:
        raise UnsupportedError(
            f"{source} is of a compressed-tensors checkpoint, and the package that reads it cannot "
            f"be imported: {error}",
            expected="the package compressed-tensors, which vLLM installs",
            way_out="pip install compressed-tensors",
        ) from error
    try:
        parsed = QuantizationConfig.model_validate(config)
    except (AttributeError, KeyError, TypeError, ValueError, NotImplementedError) as error:
        details = str(error)
        if isinstance(error, ValidationError):
            details = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
            )
        raise CheckpointError(
            f"{source} is not a section that compressed-tensors accepts: {details}",
            expected="a quantization config as llm-compressor writes it",
            way_out="export the checkpoint again, or repair the file",
        ) from None
    if config.get("transform_config"):
        raise CheckpointError(
            f"{source} has a transform_config: its activations must be rotated or scaled, which "
            "the per-token kernels do not do",
            expected="an NVFP4 checkpoint without transforms",
            way_out=STATIC_ALTERNATIVE,
        )
    if not parsed.config_groups:
        raise CheckpointError(
            f"{source} has no config_groups",
            expected=f"at least one group in the format {_FORMAT}",
            way_out="export the checkpoint again, or repair the file",
        )
    targets = [target for scheme in parsed.config_groups.values() for target in scheme.targets]
    for pattern in (*targets, *(parsed.ignore or ())):
        try:
            re.compile(pattern.removeprefix(_REGEX) if pattern.startswith(_REGEX) else "")
        except re.error as error:
            raise CheckpointError(
                f"{source} has {pattern!r} among its targets or ignored modules: {error}",
                expected="names, classes, and valid regular expressions",
                way_out="export the checkpoint again, or repair the file",
            ) from None
    layers: dict[str, str] = {}
    for name, scheme in parsed.config_groups.items():
        # Attention has no weights; such a group says again what kv_cache_scheme does.
        if len(scheme.targets) == 1 and scheme.targets[0].endswith("Attention"):
            continue
        algorithm = _algorithm(scheme, parsed.format, f"{source}: config_groups.{name}")
        layers.update(dict.fromkeys(scheme.targets, algorithm))
    scheme = config.get("kv_cache_scheme")
    if scheme is not None and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise CheckpointError(
            f"{source} has the KV cache scheme {scheme!r}",
            expected="FP8 or none",
            way_out="remove the scheme from the file and choose with --kv-cache-dtype",
        )
    return QuantDescription(
        quant_algo="NVFP4" if "NVFP4" in layers.values() else "W4A16_NVFP4",
        group_size=BLOCK_SIZE,
        kv_cache_quant_algo="FP8" if scheme is not None else None,
        exclude_modules=tuple(parsed.ignore or ()),
        layers=layers,
        dialect=COMPRESSED_TENSORS,
    )


def _algorithm(scheme: "QuantizationScheme", default_format: str, where: str) -> str:
    """``"NVFP4"``, or ``"W4A16_NVFP4"`` for a group whose activations stay in 16 bits."""
    form = scheme.format or default_format
    if form != _FORMAT:
        raise CheckpointError(
            f"{where} is in the format {getattr(form, 'value', form)!r}, for "
            + ", ".join(scheme.targets[:5])
            + (", …" if len(scheme.targets) > 5 else ""),
            expected=f"every group in the format {_FORMAT!r}",
            way_out=STATIC_ALTERNATIVE,
        )
    parts = {
        "weights": scheme.weights,
        "input_activations": scheme.input_activations,
        "output_activations": scheme.output_activations,
    }
    for part, numbers in parts.items():
        good = part != "weights" if numbers is None else _is_nvfp4(numbers)
        if not good or (part == "output_activations" and numbers is not None):
            shown = numbers and numbers.model_dump(exclude_defaults=True)
            raise CheckpointError(
                f"{where}.{part} is {shown}",
                expected=f"NVFP4 weights and inputs (4-bit float, tensor_group, {BLOCK_SIZE} "
                "values per block scale), or weights alone",
                way_out=STATIC_ALTERNATIVE,
            )
    return "W4A16_NVFP4" if scheme.input_activations is None else "NVFP4"


def _is_nvfp4(numbers: "QuantizationArgs") -> bool:
    return (
        numbers.num_bits == 4
        and numbers.type == "float"
        and numbers.strategy == "tensor_group"
        and numbers.group_size == BLOCK_SIZE
        and bool(numbers.symmetric)
    )


def algorithm_of_target(
    module: str,
    layers: Mapping[str, str],
    ignore: Iterable[str],
    packed: Mapping[str, Iterable[str]],
) -> str | None:
    """The algorithm that targets and an ignore list give a module; None where they give none.

    Args:
        module: the engine's name of a linear layer, or ``….experts`` for routed experts.
        layers: target to algorithm.
        ignore: names, ``re:`` patterns and classes.
        packed: fused modules and their parts, ``{"qkv_proj": ["q_proj", …]}``.

    Raises:
        CheckpointError: if parts of a module that is served as one have different answers.
    """
    from compressed_tensors.utils.match import match_targets
    from torch.nn import Linear

    linear = Linear(1, 1, device="meta")  # what every module of ours is in the checkpoint's words
    ignore = list(ignore)

    def answer(name: str) -> str | None:
        # Patterns are written for the exporter's names, which may have the model elsewhere.
        names = dict.fromkeys((name, *(f"{root}{rootless(name)}" for root in ROOTS)))
        if any(match_targets(spelled, linear, ignore) for spelled in names):
            return None
        for spelled in names:
            if targets := match_targets(spelled, linear, layers):
                return layers[targets[0]]
        return None

    if module.endswith(".experts"):
        ignored = any(match_targets(module, linear, [entry]) for entry in ignore)
        return None if ignored else answer(f"{module}.0.down_proj")
    found = {name: answer(name) for name in parts_of(module, packed) or [module]}
    if len(set(map(bool, found.values()))) > 1:
        raise CheckpointError(
            f"{module}: " + ", ".join(f"{name} is {algo}" for name, algo in found.items()),
            expected="the same format for projections that are served as one layer",
            way_out="quantize, or ignore, all of them",
        )
    return next(iter(found.values()))


def renamed(names: Iterable[str], rename: Callable[[str], str | None]) -> dict[str, str]:
    """Names in the engine's words; patterns and classes, which no mapping is made for, stay."""
    pairs = (
        (name, name if name.startswith(_REGEX) or "." not in name else rename(name))
        for name in names
    )
    return {old: new for old, new in pairs if new is not None}
