"""Weights, byte for byte against ModelOpt's NVFP4 tensor and compressed-tensors' packing."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from nvfp4_inputs import DTYPES, matrices, matrix

from vllm_nvfp4_pertoken.nvfp4 import (
    QuantizedWeight,
    dequantize,
    pack_codes,
    quantize_weight,
    unpack_codes,
)
from vllm_nvfp4_pertoken.testing import (
    assert_codes_equal,
    assert_rows_close,
    assert_scales_equal,
)


def modelopt(w: torch.Tensor, weight_scale_2: torch.Tensor | None = None) -> QuantizedWeight:
    tensor, scale, scale_2 = NVFP4QTensor.quantize(
        w.clone(), 16, weights_scaling_factor_2=weight_scale_2
    )
    return QuantizedWeight(tensor._quantized_data, scale, scale_2)


def assert_weights_equal(actual: QuantizedWeight, expected: QuantizedWeight):
    assert_scales_equal(actual.weight_scale_2, expected.weight_scale_2, "weight_scale_2")
    assert_scales_equal(actual.weight_scale, expected.weight_scale, "weight_scale")
    assert_codes_equal(actual.weight, expected.weight)


@settings(max_examples=60, deadline=None)
@given(matrices(special=False))
def test_weights_are_modelopts(w):
    assume(w.any())  # ModelOpt's scale of a matrix of zeros is NaN
    assert_weights_equal(quantize_weight(w), modelopt(w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_with_zeros_and_subnormals_are_modelopts(dtype):
    w = matrix("blocks", 5, 128, dtype, seed=3, decade=0)
    w[0, :16] = 0.0
    w[1, 16:48] = -0.0
    w[2, ::3] = -torch.finfo(dtype).smallest_normal
    w[3, 5] = torch.finfo(dtype).max
    assert_weights_equal(quantize_weight(w), modelopt(w))


@settings(max_examples=40, deadline=None)
@given(matrices(max_columns=512, special=False), st.floats(-9, 9))
def test_weights_with_a_given_scale_are_modelopts(w, decade):
    """Too small a scale saturates, too large a one meets the floor of block scales."""
    amax = w.abs().max().double()
    scale_2 = (amax / 2688 * 10.0**decade).float()
    assume(0 < scale_2 < torch.inf and scale_2 * 6 < torch.inf)
    assert_weights_equal(quantize_weight(w, scale_2), modelopt(w, scale_2))


@settings(max_examples=20, deadline=None)
@given(matrices(max_columns=512, special=False))
def test_dequantized_weights_are_modelopts(w):
    """Within a unit in the last place of float32: ModelOpt multiplies the two scales first."""
    assume(w.any())
    ours = quantize_weight(w)
    theirs = NVFP4QTensor(w.shape, torch.float32, ours.weight).dequantize(
        scale=ours.weight_scale, double_scale=ours.weight_scale_2, block_sizes={-1: 16}
    )
    bound = theirs.abs().double() * 2.0**-22 + 2.0**-148
    assert_rows_close(dequantize(*ours), theirs, bound, "dequantized weights")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 64))
def test_packing_is_compressed_tensors(seed, rows, half):
    codes = torch.randint(16, (rows, 2 * half), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    packed = pack_codes(codes)
    values = unpack_fp4_from_uint8(packed, rows, 2 * half, dtype=torch.float32)
    assert_codes_equal(packed, pack_fp4_to_uint8(values))
    assert_codes_equal(pack_codes(unpack_codes(packed)), packed)
    padded = torch.nn.functional.pad(packed, (0, -half % 8))
    ones = torch.ones(rows, padded.shape[1] // 8).to(torch.float8_e4m3fn)
    decoded = dequantize(padded, ones, 1.0)[:, : 2 * half]
    assert torch.equal(decoded.view(torch.int32), values.view(torch.int32))
