"""What commands print: progress, sizes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

__all__ = ["progress_bar", "size_text"]


@contextmanager
def progress_bar(console: "Console", what: str) -> "Iterator[Callable[[int, int], None]]":
    """Rate and time left, on a bar or, in a log, a line every half minute.

    Yields what to call with the bytes that are done and their total.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    if not console.is_terminal:
        yield _progress_lines(console, what)
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines(
    console: "Console", what: str, every: float = 30.0
) -> "Callable[[int, int], None]":
    started = last = time.monotonic()
    first: int | None = None

    def show(done: int, total: int) -> None:
        nonlocal last, first
        first = done if first is None else first
        now = time.monotonic()
        if now - last >= every:
            last = now
            rate = max(done - first, 1) / (now - started)
            left = (total - done) / rate
            console.print(
                f"{what}: {done / total:.0%}, {rate / 1e6:.0f} MB/s, {left:.0f} s left",
                soft_wrap=True,
            )

    return show


def size_text(nbytes: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= factor:
            return f"{nbytes / factor:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
