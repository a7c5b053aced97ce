"""A vLLM server as a child process that cannot outlive us."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

__all__ = ["STOP_SIGNALS", "Server", "ServerError", "free_port", "stop_signals_raise"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOWN_LINES = 30
_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception)\b: .+")
# What vLLM's front end says when another of its processes has failed: true, but not the reason.
_NOT_THE_REASON = ("Engine core initialization failed", "WorkerProc initialization failed")
# Triton's bindings list what they did not free when a process ends badly: more lines than we show.
_LEAK_LINE = re.compile(
    r"nanobind: | - leaked (?:instance|type|function) | - \.\.\. skipped remainder$"
    r"|See https://nanobind\."
)


class ServerError(RuntimeError):
    """The server did not start, stopped, or answered with an error."""


class Server:
    """A command that serves HTTP on the loopback interface, in a process group of its own.

    A context manager: leaving the block, in whichever way, ends every process of the group.

    Args:
        command: the program and its arguments.
        port: where it will listen.
        env: the environment of the process.
    """

    def __init__(self, command: Sequence[str], port: int, env: Mapping[str, str]) -> None:
        self.command = list(command)
        self.env = dict(env)
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed in __exit__)
            prefix="nvfp4-pertoken-", suffix=".log"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Server":
        # A signal between the start of the process and the assignment would lose the process.
        with _held_back_signals():
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._log.close()

    def wait_until_ready(
        self, timeout: float, on_tick: Callable[[float, str], None] = lambda seconds, line: None
    ) -> float:
        """Wait until ``/health`` answers; the seconds it took.

        Args:
            timeout: seconds after which to give up.
            on_tick: called about twice a second with the time so far and the last line of the log.

        Raises:
            ServerError: the process ended or time is up.
        """
        import httpx

        start = time.monotonic()
        while True:
            seconds = time.monotonic() - start
            self.check_running("before it was ready")
            try:
                if httpx.get(f"{self.url}/health", timeout=2, trust_env=False).is_success:
                    return seconds
            except httpx.TransportError:
                pass
            if seconds > timeout:
                raise ServerError(self.explain(f"not ready after {timeout:.0f} s"))
            on_tick(seconds, self.last_lines(1))
            time.sleep(0.5)

    def post(self, path: str, body: Mapping[str, object], timeout: float = 300) -> object:
        """POST a JSON object; the decoded answer (None if it is empty).

        Raises:
            ServerError: there was no answer, or it was an error.
        """
        import httpx

        try:
            response = httpx.post(f"{self.url}{path}", json=body, timeout=timeout, trust_env=False)
        except httpx.TransportError as error:
            self.check_running(f"while it should answer {path}")
            raise ServerError(self.explain(f"no answer to {path}: {error!r}")) from error
        if not response.is_success:
            answer = response.text[:500]
            raise ServerError(self.explain(f"{path} answered {response.status_code}: {answer}"))
        return response.json() if response.content else None

    def check_running(self, when: str) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerError(self.explain(f"ended with {how} {when}"))

    def explain(self, what: str) -> str:
        """A message: what happened, the likely reason, and the server's last lines."""
        reasons = [
            line
            for line in _ERROR_LINE.findall(self._read_log())
            if not any(text in line for text in _NOT_THE_REASON)
        ]
        reason = f"\nThe reason is probably: {reasons[-1]}" if reasons else ""
        lines = self.last_lines(SHOWN_LINES)
        return f"The server {what}.{reason}\nIts last lines:\n{lines or '(it printed nothing)'}"

    def last_lines(self, count: int) -> str:
        lines = self._read_log().rstrip().splitlines()
        return "\n".join([line for line in lines if not _LEAK_LINE.match(line)][-count:])

    def stop(self, patience: float = 10) -> None:
        """End all processes of the group: SIGTERM, then SIGKILL. A second Ctrl-C shortens it."""
        if self._process is None:
            return
        group = self._process.pid
        with _held_back_signals() as impatient:
            for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
                try:
                    os.killpg(group, number)
                except ProcessLookupError:
                    break
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline:
                    self._process.poll()
                    if not _group_members(group):
                        break
                    if impatient and number == signal.SIGTERM:
                        break
                    time.sleep(0.05)
            self._process.wait()

    def _read_log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program as an exception does, so that blocks are left."""

    def on_signal(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    numbers = [number for number in STOP_SIGNALS if number != signal.SIGINT]
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _group_members(group: int) -> list[int]:
    """Processes of a group that still run; zombies do not."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(process_group) == group and state not in "ZX":
            members.append(int(stat.parent.name))
    return members


@contextmanager
def _held_back_signals() -> Iterator[list[int]]:
    """Keep signals that ask us to stop until the block ends; the list fills as they come."""
    pending: list[int] = []
    previous = {
        number: signal.signal(number, lambda received, frame: pending.append(received))
        for number in STOP_SIGNALS
    }
    try:
        yield pending
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])
