"""Write a checkpoint that is whole or not there, and that a killed process leaves resumable.

All happens in a working directory beside the destination. A file in it has its last name only when
it is complete and on the disk; the directory gets its own last name at the very end. A conversion
that is started again finds the working directory, sees by the state file in it that source, options
and version are the same, and does the files that are missing.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_nvfp4_pertoken.checkpoints.convert.plan import Output, Plan
from vllm_nvfp4_pertoken.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["STATE_NAME", "ShardWriter", "Workspace", "check_space", "copied_files", "shard_size"]

STATE_NAME = ".nvfp4-pertoken-convert.json"
# Weights in other formats, which must not travel along, and what other tools leave behind.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class ShardWriter:
    """One safetensors file, filled in any order from any thread.

    The format wants tensors without gaps; larger elements come first, so that all are aligned.
    """

    def __init__(self, file: Path, outputs: Sequence[Output]) -> None:
        self._file = file
        self._partial = file.with_name(f"{file.name}.part")
        header, begins = _header(outputs)
        self._begins = {name: len(header) + begin for name, begin in begins.items()}
        self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._pwrite(memoryview(header), 0)
        os.ftruncate(self._descriptor, shard_size(outputs))

    def write(self, name: str, begin: int, data: "torch.Tensor") -> None:
        """Put bytes at ``begin`` of a tensor."""
        import torch

        view = data.contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._pwrite(view, self._begins[name] + begin)

    def _pwrite(self, view: memoryview, offset: int) -> None:
        while view:
            count = os.pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count

    def finish(self) -> None:
        """Everything is written: give the file its name."""
        os.fsync(self._descriptor)
        os.replace(self._partial, self._file)

    def close(self) -> None:
        os.close(self._descriptor)


def _header(outputs: Sequence[Output]) -> tuple[bytes, dict[str, int]]:
    def item(output: Output) -> int:
        return Output("", output.dtype, (1,)).nbytes

    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    for output in sorted(outputs, key=lambda output: -item(output)):
        end = position + output.nbytes
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [position, end],
        }
        begins[output.name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins


def shard_size(outputs: Sequence[Output]) -> int:
    """Bytes of the file that holds these tensors."""
    return len(_header(outputs)[0]) + sum(output.nbytes for output in outputs)


class Workspace:
    """The working directory of a conversion, locked while it is open.

    Args:
        src: the checkpoint that is read, which must not be in the way.
        dst: where the checkpoint will appear.
        key: identifies source, options and version; equal keys give equal bytes.
        force: replace ``dst``, and drop a working directory with another key.
        directory: another place for it than ``.NAME.partial`` beside ``dst``.
    """

    def __init__(
        self, src: Path, dst: Path, key: str, *, force: bool = False, directory: Path | None = None
    ) -> None:
        self._src = src.resolve()
        self.dst = dst.absolute()
        self.directory = directory or self.dst.with_name(f".{self.dst.name}.partial")
        self._old = self.dst.with_name(f".{self.dst.name}.replaced")
        self._key = key
        self._force = force

    def check(self) -> bool:
        """Refuse what must not be overwritten; True if all work was done by a killed process."""
        if self._exists(self._old) and not self._exists(self.dst):
            self._old.rename(self.dst)  # killed between the renames of `publish`
        state = self.dst / STATE_NAME
        if state.is_file() and state.read_text() == self._key:
            self._clean()
            return True
        real = self.dst.resolve()
        if real == self._src or real in self._src.parents or self._src in real.parents:
            raise CheckpointError(
                f"{self.dst} is {self._src}, or one of them is inside of the other",
                expected="two separate directories",
                way_out="choose another path for the result",
            )
        if self._exists(self.dst) and not self._force:
            raise CheckpointError(
                f"{self.dst} exists",
                expected="a path where a new directory can be made",
                way_out="choose another path, remove it first, or replace it with --force",
            )
        old = self._exists(self.dst)
        if old and (self.dst.is_symlink() or not (self.dst / "config.json").is_file()):
            raise CheckpointError(
                f"{self.dst} is no directory with a config.json",
                expected="a checkpoint directory to replace",
                way_out="choose another path, or remove it first",
            )
        return False

    @contextmanager
    def open(self) -> Iterator[bool]:
        """Make or resume the directory, and hold its lock: yields whether it is resumed.

        An error of ours means that no resumption would help, so the directory goes; after anything
        else (Ctrl-C, a full disk) it stays.
        """
        self.dst.parent.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(exist_ok=True)
        lock = os.open(self.directory, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_ino != self.directory.stat().st_ino:
                    raise FileNotFoundError
            except (BlockingIOError, FileNotFoundError):
                raise _Busy(
                    f"another process is converting into {self.directory}",
                    expected="one conversion per destination",
                    way_out="wait for it, or choose another path",
                ) from None
            yield self._resume()
        except _Busy:
            raise
        except CheckpointError:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        finally:
            os.close(lock)

    def _resume(self) -> bool:
        state = self.directory / STATE_NAME
        found = state.read_text() if state.is_file() else None
        if found == self._key:
            return True
        if found is not None and not self._force:
            raise _Busy(
                f"{self.directory} holds an unfinished conversion with another source, other "
                "options or another version",
                expected="the same source and options, which would be resumed",
                way_out="repeat the first command, remove the directory, or start over with "
                "--force",
            )
        for file in self.directory.iterdir():
            shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
        write_whole(state, self._key)
        return False

    def publish(self) -> None:
        """The directory is complete: move it to its place."""
        if self._force and self._exists(self.dst):
            shutil.rmtree(self._old, ignore_errors=True)
            self.dst.rename(self._old)
        self.directory.rename(self.dst)
        _sync_directory(self.dst.parent)
        self._clean()

    def _clean(self) -> None:
        (self.dst / STATE_NAME).unlink(missing_ok=True)
        shutil.rmtree(self._old, ignore_errors=True)

    @staticmethod
    def _exists(path: Path) -> bool:
        return path.exists() or path.is_symlink()


class _Busy(CheckpointError):
    """The working directory is someone else's, so it stays."""


def write_whole(file: Path, text: str) -> None:
    """Write a text file so that it is never seen in part."""
    partial = file.with_name(f"{file.name}.part")
    with partial.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copied_files(src: Path) -> list[Path]:
    """Configuration, tokenizer, code: all files beside the weights."""
    return [
        file
        for file in sorted(src.iterdir())
        if file.is_file()
        and file.suffix not in _NOT_COPIED
        and not file.name.endswith(".index.json")
        and not file.name.startswith(".")
    ]


def check_space(plan: Plan, directory: Path, dst: Path) -> int:
    """Refuse when the disk cannot hold the result: the bytes that are still to be written."""
    need = sum(file.stat().st_size for file in copied_files(plan.src))
    for name, tasks in plan.files.items():
        if not (directory / name).is_file():
            need += shard_size([output for task in tasks for output in task.outputs])
    place = dst.absolute().parent
    while not place.exists():
        place = place.parent
    partial = sum(file.stat().st_blocks * 512 for file in directory.glob("*.part"))
    free = shutil.disk_usage(place).free + partial
    if need > free:
        raise CheckpointError(
            f"{place} has {free / 1e9:.2f} GB free, and {need / 1e9:.2f} GB are to be written",
            expected="room for the whole result before anything is written",
            way_out="free some space, or choose a path on another disk",
        )
    return need
