"""The choice of experts is a table."""

import pytest

from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.experts.select import Facts, choose

MISSING = "the kernel was not compiled when the package was installed"


@pytest.mark.parametrize(
    ("moe_backend", "device", "missing", "chosen", "warns"),
    [
        ("auto", "cpu", None, "cpu", False),
        ("auto", "cpu", MISSING, "reference", True),
        ("auto", "cuda", None, "reference", True),
        ("auto", "cuda", MISSING, "reference", True),
        ("emulation", "cpu", None, "reference", False),
        ("emulation", "cpu", MISSING, "reference", False),
        ("emulation", "cuda", None, "reference", False),
    ],
)
def test_table(
    moe_backend: str, device: str, missing: str | None, chosen: str, warns: bool
) -> None:
    choice = choose(Facts(moe_backend, device, cpu_kernel_missing=missing))
    assert choice.name == chosen
    assert choice.reason
    assert (choice.warning is not None) == warns


def test_a_slow_choice_says_why() -> None:
    choice = choose(Facts("auto", "cpu", cpu_kernel_missing=MISSING))
    assert choice.rejected == {"cpu": MISSING}
    assert choice.warning is not None
    assert MISSING in choice.warning
    choice = choose(Facts("auto", "cuda"))
    assert "cuda" in choice.rejected["cpu"]


@pytest.mark.parametrize("moe_backend", ["marlin", "cutlass", "flashinfer_trtllm", ""])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_backends_are_refused(moe_backend: str, device: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"--moe-backend {moe_backend} cannot.*auto.*emul"):
        choose(Facts(moe_backend, device))


def test_batched_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"batched activation format.*all2all-backend"):
        choose(Facts("auto", "cuda", activation_format="batched"))


def test_triton_is_what_was_asked_for_or_an_error() -> None:
    assert choose(Facts("triton", "cuda")).name == "triton"
    with pytest.raises(UnsupportedError, match=r"triton cannot run here: no GPU.*leave"):
        choose(Facts("triton", "cpu", triton_missing="no GPU"))
