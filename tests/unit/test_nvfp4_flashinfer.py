"""Rows, bitwise against sources that share no code with ours.

* Exact mode: FlashInfer's specification of ``nvfp4_quantize(..., per_token_activation=True)`` for
  its bit-reproducible kernels, evaluated in torch, and a few rows of it in rational arithmetic.
* Both modes: the steps of FlashInfer's CUDA kernel (``nvfp4QuantAndPerTokenScaleKernel`` and
  ``cvt_warp_fp16_to_fp4``), one number at a time in numpy float32.

FlashInfer's trace template ``_nvfp4_quantize_reference`` is no witness: it takes one static scale,
divides where the kernels multiply by reciprocals, and breaks ties towards zero.
"""

import bisect

import numpy as np
import pytest
import torch
from flashinfer.batch_invariant.quantization import nvfp4_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_inputs import DTYPES, KINDS, matrices, matrix

from vllm_nvfp4_pertoken.nvfp4 import (
    QuantizedRows,
    dequantize,
    quantize_per_token,
    quantize_static_values,
)
from vllm_nvfp4_pertoken.testing import assert_codes_equal, assert_scales_equal

F = np.float32
GLOBAL_SCALE_INV = 1 / (448 * 6)  # what callers pass to FlashInfer
FLT_MAX = np.finfo(F).max


def assert_rows_equal(actual: QuantizedRows, codes, block_scale, row_scale):
    assert_scales_equal(actual.row_scale, row_scale, "row_scale")
    assert_scales_equal(actual.block_scale, block_scale.view(torch.float8_e4m3fn), "block_scale")
    assert_codes_equal(actual.codes, codes)


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_exact_mode_is_flashinfers_specification(x):
    codes, swizzled, row_scale = nvfp4_reference.quantize_reference(
        x, GLOBAL_SCALE_INV, per_token=True
    )
    block_scale = nvfp4_reference.unswizzle_sf_128x4(swizzled, *x.shape)
    assert_rows_equal(quantize_per_token(x, exact=True), codes, block_scale, row_scale)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_mode_is_flashinfers_specification_in_rational_arithmetic(kind):
    x = matrix(kind, 3, 48, torch.bfloat16, seed=1, decade=0)
    codes, block_scale, row_scale = nvfp4_reference.exact_rows(
        x, GLOBAL_SCALE_INV, range(3), per_token=True
    )
    assert_rows_equal(quantize_per_token(x, exact=True), codes, block_scale, row_scale)


@settings(max_examples=60, deadline=None)
@given(matrices(max_rows=3, max_columns=128))
def test_exact_mode_is_the_kernels_steps(x):
    assert_rows_equal(quantize_per_token(x, exact=True), *kernel_rows(x, exact=True))


@settings(max_examples=60, deadline=None)
@given(matrices(max_rows=3, max_columns=128))
def test_fast_mode_is_the_kernels_steps(x):
    assert_rows_equal(quantize_per_token(x, exact=False), *kernel_rows(x, exact=False))


@settings(max_examples=40, deadline=None)
@given(matrices(max_columns=1024), st.floats(-4, 4))
def test_static_scales_are_flashinfers_specification(x, decade):
    """One scale for all rows: it may be too small, and then elements saturate, or too large."""
    amax = x.float().nan_to_num(0, 0, 0).abs().max().item()
    input_scale = torch.tensor(min(10.0**decade * max(amax, 1e-25) / 2688, 1e38))
    codes, swizzled, _ = nvfp4_reference.quantize_reference(x, 1 / input_scale)
    block_scale = nvfp4_reference.unswizzle_sf_128x4(swizzled, *x.shape)
    values, scales = quantize_static_values(x, input_scale, exact=True)
    expected = dequantize(codes, block_scale.view(torch.float8_e4m3fn), 1.0)
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))
    assert_scales_equal(scales, input_scale.expand(x.shape[0]))
    again, _ = quantize_static_values(x, input_scale.item(), exact=True)
    assert torch.equal(again.view(torch.int32), values.view(torch.int32))


