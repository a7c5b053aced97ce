"""Which matrices are quantized, and which of them share a ``weight_scale_2``; from headers.

Conversion plans with this, and the engine, which quantizes the same while loading.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvfp4_pertoken.checkpoints.convert.read import Matrix
from vllm_nvfp4_pertoken.checkpoints.convert.source import FLOATS, FUSED, STAY_FUSED, Weights
from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader
from vllm_nvfp4_pertoken.checkpoints.layout import EXPERT_TENSOR, layout_of
from vllm_nvfp4_pertoken.checkpoints.modules import is_excluded
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = [
    "Member",
    "Options",
    "check_excludes",
    "group_members",
    "modules_to_quantize",
    "nothing_to_quantize",
    "scale_group",
]

_SHARED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"})


@dataclass(frozen=True)
class Options:
    """What to quantize, and how to write it.

    Attributes:
        all_linears: dense linears too, not only routed experts.
        exclude: modules that stay as they are: names, containers or wildcards, as in the exclude
            lists of checkpoints.
        format: ``"modelopt"`` or ``"compressed-tensors"``.
    """

    all_linears: bool = False
    exclude: tuple[str, ...] = ()
    format: str = "modelopt"


@dataclass(frozen=True)
class Member:
    """A module to quantize: one matrix, or all experts' where they stay fused."""

    module: str
    matrices: tuple[Matrix, ...]
    fused: bool = False


def modules_to_quantize(
    src: str, headers: Mapping[str, TensorHeader], config: Mapping[str, Any], options: Options
) -> list[str]:
    """The modules that a conversion would quantize, for quantizing them while they load.

    Args:
        src: what the checkpoint is called in errors.
        headers: of its tensors.
        config: its ``config.json``.
        options: as for the conversion.

    Raises:
        CheckpointError, UnsupportedError: as :func:`make_plan`; also for families whose experts
            stay fused.
    """
    for header in headers.values():
        if ".experts." in header.name and header.dtype not in FLOATS:
            raise CheckpointError(
                f"{header.name} in {header.file} is {header.dtype}, and {src} has no quantization "
                "config",
                expected="experts in BF16, F16 or F32, or a config that says how they are stored",
                way_out="copy config.json and hf_quant_config.json of the export again",
            )
    weights = Weights(headers, config, None)
    if weights.stay_fused:
        raise UnsupportedError(
            f"{src} has fused experts of a family ({', '.join(STAY_FUSED)}) whose loader cannot "
            "quantize them one by one",
            expected="a model with single experts, such as Qwen3-MoE",
            way_out="serve it without --quantization nvfp4_per_token",
        )
    groups = group_members(weights, options)
    check_excludes(weights, options)
    if not any(".experts." in member.module for group in groups.values() for member in group):
        raise nothing_to_quantize(src, headers, options)
    return [member.module for members in groups.values() for member in members]


def group_members(weights: Weights, options: Options) -> dict[str, list[Member]]:
    """Members by the ``weight_scale_2`` that they share."""
    groups: dict[str, list[Member]] = defaultdict(list)
    for module, header in weights.experts.items():
        if not is_excluded(module, options.exclude, {}):
            match = EXPERT_TENSOR.match(f"{module}.weight")
            assert match is not None
            down = match["projection"] == layout_of(match["projection"]).down
            key = module if down else f"{match['container']}.{match['expert']} gate and up"
            groups[key].append(Member(module, (weights.matrix(module, header),)))
    for module, header in weights.fused.items():
        if not is_excluded(module, options.exclude, {}):
            for key, member in _fused_members(module, header, weights, options):
                groups[key].append(member)
    if options.all_linears:
        for module, header in weights.dense.items():
            if not is_excluded(module, options.exclude, {}):
                member = Member(module, (weights.matrix(module, header),))
                groups[scale_group(module)].append(member)
    return dict(groups)


def scale_group(module: str) -> str:
    """What linears have in common that share a ``weight_scale_2``; else the module's own name."""
    parent, _, last = module.rpartition(".")
    shared = next((names for names in _SHARED if last in names), None)
    return f"{parent} {sorted(shared)[0]}" if shared else module


