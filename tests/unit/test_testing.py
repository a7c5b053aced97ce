"""The assertions: each lets the right thing pass, and says what is wrong with the wrong one."""

import pytest
import torch

from vllm_nvfp4_pertoken.testing import (
    assert_codes_equal,
    assert_rows_close,
    assert_scales_equal,
    matmul_bound,
)


def test_codes():
    codes = torch.tensor([[0x21, 0x43], [0x65, 0x07]], dtype=torch.uint8)
    assert_codes_equal(codes, codes.clone())
    other = codes.clone()
    other[1] = torch.tensor([0x6D, 0x87], dtype=torch.uint8)  # 5 to -5, and 0 to minus 0
    with pytest.raises(
        AssertionError,
        match=r"fc1: 2 of 8 differ, the first at \(1, 0\): got 13 \(-3\), expected 5 \(3\)",
    ):
        assert_codes_equal(other, codes, "fc1")
    with pytest.raises(AssertionError, match=r"codes: shape \(1, 2\), expected \(2, 2\)"):
        assert_codes_equal(codes[:1], codes)
    with pytest.raises(AssertionError, match=r"codes: actual is torch.int32, not torch.uint8"):
        assert_codes_equal(codes.int(), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_scales(dtype):
    scales = torch.tensor([1.0, torch.nan, 0.0, 2.0]).to(dtype)
    assert_scales_equal(scales, scales.clone())
    for wrong, text in ((-0.0, "got -0, expected 0"), (torch.nan, "got nan, expected 0")):
        other = scales.clone()
        other[2] = wrong
        with pytest.raises(AssertionError, match=rf"1 of 4 differ, the first at \(2,\): {text}"):
            assert_scales_equal(other, scales)
    with pytest.raises(AssertionError, match=r"actual is torch.float16"):
        assert_scales_equal(scales.half(), scales)


def test_rows():
    expected = torch.arange(6.0).view(2, 3)
    actual = expected + torch.tensor([[0.1, -0.1, 0.0], [0.3, 0.0, 0.2]])
    assert_rows_close(actual, expected, 0.31)
    assert_rows_close(actual, expected, torch.tensor([0.11, 0.31]))
    assert_rows_close(actual.bfloat16(), expected, 0.35)
    text = (
        r"rows: 1 of 6 differ, the first at \(1, 0\): got 3.29\d*, expected 3; worst .* 1.5 times"
    )
    with pytest.raises(AssertionError, match=text):
        assert_rows_close(actual, expected, torch.tensor([0.11, 0.2001]))
    bound = torch.full((2, 3), 1.0)
    bound[0, 1] = 0.09
    with pytest.raises(AssertionError, match=r"1 of 6 differ, the first at \(0, 1\)"):
        assert_rows_close(actual, expected, bound)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(value):
    rows = torch.zeros(2, 3)
    bad = rows.clone()
    bad[1, 2] = value
    for actual, expected in ((bad, rows), (rows, bad), (bad, bad)):
        with pytest.raises(AssertionError, match=r"1 of 6 differ, the first at \(1, 2\)"):
            assert_rows_close(actual, expected, torch.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [16, 4096])
def test_the_bound_of_a_matmul_holds(dtype, k):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(8, k, generator=generator) for _ in range(2))
    running = torch.zeros(8, 8)
    for i in range(k):
        running += x[:, i, None] * w[None, :, i]
    exact = x.double() @ w.double().T
    for result in (running, x @ w.T):
        assert_rows_close(result.to(dtype), exact, matmul_bound(x, w, dtype))


def test_the_bound_of_a_matmul_is_not_idle():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(8, 64, generator=generator) for _ in range(2))
    exact = x.double() @ w.double().T
    for wrong in (x.bfloat16().double() @ w.double().T, exact.bfloat16(), exact * (1 + 1e-4)):
        with pytest.raises(AssertionError, match="of 64 differ"):
            assert_rows_close(wrong, exact, matmul_bound(x, w))
    with pytest.raises(AssertionError, match="of 64 differ"):
        assert_rows_close(exact * 1.01, exact, matmul_bound(x, w, torch.bfloat16))
