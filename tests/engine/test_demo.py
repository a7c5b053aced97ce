"""`nvfp4-pertoken demo` as a user runs it: the real model, the real server, both swaps."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_demo(smollm2_models):
    command = Path(sysconfig.get_path("scripts")) / "nvfp4-pertoken"
    assert command.exists(), f"{sys.executable} has no nvfp4-pertoken beside it"
    result = subprocess.run(
        [command, "demo"], capture_output=True, text=True, timeout=840, check=False
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("The capital of France is Paris") == 3
    assert "experts: 358 MB in NVFP4, 1274 MB in BF16" in result.stdout
    drifted = result.stdout.index(f"without a restart: {smollm2_models.drifted.name}")
    assert drifted < result.stdout.index(f"without a restart: {smollm2_models.nvfp4.name}")
    # Powers of two move through every step without rounding: the swap changes no bit.
    assert result.stdout.count("3 of 3 answers are word for word those from before") == 2
    assert result.stdout.rstrip().endswith("All answers were right.")