def _fused_members(
    module: str, header: TensorHeader, weights: Weights, options: Options
) -> Iterator[tuple[str, Member]]:
    """What becomes of one fused tensor; which way it lies, both tensors' shapes tell together."""
    match = FUSED.match(module)
    assert match is not None
    container = match["container"]
    pair = [weights.fused.get(f"{container}.{kind}") for kind in ("gate_up_proj", "down_proj")]
    both, down = pair
    if both is None or down is None:
        raise CheckpointError(
            f"{module} in {header.file} is alone: {container} lacks "
            f"{'gate_up_proj' if both is None else 'down_proj'}",
            expected="gate_up_proj and down_proj of all experts",
            way_out="finish the download or copy the checkpoint again",
        )
    _, a, b = both.shape
    _, c, d = down.shape
    transposed = a == d and b == 2 * c
    straight = b == c and a == 2 * d
    count, rows, columns = header.shape
    if transposed:
        rows, columns = columns, rows
    good = (transposed or straight) and count == pair[0].shape[0] == pair[1].shape[0]  # type: ignore[union-attr]
    if not good or header.dtype not in FLOATS or columns % BLOCK_SIZE:
        raise UnsupportedError(
            f"{module} in {header.file} is {header.dtype} {list(header.shape)}, beside "
            f"gate_up_proj {list(both.shape)} and down_proj {list(down.shape)}",
            expected="BF16, F16 or F32, [E, 2I, H] and [E, H, I], or [E, H, 2I] and [E, I, H], "
            f"with H and I multiples of {BLOCK_SIZE}",
            way_out="NVFP4 cannot hold these experts; serve the model unquantized",
        )

    def matrix(expert: int, first: int, size: int) -> Matrix:
        return Matrix(header, size, columns, expert, first, transposed, block=(1, 1))

    if weights.stay_fused and options.format == "modelopt":
        if not transposed:
            raise UnsupportedError(
                f"{module} in {header.file} is {list(header.shape)}, [E, outputs, inputs]",
                expected="[E, inputs, outputs], as the family's models have it",
                way_out="save the model again with transformers",
            )
        yield module, Member(module, tuple(matrix(e, 0, rows) for e in range(count)), fused=True)
        return
    if weights.stay_fused and any(f"{name}_bias" in weights.headers for name in weights.fused):
        raise UnsupportedError(
            f"{container} in {header.file} has biases and interleaved gate and up (GPT-OSS)",
            expected="experts without biases for --format compressed-tensors",
            way_out="convert it with --format modelopt",
        )
    for expert in range(count):
        stem = f"{container}.{expert}"
        if match["kind"] == "down_proj":
            name = f"{stem}.down_proj"
            yield name, Member(name, (matrix(expert, 0, rows),))
        else:
            for part, name in enumerate(("gate_proj", "up_proj")):
                member = Member(f"{stem}.{name}", (matrix(expert, part * rows // 2, rows // 2),))
                yield f"{stem} gate and up", member


def check_excludes(weights: Weights, options: Options) -> None:
    """Every pattern matches something, and leaves whole what is served as one layer."""
    modules = [*weights.experts, *weights.fused]
    modules += weights.dense if options.all_linears else ()
    for pattern in options.exclude:
        if not any(is_excluded(module, [pattern], {}) for module in modules):
            shown = ", ".join([*modules[:1], *modules[-1:]])
            raise UnsupportedError(
                f"the exclude pattern {pattern!r} matches no module that would be quantized",
                expected=f"a name, a container or a wildcard for modules such as {shown}",
                way_out="correct the pattern, or leave it out",
            )
    served: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        match = EXPERT_TENSOR.match(f"{module}.weight") or FUSED.match(module)
        served[match["container"] if match else scale_group(module)].append(module)
    for name, parts in served.items():
        excluded = [part for part in parts if is_excluded(part, options.exclude, {})]
        if excluded and len(excluded) < len(parts):
            kept = next(part for part in parts if part not in excluded)
            raise UnsupportedError(
                f"the exclude patterns leave out {excluded[0]}, but not {kept}",
                expected="the same format for all that is served as one layer "
                f"({name.partition(' ')[0]})",
                way_out="exclude all of them, or none",
            )


def nothing_to_quantize(
    src: Path | str, headers: Mapping[str, TensorHeader], options: Options
) -> UnsupportedError:
    if options.exclude:
        found = f"the exclude patterns leave nothing to quantize in {src}"
        return UnsupportedError(found, way_out="exclude less")
    odd = sorted(name for name in headers if ".experts." in name)
    found = f"; it has {odd[0]!r}, which is under none of these names" if odd else ""
    return UnsupportedError(
        f"{src} has no tensors of single experts{found}",
        expected="names such as model.layers.0.mlp.experts.0.gate_proj.weight (Qwen3-MoE, "
        "DeepSeek-V3), model.layers.0.block_sparse_moe.experts.0.w1.weight (Mixtral) or "
        "model.layers.0.mlp.experts.gate_up_proj (fused)",
        way_out="quantize the linears of a dense model with --all, or export with ModelOpt",
    )
