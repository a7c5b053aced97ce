"""Read what describes a checkpoint: its JSON files, its index, and the headers of its tensors.

Files come from anywhere, so nothing in them is believed: names in an index must be names of files
in the same directory, and what is not as it must be is an error in words. The safetensors library
itself holds a header against the file: its length, offsets, shapes and dtypes.
"""

import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_nvfp4_pertoken.checkpoints.layout import INDEX_NAME
from vllm_nvfp4_pertoken.errors import CheckpointError

__all__ = [
    "TensorHeader",
    "config_number",
    "config_sections",
    "fingerprint",
    "read_headers",
    "read_json",
    "shown",
    "tensor_bytes",
]

# Lone surrogates can be written in JSON, and cannot be the name of a file.
_FILE_NAME = re.compile(r"[^/\\\x00\ud800-\udfff]+\.safetensors")


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


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor, from safetensors' name of its dtype: BF16, F8_E4M3, I64, BOOL …"""
    return math.prod(shape) * _bits(dtype) // 8


@cache
def _bits(dtype: str) -> int:
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The headers of every tensor of the checkpoint in the directory ``path``.

    Raises:
        CheckpointError: for a missing or truncated file, an index that does not fit the files, or
            no safetensors at all.
    """
    index = path / INDEX_NAME
    mapping = _read_index(index) if index.is_file() else None
    if mapping is not None:
        files = sorted(path / name for name in set(mapping.values()))
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
    states = [(file.name, file.stat()) for file in files]
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def _read_index(index: Path) -> dict[str, str]:
    """Tensor to file name; every one a plain name, so that nothing outside is ever opened."""
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, Mapping):
        raise CheckpointError(
            f"{index} has no 'weight_map'",
            expected="an object that maps tensor names to file names",
            way_out="copy the index file again",
        )
    for tensor, name in mapping.items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index} says that {shown(tensor)} is in {shown(name)}",
                expected="the name of a *.safetensors file beside the index",
                way_out="copy the index file again",
            )
    return dict(mapping)


def _read_file(file: Path) -> Iterable[TensorHeader]:
    try:
        mode = file.stat().st_mode
    except OSError as error:
        found = "does not exist" if isinstance(error, FileNotFoundError) else f"fails: {error}"
        raise CheckpointError(
            f"{file} is named by {INDEX_NAME} and {found}",
            expected="every file of the index",
            way_out="finish the download or copy the file again",
        ) from None
    if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
        raise CheckpointError(
            f"{file} is no regular file",
            expected="a safetensors file",
            way_out="copy the file again",
        )
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                piece = opened.get_slice(name)
                yield TensorHeader(name, piece.get_dtype(), tuple(piece.get_shape()), file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} ({file.stat().st_size} bytes) cannot be read: {error}",
            expected="a whole safetensors file",
            way_out="copy the file again: it is truncated or damaged",
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: if it does not exist, cannot be read, or holds anything else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist",
            expected="a directory with a Hugging Face checkpoint",
            way_out="check the path, and that the download or export finished",
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}", way_out="copy the file again"
        ) from error
    # Not UTF-8, not JSON, a number of thousands of digits; nested deeper than Python's stack.
    except (ValueError, RecursionError) as error:
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


def config_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``config.json``, and its ``text_config`` where it has one."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, Mapping) else [config]


def config_number(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these numbers that ``config.json`` has, or its ``text_config``."""
    for section in config_sections(config):
        for key in keys:
            if type(section.get(key)) is int:
                return int(section[key])
    return None


def shown(value: object) -> str:
    """A value from a file for an error message: as Python writes it, and not at any length."""
    text = ascii(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return text if len(text) < 200 else f"{text[:200]}…"
