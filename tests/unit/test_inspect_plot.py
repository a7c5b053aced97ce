"""`inspect --plot`: what is drawn is what safetensors alone reads, and what cannot be is said."""

import math
import sys

import pytest
import torch
from cases import ALL_NVFP4, EXPERTS, NO_CALIBRATION, expert_tensor, make_case, read_tensors
from typer.testing import CliRunner

from vllm_nvfp4_pertoken.checkpoints.inspect import inspect_checkpoint
from vllm_nvfp4_pertoken.checkpoints.inspect.plot import draw_input_scales
from vllm_nvfp4_pertoken.cli import app

COLD, MISSING, BAD = (0, 2), (1, 3), (1, 4)


def run(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def uneven(tensors):
    """Another scale for each expert; one was never calibrated, one lacks its scales."""
    for layer in range(2):
        for expert in range(EXPERTS):
            for projection in ("gate", "up", "down"):
                name = expert_tensor(layer, expert, projection, "input_scale")
                tensors[name] = torch.tensor(0.1 * (1 + expert) ** 2)
                if (layer, expert) == COLD:
                    tensors[name] = torch.tensor(0.5) / 2688
                if (layer, expert) == MISSING:
                    del tensors[name]
                if (layer, expert) == BAD:
                    tensors[name] = torch.tensor(math.nan)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(ALL_NVFP4, tmp_path_factory.mktemp("plot") / "case", edit=uneven)


def test_points_are_the_checkpoints(case):
    figure = draw_input_scales(inspect_checkpoint(case).weights, "title")
    assert figure.get_suptitle().startswith("title\n")
    tensors = read_tensors(case)
    for axes, projections in zip(figure.axes, (("gate", "up"), ("down",)), strict=True):
        expected: dict[str, list[tuple[int, float]]] = {"an expert": [], "reached": []}
        for layer in range(2):
            for expert in range(EXPERTS):
                for projection in projections:
                    value = tensors.get(expert_tensor(layer, expert, projection, "input_scale"))
                    if value is not None and value.isfinite():
                        kind = "reached" if (layer, expert) == COLD else "an expert"
                        expected[kind].append((layer, float(value) * 2688))
        drawn = {c.get_label(): c.get_offsets().tolist() for c in axes.collections}
        for label, points in expected.items():
            (found,) = [drawn[key] for key in drawn if key == label or key.endswith(label)]
            assert torch.allclose(torch.tensor(sorted(found)), torch.tensor(sorted(points)))
        red = next(points for label, points in drawn.items() if "missing" in label)
        assert [x for x, _ in red] == [1] * (2 * len(projections))
        (line,) = axes.lines
        assert list(line.get_ydata()) == pytest.approx([6.4 * 2688] * 2)
        # The lowest is the uncalibrated expert's.
        assert f"up to {6.4 * 2688 / 0.5:.3g} times apart" in axes.get_title(loc="left")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_written(case, tmp_path, suffix):
    file = tmp_path / f"out.{suffix}"
    result = run(case, "--plot", file)
    assert result.exit_code == 0, result.stderr
    assert "routed experts w13" in result.stdout
    begin = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert file.read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("checkpoint", "name", "message"),
    [
        (NO_CALIBRATION, "out.png", "no expert of the checkpoint has an input scale"),
        (ALL_NVFP4, "out.docx", "ends in '.docx'. Expected: one of ."),
        (ALL_NVFP4, "out", "ends in 'nothing'. Expected: one of ."),
        (ALL_NVFP4, "missing/out.png", "does not exist"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, checkpoint, name, message):
    result = run(checkpoint, "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    result = run(ALL_NVFP4, "--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert "pip install 'vllm-nvfp4-pertoken[plot]'" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(ALL_NVFP4).exit_code == 0
