"""Errors that say what was found, where, what is accepted, and the way out."""

__all__ = ["CheckpointError", "PerTokenError", "UnsupportedError", "printable"]


def printable(text: str) -> str:
    """A text with names from files that a terminal can show: control characters are spelled out."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


class PerTokenError(ValueError):
    """Something keeps the engine from running per-token NVFP4, so it must not start.

    A ``ValueError``, because that is what vLLM's own configuration checks raise and report.

    Args:
        found: what was found, and where.
        expected: what would be accepted.
        way_out: what the user can do about it.
    """

    def __init__(self, found: str, *, expected: str = "", way_out: str = "") -> None:
        found, expected, way_out = printable(found), printable(expected), printable(way_out)
        parts = [found.rstrip(".") + "."]
        if expected:
            parts.append(f"Expected: {expected.rstrip('.')}.")
        if way_out:
            parts.append(f"Way out: {way_out.rstrip('.')}.")
        super().__init__(" ".join(parts))
        self.found, self.expected, self.way_out = found, expected, way_out


class CheckpointError(PerTokenError):
    """Files that are broken, incomplete, or not in a format that can run per-token."""


class UnsupportedError(PerTokenError):
    """A valid request that no per-token backend on this machine can serve."""
