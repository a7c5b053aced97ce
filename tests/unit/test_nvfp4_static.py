"""Rows with one static scale, worked out by hand. See test_nvfp4_flashinfer.py for the rest."""

import pytest
import torch

from vllm_nvfp4_pertoken.nvfp4 import (
    quantize_per_token_values,
    quantize_static_values,
)
from vllm_nvfp4_pertoken.testing import assert_scales_equal

BOTH = pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])


@BOTH
def test_a_row_within_the_scale_and_one_beyond_it(exact):
    x = torch.tensor([[2688.0, -224.0, 448.0, 0.0] + [0.0] * 12 + [6.0, -0.25, 0.75, 2.5] * 4])
    x = torch.cat([x, x * 2]).bfloat16()
    values, scale = quantize_static_values(x, torch.tensor([1.0]), exact=exact)
    assert_scales_equal(scale, torch.ones(2))
    first = [2688.0, -224.0, 448.0, 0.0] + [0.0] * 12
    small = [6.0, -0.0, 1.0, 2.0] * 4
    assert_scales_equal(values[0], torch.tensor(first + small))
    # The second row's first block saturates at 448 * 6.
    assert values[1, :4].tolist() == [2688, -448, 896, 0]
    assert_scales_equal(values[1, 16:], 2 * torch.tensor(small))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_scale_of_a_row_gives_what_per_token_gives(exact, dtype):
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(4)).to(dtype)
    x[0, 7] = 42.0  # 42 / 2688 is 2**-6, and its reciprocal exact
    values, row_scale = quantize_per_token_values(x, exact=exact, dtype=dtype)
    static, scale = quantize_static_values(x, float(row_scale), exact=exact, dtype=dtype)
    assert static.dtype == dtype
    assert_scales_equal(static.float(), values.float())
    assert_scales_equal(scale, row_scale)


def test_no_rows_and_what_cannot_be_quantized():
    values, scale = quantize_static_values(torch.zeros(0, 32), 1.0)
    assert (values.shape, scale.shape) == ((0, 32), (0,))
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_static_values(torch.zeros(1, 24), 1.0)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        quantize_static_values(torch.zeros(1, 16).double(), 1.0)
    with pytest.raises(TypeError, match=r"values can be .* not torch\.int8"):
        quantize_static_values(torch.zeros(1, 16), 1.0, dtype=torch.int8)
