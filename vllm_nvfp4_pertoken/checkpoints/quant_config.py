"""Read the quantization section of a checkpoint: which algorithm, on which modules.

ModelOpt writes it twice, and not always both: as ``quantization_config`` in ``config.json``
(since 0.31) and, wrapped in ``{"quantization": …}``, in ``hf_quant_config.json`` (always). Where
they disagree, ``config.json`` wins, as in vLLM.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vllm_nvfp4_pertoken.checkpoints.modules import NVFP4_ALGORITHMS
from vllm_nvfp4_pertoken.errors import CheckpointError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = [
    "COMPRESSED_TENSORS",
    "MIXED",
    "MODELOPT",
    "STATIC_ALTERNATIVE",
    "UNQUANTIZED",
    "QuantDescription",
    "complete_description",
    "describes_modelopt",
    "parse_quant_config",
    "reconcile",
]

STATIC_ALTERNATIVE = (
    "serve it without --quantization nvfp4_per_token (vLLM then uses what the checkpoint names), "
    "or export it again as NVFP4"
)


# What ModelOpt 0.46 and 0.47 append to every module name of a Nemotron-H model.
_SENTINEL = re.compile(r"\.?\x00.*$", re.DOTALL)
MIXED = "MIXED_PRECISION"
MODELOPT = "modelopt"
COMPRESSED_TENSORS = "compressed-tensors"
UNQUANTIZED = "unquantized"


@dataclass(frozen=True)
class QuantDescription:
    """What a quantization section says.

    Attributes:
        quant_algo: ``"NVFP4"``, ``"W4A16_NVFP4"`` (weights only: activations were meant to stay in
            16 bits) or ``"MIXED_PRECISION"``.
        group_size: values per block scale; always 16.
        kv_cache_quant_algo: ``"FP8"``, ``"NVFP4"`` or None.
        exclude_modules: module names and wildcards that stay unquantized.
        layers: of a mixed checkpoint, module to algorithm; empty where ``config.json`` leaves the
            map to ``hf_quant_config.json``. Of compressed-tensors, target to algorithm.
        dialect: ``"modelopt"`` or ``"compressed-tensors"``: how names of modules are written, and
            which tensors a weight consists of. ``"unquantized"``: BF16 or FP16, to be quantized.
    """

    quant_algo: str
    group_size: int
    kv_cache_quant_algo: str | None
    exclude_modules: tuple[str, ...]
    layers: Mapping[str, str] = field(default_factory=dict)
    dialect: str = MODELOPT


def describes_modelopt(config: Mapping[str, Any]) -> bool:
    """Whether a quantization section was written by ModelOpt.

    ``quant_method`` is the plain answer where it is there; exports from 0.31 to 0.34 lack it, and
    the legacy file never had it, so ``producer`` and the shape of the section count as well.
    """
    method = str(config.get("quant_method") or "").lower()
    if method:
        return method.startswith("modelopt")
    producer = config.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        return True
    section = config.get("quantization", config)
    return isinstance(section, Mapping) and "quant_algo" in section


def parse_quant_config(config: Mapping[str, Any], *, source: str) -> QuantDescription:
    """Turn a quantization section into a :class:`QuantDescription`.

    Args:
        config: the ``quantization_config`` of ``config.json``, or the whole
            ``hf_quant_config.json``; the whole ``config.json`` where there is neither.
        source: where it came from, for error messages.

    Raises:
        CheckpointError: for another quantization method or algorithm, another group size, or a
            section of the wrong shape.
    """
    if "quant_method" not in config and "model_type" in config:
        return QuantDescription("NVFP4", BLOCK_SIZE, None, (), dialect=UNQUANTIZED)
    if config.get("quant_method") == COMPRESSED_TENSORS:
        # Here, because most checkpoints need neither it nor the package that it stands on.
        from vllm_nvfp4_pertoken.checkpoints.compressed import parse_compressed_tensors

        return parse_compressed_tensors(config, source=source)
    if not describes_modelopt(config):
        method = config.get("quant_method")
        raise CheckpointError(
            f"{source} has quant_method {method!r}",
            expected='an NVFP4 checkpoint of ModelOpt (quant_method "modelopt") or llm-compressor '
            '("compressed-tensors")',
            way_out=STATIC_ALTERNATIVE,
        )
    section = config.get("quantization", config)
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"{source}: 'quantization' is {type(section).__name__}",
            expected="an object with the key 'quant_algo'",
            way_out="export the checkpoint again, or repair the file",
        )
    algo = _algorithm(section, source)
    group_size = _group_size(section, source)
    if algo == "NVFP4" and _is_weight_only(section):
        algo = "W4A16_NVFP4"
    exclude = section.get("exclude_modules", section.get("ignore")) or []
    if not isinstance(exclude, list) or not all(isinstance(name, str) for name in exclude):
        raise CheckpointError(
            f"{source}: the list of excluded modules is {exclude!r}",
            expected="a list of module names and wildcards under 'ignore' or 'exclude_modules'",
            way_out="export the checkpoint again, or repair the file",
        )
    return QuantDescription(
        quant_algo=algo,
        group_size=group_size,
        kv_cache_quant_algo=_kv_cache_algorithm(section, source),
        exclude_modules=tuple(_SENTINEL.sub("", name) for name in exclude),
        layers=_quantized_layers(section, source) if algo == MIXED else {},
    )


def reconcile(
    config: QuantDescription, legacy: QuantDescription
) -> tuple[QuantDescription, list[str]]:
    """One description from both files: ``config.json`` wins, the other completes it.

    Returns:
        The description, and a sentence for every field in which the files disagree.
    """
    if config.quant_algo == legacy.quant_algo == MIXED and not config.layers:
        config = replace(config, layers=legacy.layers)
    disagreements = []
    for item in fields(QuantDescription):
        ours, theirs = getattr(config, item.name), getattr(legacy, item.name)
        if item.name == "exclude_modules":
            for file, other, names in (
                ("hf_quant_config.json", "config.json", set(ours).difference(theirs)),
                ("config.json", "hf_quant_config.json", set(theirs).difference(ours)),
            ):
                if names:
                    shown = ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")
                    disagreements.append(
                        f"{file} does not exclude {shown}, which {other} does; config.json wins"
                    )
        elif ours != theirs:
            disagreements.append(
                f"config.json has {item.name} {_shown(ours)}, hf_quant_config.json "
                f"{_shown(theirs)}; config.json wins"
            )
    return config, disagreements


def complete_description(
    description: QuantDescription, legacy: Mapping[str, Any] | None, model: str
) -> tuple[QuantDescription, list[str]]:
    """What ``config.json`` says, completed by ``hf_quant_config.json`` where there is one.

    Returns:
        The description, and a sentence for every field in which the files disagree.

    Raises:
        CheckpointError: for a mixed checkpoint whose layers neither file names.
    """
    disagreements: list[str] = []
    if legacy is not None:
        source = f"hf_quant_config.json of {model}"
        try:
            description, disagreements = reconcile(
                description, parse_quant_config(legacy, source=source)
            )
        except CheckpointError as error:
            disagreements = [f"{error} config.json wins"]
    if description.quant_algo == MIXED and not description.layers:
        raise CheckpointError(
            f"{model} is a mixed checkpoint ({MIXED}) without a map of its layers",
            expected="'quantized_layers' in config.json or hf_quant_config.json",
            way_out="copy hf_quant_config.json beside config.json, or export it again",
        )
    return description, disagreements


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}…"


def _is_weight_only(section: Mapping[str, Any]) -> bool:
    """Whether every config group leaves activations alone, whatever the algorithm is called."""
    groups = section.get("config_groups")
    return (
        isinstance(groups, Mapping)
        and bool(groups)
        and all(
            isinstance(group, Mapping) and group.get("input_activations") is None
            for group in groups.values()
        )
    )


def _quantized_layers(section: Mapping[str, Any], source: str) -> dict[str, str]:
    """Module to algorithm, from a map that some exports nest in one of its own name."""
    layers = section.get("quantized_layers", {})
    while isinstance(layers, Mapping) and set(layers) == {"quantized_layers"}:
        layers = layers["quantized_layers"]
    algorithms: dict[str, str] = {}
    if not isinstance(layers, Mapping):
        layers = {"quantized_layers": layers}
    for name, layer in layers.items():
        algo = layer.get("quant_algo") if isinstance(layer, Mapping) else None
        if not isinstance(algo, str):
            raise CheckpointError(
                f"{source}: quantized_layers has {name!r}: {_shown(layer)}",
                expected='an object with "quant_algo" for every module',
                way_out="export the checkpoint again, or repair the file",
            )
        algorithms[_SENTINEL.sub("", name)] = algo = algo.upper()
        if "NVFP4" in algo:
            _algorithm({"quant_algo": algo}, f"{source}: {name}")
            _group_size(layer, f"{source}: {name}")
    return algorithms


def _algorithm(section: Mapping[str, Any], source: str) -> str:
    raw = section.get("quant_algo")
    algo = str(raw).upper() if raw else ""
    if algo in (*NVFP4_ALGORITHMS, MIXED):
        return algo
    why = {
        "NVFP4_AWQ": " (its inputs must be multiplied by a pre_quant_scale, which the per-token "
        "kernels do not do)",
        "NVFP4_SVD": " (its layers carry SVDQuant low-rank branches, which the per-token kernels "
        "do not compute)",
        "W4A8_NVFP4_FP8": " (its second scales are made for FP8 activations)",
    }.get(algo, "")
    raise CheckpointError(
        f"{source} has quant_algo {raw!r}{why}",
        expected="quant_algo 'NVFP4', 'W4A16_NVFP4' or 'MIXED_PRECISION'",
        way_out=STATIC_ALTERNATIVE,
    )


def _group_size(section: Mapping[str, Any], source: str) -> int:
    """The group size, which may stand at the top, or only inside ``config_groups``."""
    sizes: dict[str, Any] = {}
    if section.get("group_size") is not None:
        sizes["group_size"] = section["group_size"]
    groups = section.get("config_groups")
    if isinstance(groups, Mapping):
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and weights.get("num_bits", 4) != 4:
                continue  # FP8 layers of a mixed checkpoint
            if isinstance(weights, Mapping) and weights.get("group_size") is not None:
                sizes[f"config_groups.{name}.weights.group_size"] = weights["group_size"]
    for where, size in sizes.items():
        if str(size) != str(BLOCK_SIZE):
            raise CheckpointError(
                f"{source} has {where} = {size!r}",
                expected=f"{BLOCK_SIZE} values per block scale, which defines NVFP4",
                way_out=STATIC_ALTERNATIVE,
            )
    return BLOCK_SIZE


def _kv_cache_algorithm(section: Mapping[str, Any], source: str) -> str | None:
    """``kv_cache_quant_algo`` (legacy), or ``kv_cache_scheme`` as a string or a description."""
    value = section.get("kv_cache_quant_algo")
    if value is None:
        value = section.get("kv_cache_scheme")
    if isinstance(value, Mapping) and value.get("type") == "float":
        bits = value.get("num_bits")
        value = "FP8" if bits == 8 else "NVFP4" if bits == 4 else value
    if value is None:
        return None
    algo = value.upper() if isinstance(value, str) else value
    if algo in ("FP8", "NVFP4"):
        return str(algo)
    raise CheckpointError(
        f"{source} has the KV cache scheme {value!r}",
        expected="FP8, NVFP4 or none",
        way_out="remove the scheme from the file and choose with --kv-cache-dtype",
    )
