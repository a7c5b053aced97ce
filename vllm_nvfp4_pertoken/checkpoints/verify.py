"""Check the files of an NVFP4 checkpoint from their headers, before any weight is read.

Nothing is loaded: safetensors headers carry every tensor's name, dtype, shape and place, so a
truncated file, a missing expert or a wrong shape is found in milliseconds, before a server starts
or a running one lets go of its weights.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from vllm_nvfp4_pertoken.checkpoints.layout import (
    COMPRESSED_KINDS,
    EXPERT_TENSOR,
    INDEX_NAME,
    LAYOUTS,
    MODELOPT_KINDS,
)
from vllm_nvfp4_pertoken.errors import CheckpointError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = [
    "CheckpointSummary",
    "TensorHeader",
    "WrongTensor",
    "find_wrong_tensors",
    "fingerprint",
    "read_headers",
    "read_json",
    "tensor_bytes",
    "verify_checkpoint",
]

_DOWN = tuple(layout.down for layout in LAYOUTS)
# Names that model families use for the number of routed experts.
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a safetensors header describes it; ``dtype`` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


class WrongTensor(NamedTuple):
    """A tensor that is not as it must be; ``file`` is None for one that is missing."""

    name: str
    file: Path | None
    found: str
    expected: str

    def __str__(self) -> str:
        where = f" in {self.file.name}" if self.file is not None else ""
        return f"{self.name}{where} is {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class CheckpointSummary:
    """What :func:`verify_checkpoint` saw.

    Attributes:
        moe_layers: MoE layers with NVFP4 experts.
        unquantized_moe_layers: MoE layers whose experts are BF16 or FP16.
        dense_layers: NVFP4 linears outside of the experts.
        expert_bytes: bytes of the NVFP4 experts, scales included.
    """

    moe_layers: int
    unquantized_moe_layers: int
    dense_layers: int
    expert_bytes: int


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor, from safetensors' name of its dtype: BF16, F8_E4M3, I64, BOOL …"""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The headers of every tensor of the checkpoint in the directory ``path``.

    Raises:
        CheckpointError: for a missing or truncated file, an index that does not fit the files, or
            no safetensors at all.
    """
    index = path / INDEX_NAME
    mapping: Mapping[str, str] | None = None
    if index.is_file():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, Mapping):
            raise CheckpointError(
                f"{index} has no 'weight_map'",
                expected="an object that maps tensor names to file names",
                way_out="copy the index file again",
            )
        files = sorted({path / name for name in mapping.values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path} holds no *.safetensors files",
            expected="a checkpoint in safetensors format",
            way_out="check the path, and that the download or export finished",
        )
    headers: dict[str, TensorHeader] = {}
    for file in files:
        for header in _read_file(file):
            headers[header.name] = header
    if mapping is not None:
        for name, file_name in mapping.items():
            if name not in headers or headers[name].file.name != file_name:
                raise CheckpointError(
                    f"{index} says that {name!r} is in {file_name}, where it is not",
                    expected="every tensor of the index in the file that it names",
                    way_out="copy the index and the file again: they are of different exports",
                )
    return headers


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and modification times of a checkpoint's files: equal if nothing was written."""
    files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json"))
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def verify_checkpoint(
    path: Path, headers: Mapping[str, TensorHeader] | None = None
) -> CheckpointSummary:
    """Check that every expert tensor of an NVFP4 checkpoint is there and has its shape and dtype.

    Activation scales are not looked at: nothing reads them.

    Args:
        path: the checkpoint's directory.
        headers: what :func:`read_headers` gave, if it was called before.

    Raises:
        CheckpointError: that names the file, the tensor, what was found and what was expected.
    """
    headers = read_headers(path) if headers is None else headers
    summary, problems = find_wrong_tensors(headers, read_json(path / "config.json"))
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = f"; and {more} more" if more > 0 else ""
        raise CheckpointError(
            f"{path} is not a complete NVFP4 checkpoint: "
            + "; ".join(map(str, problems[:_SHOWN_PROBLEMS]))
            + tail,
            way_out="export or copy the checkpoint again",
        )
    if not summary["moe_layers"]:
        raise CheckpointError(
            f"{path} has no NVFP4 experts: {summary['other_moe_layers']} MoE layers in other "
            "formats, "
            f"{summary['dense_layers']} NVFP4 dense layers",
            expected="a mixture-of-experts model whose experts are NVFP4",
            way_out="serve it without --quantization nvfp4_per_token",
        )
    return CheckpointSummary(
        moe_layers=summary["moe_layers"],
        unquantized_moe_layers=summary["unquantized_moe_layers"],
        dense_layers=summary["dense_layers"],
        expert_bytes=summary["expert_bytes"],
    )


