"""Assertions that hold each output to what can honestly be asked of it.

Codes and scales are compared bitwise, because their arithmetic is defined bit for bit; sums only
within a bound, because the order of additions is free. Every failure says how many elements are
wrong and which one comes first. For tests and for the self-check at start-up.
"""

from collections.abc import Callable

import torch

from vllm_nvfp4_pertoken.nvfp4 import NVFP4, unpack_codes

__all__ = [
    "assert_codes_equal",
    "assert_rows_close",
    "assert_scales_equal",
    "matmul_bound",
]


def assert_codes_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "codes") -> None:
    """Packed codes, uint8 [..., K/2], are equal in every nibble; minus zero is not zero.

    Raises:
        AssertionError: with the count and the first bad element, [..., K] coordinates.
    """
    _check_alike(actual, expected, name, torch.uint8)
    got, want = unpack_codes(actual), unpack_codes(expected)
    _fail_where(got != want, name, got, want, _code_text)


def assert_scales_equal(actual: torch.Tensor, expected: torch.Tensor, name: str = "scales") -> None:
    """Scales of one dtype, float8_e4m3fn or float32, are equal byte for byte; so is NaN.

    Raises:
        AssertionError: with the count and the first bad element.
    """
    _check_alike(actual, expected, name, expected.dtype)
    bits = torch.uint8 if expected.dtype == torch.float8_e4m3fn else torch.int32
    _fail_where(
        actual.contiguous().view(bits) != expected.contiguous().view(bits), name, actual, expected
    )


def assert_rows_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    bound: torch.Tensor | float,
    name: str = "rows",
) -> None:
    """``|actual - expected| <= bound`` everywhere; a non-finite element on either side fails.

    Args:
        actual, expected: [M, N], any float dtypes; compared in float64.
        bound: absolute: a number, [M] with one for each row, or [M, N] (``matmul_bound``).
        name: what they are, for the message.

    Raises:
        AssertionError: with the count, the first bad element and its error over its bound.
    """
    _check_alike(actual, expected, name)
    limit = torch.as_tensor(bound, dtype=torch.float64, device=actual.device)
    if limit.ndim == 1:
        limit = limit.unsqueeze(-1)
    error = (actual.double() - expected.to(actual.device).double()).abs()
    # Negated: NaN is in no order, and an infinite error has no bound.
    bad = ~(error <= limit) | ~error.isfinite()
    worst = (error / limit).nan_to_num(nan=torch.inf).amax().item() if bad.any() else 0.0
    _fail_where(bad, name, actual, expected, note=f"; worst error {worst:.3g} times its bound")


def matmul_bound(
    x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """How far any honest ``x @ w.T`` can be from the exact product: float64 [M, N].

    K float32 products added in float32 in any order are off by at most ``K * u / (1 - K * u)``
    times ``|x| @ |w|.T``, u = 2**-24 (N. Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1); rounding the sum to ``dtype`` adds half a unit in the last place of it.

    Args:
        x: [M, K], any float dtype, scales applied.
        w: [N, K], likewise.
        dtype: of the result.
    """
    x, w = x.double(), w.double()
    unit = x.shape[1] * 2.0**-24
    error = x.abs() @ w.abs().T * (unit / (1 - unit))
    info = torch.finfo(dtype)
    return error + ((x @ w.T).abs() + error) * (info.eps / 2) + info.smallest_normal * info.eps


def _check_alike(
    actual: torch.Tensor, expected: torch.Tensor, name: str, dtype: torch.dtype | None = None
) -> None:
    # Raised, not asserted: the self-check must hold under ``python -O`` too.
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    for side, tensor in (("actual", actual), ("expected", expected)):
        if dtype is not None and tensor.dtype != dtype:
            raise AssertionError(f"{name}: {side} is {tensor.dtype}, not {dtype}")


def _fail_where(
    bad: torch.Tensor,
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    text: Callable[[torch.Tensor], str] = lambda value: f"{float(value):.9g}",
    note: str = "",
) -> None:
    count = int(bad.sum())
    if count:
        where = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {count} of {bad.numel()} differ, the first at {where}: "
            f"got {text(actual[where])}, expected {text(expected[where])}{note}"
        )


def _code_text(code: torch.Tensor) -> str:
    value = NVFP4.magnitudes[int(code) & 7]
    return f"{int(code)} ({'-' if code > 7 else ''}{value:g})"
