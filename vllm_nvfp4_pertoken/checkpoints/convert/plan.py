"""What a conversion will do, decided from configuration and headers before a byte is written.

Everything that can be wrong with a source and that headers tell is found here. The plan names every
tensor of the result with its dtype and shape, so its size is known too.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_nvfp4_pertoken.checkpoints.convert.read import CHUNK_BYTES, Matrix
from vllm_nvfp4_pertoken.checkpoints.convert.source import (
    FLOATS,
    FUSED,
    SOURCE,
    Weights,
    fp8_block,
    fp8_scale,
    read_config,
)
from vllm_nvfp4_pertoken.checkpoints.layout import EXPERT_TENSOR, layout_of
from vllm_nvfp4_pertoken.checkpoints.modules import is_excluded
from vllm_nvfp4_pertoken.checkpoints.verify import TensorHeader, read_headers, tensor_bytes
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = ["FORMATS", "Member", "Options", "Output", "Plan", "Task", "make_plan"]

FORMATS = ("modelopt", "compressed-tensors")
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
class Output:
    """A tensor of the result; dtype in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Member:
    """A module to quantize: one matrix, or all experts' where they stay fused."""

    module: str
    matrices: tuple[Matrix, ...]
    fused: bool = False


@dataclass(frozen=True)
class Task:
    """A piece of work on one file of the result.

    Attributes:
        kind: ``copy`` bytes as they are, ``decode`` FP8 to BF16, or ``quantize``.
        file: name of the file, the same in source and result.
        outputs: what it writes.
        members: what it quantizes or, one, decodes.
        group: all matrices that share the ``weight_scale_2``, members among them.
        source: what it copies.
    """

    kind: Literal["copy", "decode", "quantize"]
    file: str
    outputs: tuple[Output, ...]
    members: tuple[Member, ...] = ()
    group: tuple[Matrix, ...] = ()
    source: TensorHeader | None = None

    @property
    def source_bytes(self) -> int:
        if self.source is not None:
            return self.source.nbytes
        return sum(matrix.nbytes for member in self.members for matrix in member.matrices)

    @property
    def memory(self) -> int:
        """About how many bytes of memory it takes: a chunk or, transposed, a matrix, thrice."""
        matrices = [matrix for member in self.members for matrix in member.matrices]
        whole = max((m.nbytes for m in matrices if m.transposed), default=0)
        return 3 * max(whole, min(CHUNK_BYTES, self.source_bytes))


@dataclass(frozen=True)
class Plan:
    """The whole conversion. ``ignored`` are the modules that stay unquantized."""

    src: Path
    options: Options
    config: dict[str, Any]
    tasks: tuple[Task, ...]
    ignored: tuple[str, ...]
    quantized: int = field(default=0)

    @property
    def files(self) -> dict[str, list[Task]]:
        files: dict[str, list[Task]] = defaultdict(list)
        for task in self.tasks:
            files[task.file].append(task)
        return dict(sorted(files.items()))

    @property
    def source_bytes(self) -> int:
        return sum(task.source_bytes for task in self.tasks)


def make_plan(src: Path, options: Options) -> Plan:
    """Plan the conversion of the checkpoint in the directory ``src``.

    Raises:
        CheckpointError: files are broken, or tensors missing.
        UnsupportedError: the source is quantized, has nothing to quantize, or a matrix that NVFP4
            cannot hold; an exclude pattern matches nothing, or a part of what is served as one.
    """
    if not src.is_dir():
        raise CheckpointError(
            f"{src} is not a directory",
            expected="a Hugging Face checkpoint directory",
            way_out="download the model first, and give the directory",
        )
    headers = read_headers(src)
    config = read_config(src)
    block = fp8_block(src, config)
    weights = Weights(headers, config, block)
    groups = _group(weights, options)
    _check_excludes(weights, options)
    if not groups:
        raise _nothing_to_quantize(src, headers, options)
    tasks = list(_quantize_tasks(groups, options))
    used = {
        matrix.source.name for members in groups.values() for m in members for matrix in m.matrices
    }
    tasks += _other_tasks(headers, used, block)
    order = {name: i for i, name in enumerate(headers)}
    tasks.sort(key=lambda task: order[_first_source(task)])
    quantized = {member.module for members in groups.values() for member in members}
    clean = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(clean.get("text_config"), dict):
        text = clean["text_config"]
        clean["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    return Plan(
        src=src,
        options=options,
        config=clean,
        tasks=tuple(tasks),
        ignored=_ignored(headers, used, quantized),
        quantized=len(quantized),
    )


def _first_source(task: Task) -> str:
    return task.source.name if task.source else task.members[0].matrices[0].source.name


def _group(weights: Weights, options: Options) -> dict[str, list[Member]]:
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
                parent, _, last = module.rpartition(".")
                shared = next((names for names in _SHARED if last in names), None)
                key = f"{parent} {sorted(shared)[0]}" if shared else module
                groups[key].append(Member(module, (weights.matrix(module, header),)))
    return dict(groups)


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


