"""What a conversion will do, decided from configuration and headers before a byte is written.

Everything that can be wrong with a source and that headers tell is found here. The plan names every
tensor of the result with its dtype and shape, so its size is known too.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_nvfp4_pertoken.checkpoints.convert.groups import (
    Member,
    Options,
    check_excludes,
    group_members,
    nothing_to_quantize,
)
from vllm_nvfp4_pertoken.checkpoints.convert.read import CHUNK_BYTES, Matrix
from vllm_nvfp4_pertoken.checkpoints.convert.source import (
    FUSED,
    SOURCE,
    Weights,
    fp8_block,
    fp8_scale,
)
from vllm_nvfp4_pertoken.checkpoints.headers import (
    TensorHeader,
    read_headers,
    read_json,
    tensor_bytes,
)
from vllm_nvfp4_pertoken.checkpoints.layout import EXPERT_TENSOR
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = [
    "FORMATS",
    "Member",
    "Options",
    "Output",
    "Plan",
    "Task",
    "make_plan",
]

FORMATS = ("modelopt", "compressed-tensors")


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
    config = read_json(src / "config.json")
    block = fp8_block(src, config)
    weights = Weights(headers, config, block)
    groups = group_members(weights, options)
    check_excludes(weights, options)
    if not groups:
        raise nothing_to_quantize(src, headers, options)
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