# Amax of a row, amax of a block, and the block scale in exact and in fast mode: where the order of
# the three factors decides a tie, in exact mode for the first two, in fast mode for the others.
ORDER = [(184, 138, 352, 320), (252, 153, 288, 256), (196, 161, 384, 384), (224, 200, 384, 416)]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("row_max", "block_max", "if_exact", "if_fast"), ORDER)
def test_the_order_of_factors(row_max, block_max, if_exact, if_fast, exact):
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 3], x[0, 20] = row_max, -block_max
    rows = quantize_per_token(x, exact=exact)
    assert rows.block_scale.float().tolist() == [[448, if_exact if exact else if_fast]]
    assert_rows_equal(rows, *kernel_rows(x, exact))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_modes_differ(dtype):
    """Else the tests above could not tell them apart."""
    x = matrix("normal", 64, 256, dtype, seed=2, decade=0)
    exact, fast = quantize_per_token(x, exact=True), quantize_per_token(x, exact=False)
    assert (exact.row_scale != fast.row_scale).sum() > 5


# The kernel, one number at a time. Correctly rounded division stands for rcp.approx.ftz.


def kernel_rows(x: torch.Tensor, exact: bool):
    codes = np.zeros((x.shape[0], x.shape[1]), np.uint8)
    block_scale = np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    row_scale = np.zeros(x.shape[0], F)
    with np.errstate(all="ignore"):
        for r, row in enumerate(x.float().numpy()):
            encode, row_scale[r] = row_scales(row, exact)
            for b, block in enumerate(row.reshape(-1, 16)):
                factor, block_scale[r, b] = kernel_block_scale(block, encode, exact)
                codes[r, b * 16 : b * 16 + 16] = [e2m1_code(F(v * factor)) for v in block]
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    return torch.from_numpy(packed), torch.from_numpy(block_scale), torch.from_numpy(row_scale)


def row_scales(row, exact):
    amax = F(0)
    for v in row:
        amax = np.fmax(amax, abs(v))  # fmax ignores NaN
    if exact:
        global_scale = F(1) / F(GLOBAL_SCALE_INV)
        encode = np.fmin(global_scale / amax, FLT_MAX) if amax != 0 else FLT_MAX
        encode = encode if encode != 0 else F(1)
        return encode, F(1) / encode
    scale = amax * F(GLOBAL_SCALE_INV)
    if scale < np.finfo(F).tiny:  # -use_fast_math flushes subnormals
        scale = F(0)
    return (F(1) / scale if scale != 0 else F(0)), scale


def kernel_block_scale(block, encode, exact):
    """The factor for the elements, and the byte that is stored."""
    vec_max = abs(block[0])
    for v in block[1:]:
        vec_max = np.fmax(vec_max, abs(v))
    if exact:
        sixth = F(1.0) / F(6.0)
        byte = e4m3_byte(vec_max * (encode * sixth) if vec_max != 0 else F(0))
        if vec_max == 0:
            return F(0), byte
        return np.fmin(F(1) / (e4m3_value(byte) * (F(1) / encode)), FLT_MAX), byte
    sixth = F(1.0) / F(6.0)  # rcp.approx.ftz(6) on an H200 has the same bits
    byte = e4m3_byte(encode * (vec_max * sixth))
    if byte == 0:
        return F(0), byte
    return F(1) / (e4m3_value(byte) * (F(1) / encode)), byte


def e4m3_value(byte):
    exponent, mantissa = byte >> 3, byte & 7
    if byte == 0x7F:
        return F(np.nan)
    if exponent == 0:
        return F(mantissa * 2.0**-9)
    return F((8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = [float(e4m3_value(byte)) for byte in range(127)]


def e4m3_byte(value):
    """Nearest of the non-negative e4m3 numbers, ties to the even byte, saturating."""
    if np.isnan(value):
        return 0x7F
    value = min(float(value), 448.0)
    above = bisect.bisect_left(E4M3, value)
    if E4M3[above] == value:
        return above
    below = above - 1
    down, up = value - E4M3[below], E4M3[above] - value
    if down == up:
        return below if below % 2 == 0 else above
    return below if down < up else above


def e2m1_code(value):
    """Nearest of the e2m1 numbers, ties to the even code, saturating; NaN to +6; -0 is 8."""
    if np.isnan(value):
        return 7
    size = min(abs(float(value)), 6.0)
    grid = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    distance = [abs(size - g) for g in grid]
    nearest = [code for code in range(8) if distance[code] == min(distance)]
    code = nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]
    return code + 8 * int(np.signbit(value))