def _check_excludes(weights: Weights, options: Options) -> None:
    """Every pattern matches something, and leaves whole what is served as one layer."""
    modules = [*weights.experts, *weights.fused]
    modules += weights.dense if options.all_linears else ()
    for pattern in options.exclude:
        if not any(is_excluded(module, [pattern], {}) for module in modules):
            shown = ", ".join([*modules[:1], *modules[-1:]])
            raise UnsupportedError(
                f"--exclude {pattern!r} matches no module that would be quantized",
                expected=f"a name, a container or a wildcard for modules such as {shown}",
                way_out="correct the pattern, or leave it out",
            )
    served: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        match = EXPERT_TENSOR.match(f"{module}.weight") or FUSED.match(module)
        parent, _, last = module.rpartition(".")
        shared = next((sorted(names)[0] for names in _SHARED if last in names), None)
        if match:
            served[match["container"]].append(module)
        elif shared:
            served[f"{parent} {shared}"].append(module)
    for name, parts in served.items():
        excluded = [part for part in parts if is_excluded(part, options.exclude, {})]
        if excluded and len(excluded) < len(parts):
            kept = next(part for part in parts if part not in excluded)
            raise UnsupportedError(
                f"--exclude leaves out {excluded[0]}, but not {kept}",
                expected="the same format for all that is served as one layer "
                f"({name.partition(' ')[0]})",
                way_out="exclude all of them, or none",
            )


def quantized_outputs(member: Member, format: str) -> tuple[Output, ...]:
    """The tensors of one quantized module."""
    rows, columns = member.matrices[0].rows, member.matrices[0].columns
    name = member.module
    if member.fused:
        count = len(member.matrices)
        return (
            Output(name, "U8", (count, columns // 2, rows)),
            Output(f"{name}_weight_scale", "F8_E4M3", (count, columns // BLOCK_SIZE, rows)),
            Output(f"{name}_weight_scale_2", "F32", ()),
        )
    weight, scale_2, shape = (
        ("weight", "weight_scale_2", ())
        if format == "modelopt"
        else ("weight_packed", "weight_global_scale", (1,))
    )
    return (
        Output(f"{name}.{weight}", "U8", (rows, columns // 2)),
        Output(f"{name}.weight_scale", "F8_E4M3", (rows, columns // BLOCK_SIZE)),
        Output(f"{name}.{scale_2}", "F32", shape),
    )


def _quantize_tasks(groups: Mapping[str, Sequence[Member]], options: Options) -> Iterator[Task]:
    for members in groups.values():
        group = tuple(matrix for member in members for matrix in member.matrices)
        files: dict[str, list[Member]] = defaultdict(list)
        for member in members:
            files[member.matrices[0].source.file.name].append(member)
        for file, inside in files.items():
            outputs = tuple(o for m in inside for o in quantized_outputs(m, options.format))
            yield Task("quantize", file, outputs, tuple(inside), group)


def _other_tasks(
    headers: Mapping[str, TensorHeader], used: set[str], block: tuple[int, int] | None
) -> Iterator[Task]:
    """All that is not quantized: copied, or decoded where it is FP8."""
    for name, header in headers.items():
        if name in used or (block and name.endswith(".weight_scale_inv")):
            continue
        if header.dtype.startswith("F8"):
            if not block or len(header.shape) != 2 or header.dtype != "F8_E4M3":
                raise UnsupportedError(
                    f"{name} in {header.file} is {header.dtype} {list(header.shape)}",
                    expected=SOURCE,
                    way_out="convert the original checkpoint in BF16",
                )
            scale = fp8_scale(headers, header, block)
            rows, columns = header.shape
            matrix = Matrix(header, rows, columns, scale=scale, block=block)
            output = Output(name, "BF16", header.shape)
            yield Task("decode", header.file.name, (output,), (Member(name, (matrix,)),))
        else:
            output = Output(name, header.dtype, header.shape)
            yield Task("copy", header.file.name, (output,), source=header)


def _ignored(
    headers: Mapping[str, TensorHeader], used: set[str], quantized: set[str]
) -> tuple[str, ...]:
    """The modules that stay as they are, in the form in which ModelOpt lists them."""
    containers = {name.rpartition(".self_attn.")[0] for name in quantized if ".self_attn." in name}

    def modules() -> Iterator[str]:
        yield "lm_head"  # listed also where it is tied to the embedding
        for name, header in headers.items():
            module, _, kind = name.rpartition(".")
            expert = EXPERT_TENSOR.match(name) or FUSED.match(name)
            weight = kind == "weight" or FUSED.match(name)
            if name in used or len(header.shape) < 2 or not weight:
                continue
            before, attention, _ = module.rpartition(".self_attn.")
            if expert:
                yield f"{expert['container']}*"
            elif attention and before not in containers:
                yield f"{before}.self_attn*"
            else:
                yield module

    return tuple(sorted(set(modules()) - quantized))


def _nothing_to_quantize(
    src: Path, headers: Mapping[str, TensorHeader], options: Options
) -> UnsupportedError:
    if options.exclude:
        found = f"--exclude leaves nothing to quantize in {src}"
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