def find_wrong_tensors(
    headers: Mapping[str, TensorHeader], config: Mapping[str, Any]
) -> tuple[Counter[str], list[WrongTensor]]:
    """What :func:`verify_checkpoint` counts, and every expert tensor that is wrong, in order.

    Args:
        headers: from :func:`read_headers`.
        config: the content of ``config.json``, for the number of experts.
    """
    containers: dict[str, dict[tuple[int, str], dict[str, TensorHeader]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    packed_elsewhere: list[TensorHeader] = []
    for header in headers.values():
        match = EXPERT_TENSOR.match(header.name)
        if match:
            key = (int(match["expert"]), match["projection"])
            containers[match["container"]][key][match["kind"]] = header
        elif header.dtype == "U8":
            packed_elsewhere.append(header)

    summary = Counter[str]()
    problems: list[WrongTensor] = []
    for name, container in containers.items():
        tensors = [header for kinds in container.values() for header in kinds.values()]
        if not any(header.dtype == "U8" for header in tensors):
            summary["unquantized_moe_layers"] += 1
            continue
        summary["moe_layers"] += 1
        summary["expert_bytes"] += sum(header.nbytes for header in tensors)
        problems += _check_container(name, container, _num_experts(config))
    for header in packed_elsewhere:
        if ".experts." in header.name:  # fused 3-D experts: one tensor for all
            summary["moe_layers"] += header.name.endswith(("gate_up_proj", "up_proj"))
        else:
            summary["dense_layers"] += 1
    summary["other_moe_layers"] = len(containers) - summary["moe_layers"]
    return summary, problems


def _check_container(
    name: str,
    container: Mapping[tuple[int, str], Mapping[str, TensorHeader]],
    num_experts: int | None,
) -> Iterable[WrongTensor]:
    """What is wrong in one MoE layer."""
    projections = sorted({projection for _, projection in container})
    count = max(1 + max(expert for expert, _ in container), num_experts or 0)
    compressed = any(COMPRESSED_KINDS["weight"] in kinds for kinds in container.values())
    names = COMPRESSED_KINDS if compressed else MODELOPT_KINDS
    sizes = _layer_sizes(container, names["weight"])
    for expert in range(count):
        for projection in projections:
            kinds = container.get((expert, projection), {})
            prefix = f"{name}.{expert}.{projection}"
            if "pre_quant_scale" in kinds:
                yield WrongTensor(
                    f"{prefix}.pre_quant_scale",
                    kinds["pre_quant_scale"].file,
                    "there (an AWQ or SVDQuant export)",
                    "none, as the per-token kernels cannot apply it",
                )
            rows, columns = sizes[projection]
            expected = {
                names["weight"]: ("U8", (rows, columns // 2)),
                names["weight_scale"]: ("F8_E4M3", (rows, columns // BLOCK_SIZE)),
                names["weight_scale_2"]: ("F32", ()),
            }
            for kind, (dtype, shape) in expected.items():
                header = kinds.get(kind)
                if header is None:
                    yield WrongTensor(f"{prefix}.{kind}", None, "missing", f"{dtype} {list(shape)}")
                    continue
                # A scalar may also be stored with one dimension of one element.
                same_shape = header.shape == shape or (not shape and header.shape == (1,))
                if not same_shape or header.dtype != dtype:
                    yield WrongTensor(
                        f"{prefix}.{kind}",
                        header.file,
                        f"{header.dtype} {list(header.shape)}",
                        f"{dtype} {list(shape)}",
                    )


def _layer_sizes(
    container: Mapping[tuple[int, str], Mapping[str, TensorHeader]],
    weight_name: str,
) -> dict[str, tuple[int, int]]:
    """Rows and columns of each projection's matrix, as most of the layer's experts have them."""
    votes: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for (_, projection), kinds in container.items():
        votes[projection]
        weight = kinds.get(weight_name)
        if weight is not None and len(weight.shape) == 2:
            votes[projection][(weight.shape[0], 2 * weight.shape[1])] += 1
    sizes = {
        projection: counter.most_common(1)[0][0] for projection, counter in votes.items() if counter
    }
    # A projection without any weight takes its size from the one on the other side.
    for projection in votes:
        if projection not in sizes:
            other = [
                size for name, size in sizes.items() if (name in _DOWN) != (projection in _DOWN)
            ]
            same = [
                size for name, size in sizes.items() if (name in _DOWN) == (projection in _DOWN)
            ]
            sizes[projection] = same[0] if same else (other[0][::-1] if other else (0, 0))
    return sizes


def _num_experts(config: Mapping[str, Any]) -> int | None:
    for section in (config, config.get("text_config")):
        if isinstance(section, Mapping):
            for key in _NUM_EXPERTS_KEYS:
                if isinstance(section.get(key), int):
                    return int(section[key])
    return None


def _read_file(file: Path) -> Iterable[TensorHeader]:
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                piece = opened.get_slice(name)
                yield TensorHeader(name, piece.get_dtype(), tuple(piece.get_shape()), file)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is named by {INDEX_NAME} and does not exist",
            expected="every file of the index",
            way_out="finish the download or copy the file again",
        ) from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} ({file.stat().st_size} bytes) cannot be read: {error}",
            expected="a whole safetensors file",
            way_out="copy the file again: it is truncated or damaged",
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist",
            expected="a checkpoint directory as ModelOpt or llm-compressor exports it",
            way_out="check the path, and that the download or export finished",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file} is not valid JSON: {error}", way_out="copy the file again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}",
            expected="a JSON object",
            way_out="copy the file again",
        )
    return content
