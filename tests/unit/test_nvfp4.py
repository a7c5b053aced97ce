"""The format's contract: hand-derived values, edges, shapes, layouts, errors."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_inputs import DTYPES, KINDS, matrices, matrix

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.nvfp4 import (
    NVFP4,
    dequantize,
    fake_quantize_per_token,
    pack_codes,
    quantize_per_token,
    quantize_per_token_values,
    quantize_weight,
    unpack_codes,
)
from vllm_nvfp4_pertoken.testing import (
    assert_codes_equal,
    assert_rows_close,
    assert_scales_equal,
    matmul_bound,
)

FLT_MAX = torch.finfo(torch.float32).max
both_modes = pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def unit_row(block: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A row whose row_scale is 1 and whose second block, the given one, has block scale 1."""
    row = torch.zeros(1, 32, dtype=dtype)
    row[0, 0] = 2688.0
    row[0, 16] = 6.0
    row[0, 17 : 17 + len(block)] = torch.tensor(block, dtype=dtype)
    return row


# The format


def test_public_names():
    assert nvfp4.__all__ == [
        "BLOCK_SIZE",
        "NVFP4",
        "Format",
        "QuantizedRows",
        "QuantizedWeight",
        "dequantize",
        "fake_quantize_per_token",
        "pack_codes",
        "quantize_per_token",
        "quantize_per_token_values",
        "quantize_static_values",
        "quantize_weight",
        "scale_of_weights",
        "unpack_codes",
    ]
    for name in nvfp4.__all__[2:]:
        assert inspect.getdoc(getattr(nvfp4, name)), name


def test_the_codes_stand_for_the_magnitudes_and_their_negatives():
    codes = pack_codes(torch.arange(16, dtype=torch.uint8))
    values = dequantize(codes[None], torch.ones(1, 1).to(torch.float8_e4m3fn), 1.0)[0]
    assert values.tolist() == [*NVFP4.magnitudes, *(-m for m in NVFP4.magnitudes)]
    assert values[8].signbit()
    assert NVFP4.magnitudes == (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def test_the_even_element_is_in_the_low_nibble():
    assert pack_codes(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert unpack_codes(torch.tensor([0x21, 0x0F], dtype=torch.uint8)).tolist() == [1, 2, 15, 0]


# Rows


@both_modes
@all_dtypes
def test_a_row_by_hand(dtype, exact):
    x = torch.zeros(1, 48, dtype=dtype)
    x[0, :4] = torch.tensor([2688.0, -1344.0, 896.0, 200.0])  # block scale 448: 6, -3, 2, 0.45
    x[0, 16:20] = torch.tensor([6.0, 4.0, -1.5, 0.5])  # block scale 1
    x[0, 32:35] = torch.tensor([0.375, -0.1875, 0.0625])  # block scale 1/16: 6, -3, 1
    q = quantize_per_token(x, exact=exact)
    assert unpack_codes(q.codes)[0, :4].tolist() == [7, 13, 4, 1]
    assert unpack_codes(q.codes)[0, 16:20].tolist() == [7, 6, 11, 1]
    assert unpack_codes(q.codes)[0, 32:35].tolist() == [7, 13, 2]
    assert q.block_scale.float().tolist() == [[448.0, 1.0, 0.0625]]
    assert q.row_scale.tolist() == [1.0]
    assert (q.codes.dtype, q.codes.shape) == (torch.uint8, (1, 24))
    assert (q.block_scale.dtype, q.block_scale.shape) == (torch.float8_e4m3fn, (1, 3))
    assert (q.row_scale.dtype, q.row_scale.shape) == (torch.float32, (1,))


@both_modes
@pytest.mark.parametrize(
    ("tie", "below", "at", "above"),
    [
        (0.25, 0.0, 0.0, 0.5),
        (0.75, 0.5, 1.0, 1.0),
        (1.25, 1.0, 1.0, 1.5),
        (1.75, 1.5, 2.0, 2.0),
        (2.5, 2.0, 2.0, 3.0),
        (3.5, 3.0, 4.0, 4.0),
        (5.0, 4.0, 4.0, 6.0),
        (6.0, 6.0, 6.0, 6.0),
    ],
)
@all_dtypes
def test_ties_go_to_the_even_code(tie, below, at, above, dtype, exact):
    exactly = torch.tensor(tie, dtype=dtype)
    down, up = ((bits(exactly) + step).view(dtype).item() for step in (-1, 1))
    numbers = [down, tie, min(up, 6.0)]
    row = unit_row([*numbers, *(-n for n in numbers)], dtype)
    values, _ = quantize_per_token_values(row, exact=exact)
    assert values[0, 17:23].tolist() == [below, at, above, -below, -at, -above]


def test_the_row_scale_is_correctly_rounded():
    """Not ``2688.0 / tensor``, which torch computes as a reciprocal times 2688."""
    x = matrix("normal", 4096, 16, torch.float32, seed=4, decade=0)
    encode = (2688.0 / x.double().abs().amax(1)).float()  # 53 bits: no double rounding at 24
    expected = (1.0 / encode.double()).float()
    assert_scales_equal(quantize_per_token(x).row_scale, expected)
    assert ((2688.0 / x.abs().amax(1)) != encode).sum() > 400


@both_modes
@all_dtypes
def test_signs_of_zero_are_kept(dtype, exact):
    row = unit_row([-0.0, -0.125, 0.0, 0.125], dtype)
    assert unpack_codes(quantize_per_token(row, exact=exact).codes)[0, 17:21].tolist() == [
        8,
        8,
        0,
        0,
    ]


@both_modes
@all_dtypes
def test_a_zero_row_dequantizes_to_zero(dtype, exact):
    q = quantize_per_token(torch.zeros(3, 32, dtype=dtype), exact=exact)
    assert not q.codes.any()
    assert not bits(q.block_scale).any()
    assert_scales_equal(q.row_scale, torch.full((3,), 1 / FLT_MAX if exact else 0.0))
    assert dequantize(*q).eq(0).all()


@both_modes
@all_dtypes
def test_a_block_too_small_for_a_scale_dequantizes_to_zero(dtype, exact):
    row = torch.full((1, 32), 2.0**-9, dtype=dtype)
    row[0, 0] = 2688.0
    row[0, 17] = -(2.0**-9)
    q = quantize_per_token(row, exact=exact)
    assert bits(q.block_scale)[0].tolist() == [0x7E, 0]
    codes = unpack_codes(q.codes)[0, 16:18].tolist()
    assert codes == ([7, 15] if exact else [0, 8])
    assert dequantize(*q)[0, 16:].eq(0).all()


def test_subnormal_rows():
    """Exact mode shrinks them, fast mode flushes their scale to zero."""
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.full((2, 32), 1e-39, dtype=dtype)
        x[1] *= -1
        restored = dequantize(*quantize_per_token(x))
        assert restored[0].gt(0).all()
        assert restored[1].lt(0).all()
        assert_rows_close(restored, x, 1e-39)
        assert dequantize(*quantize_per_token(x, exact=False)).eq(0).all()
    # float16's own subnormals are ordinary numbers in float32.
    x = torch.full((1, 16), 6e-8, dtype=torch.float16)
    assert_rows_close(fake_quantize_per_token(x, exact=False), x, 0.0)


@both_modes
@all_dtypes
def test_the_largest_numbers_survive(dtype, exact):
    largest = torch.finfo(dtype).max
    x = torch.full((1, 16), largest, dtype=dtype)
    x[0, 1] = -largest
    assert_rows_close(dequantize(*quantize_per_token(x, exact=exact)), x, largest * 2.0**-22)


@all_dtypes
def test_infinity(dtype):
    x = torch.ones(1, 32, dtype=dtype)
    x[0, 17] = -torch.inf
    exact, fast = quantize_per_token(x), quantize_per_token(x, exact=False)
    assert exact.row_scale.item() == 1.0
    assert dequantize(*exact)[0, 17] == -2688.0  # as in FlashInfer: the infinity disappears
    assert dequantize(*fast).isnan().all()
    assert bits(fast.block_scale)[0].tolist() == [0, 0x7F]


@both_modes
@all_dtypes
def test_nan(dtype, exact):
    row = unit_row([torch.nan, -torch.nan, -6.0], dtype)
    q = quantize_per_token(row, exact=exact)
    assert unpack_codes(q.codes)[0, 16:20].tolist() == [7, 7, 7, 15]  # both NaN look like 6
    assert q.block_scale.float()[0].tolist() == [448.0, 1.0]
    assert q.row_scale.item() == 1.0

    row[0, 16:] = torch.nan
    q = quantize_per_token(row, exact=exact)
    assert bits(q.block_scale)[0].tolist() == [0x7E, 0x7F]
    assert dequantize(*q)[0, 16:].isnan().all()
    assert dequantize(*q)[0, 0] == 2688.0

    q = quantize_per_token(torch.full_like(row, torch.nan), exact=exact)
    assert dequantize(*q).isnan().all()


@both_modes
@settings(max_examples=40, deadline=None)
@given(x=matrices(max_columns=1024), dtype=st.sampled_from(DTYPES))
def test_values_are_the_dequantized_codes(exact, x, dtype):
    q = quantize_per_token(x, exact=exact)
    values, row_scale = quantize_per_token_values(x, exact=exact, dtype=dtype)
    assert values.dtype == dtype
    expected = dequantize(q.codes, q.block_scale, 1.0, dtype)
    assert torch.equal(bits(values), bits(expected))
    assert_scales_equal(row_scale, q.row_scale)
    fake = fake_quantize_per_token(x, exact=exact)
    assert fake.dtype == x.dtype
    assert torch.equal(bits(fake), bits(dequantize(*q, dtype=x.dtype)))


@both_modes
@settings(max_examples=60, deadline=None)
@given(x=matrices(special=False, max_columns=1024))
def test_the_error_is_within_half_the_widest_step(exact, x):
    """Half the widest step is one block scale, itself at most 1/16 above block_amax / 6.

    Blocks far below their row have subnormal or zero scales, and lose at most their amax or half
    of e4m3's smallest step, whichever is more.
    """
    x64 = x.double()
    block_amax = x64.unflatten(1, (-1, 16)).abs().amax(-1)
    smallest = x64.abs().amax(1, keepdim=True) / 2688 * 2.0**-10 * 6
    bound = block_amax * (1 / 6 * (1 + 1 / 16)) * (1 + 1e-6) + smallest
    restored = dequantize(*quantize_per_token(x, exact=exact))
    assert_rows_close(restored, x, bound.repeat_interleave(16, dim=1) + 2.0**-120)


@pytest.mark.parametrize("kind", KINDS)
@both_modes
def test_a_row_does_not_depend_on_its_neighbours(kind, exact, monkeypatch):
    x = matrix(kind, 37, 320, torch.bfloat16, seed=5, decade=0)
    whole = quantize_per_token(x, exact=exact)
    values, _ = quantize_per_token_values(x, exact=exact)
    weight = quantize_weight(x)
    monkeypatch.setattr(nvfp4, "_TILE", 5 * 320 + 7)
    for one, other in zip(whole, quantize_per_token(x, exact=exact), strict=True):
        assert torch.equal(bits(one), bits(other))
    for one, other in zip(weight, quantize_weight(x), strict=True):
        assert torch.equal(bits(one), bits(other))
    assert torch.equal(values, quantize_per_token_values(x, exact=exact)[0])
    for row in (0, 17, 36):
        alone = quantize_per_token(x[row : row + 1], exact=exact)
        for one, other in zip(whole, alone, strict=True):
            assert torch.equal(bits(one[row : row + 1]), bits(other))


@both_modes
def test_strided_rows_and_untouched_inputs(exact):
    wide = matrix("normal", 64, 96, torch.float32, seed=6, decade=0)
    before = wide.clone()
    expected = quantize_per_token(wide.T.contiguous(), exact=exact)
    for one, other in zip(expected, quantize_per_token(wide.T, exact=exact), strict=True):
        assert torch.equal(bits(one), bits(other))
    quantize_per_token_values(wide, exact=exact)
    fake_quantize_per_token(wide, exact=exact)
    quantize_weight(wide)
    assert torch.equal(wide, before)


@both_modes
def test_no_rows(exact):
    x = torch.empty(0, 64, dtype=torch.bfloat16)
    q = quantize_per_token(x, exact=exact)
    assert [tuple(t.shape) for t in q] == [(0, 32), (0, 4), (0,)]
    assert quantize_per_token_values(x, exact=exact)[0].shape == (0, 64)
    assert dequantize(*q).shape == (0, 64)
    assert fake_quantize_per_token(x, exact=exact).shape == (0, 64)


def test_parameters_that_require_gradients():
    w = torch.nn.Parameter(torch.randn(4, 32))
    assert not any(t.requires_grad for t in (*quantize_weight(w), *quantize_per_token(w)))
    assert not fake_quantize_per_token(w).requires_grad


@pytest.mark.parametrize(
    "quantize", [quantize_per_token, quantize_per_token_values, fake_quantize_per_token]
)
def test_rows_that_cannot_be_quantized(quantize):
    for shape in ((4, 24), (4, 0), (64,), (2, 4, 64)):
        with pytest.raises(ValueError, match=r"\[M, K\].* multiple of 16, got \("):
            quantize(torch.zeros(shape))
    for dtype in (torch.float64, torch.int32, torch.uint8):
        with pytest.raises(TypeError, match=f"float16, bfloat16 or float32, not {dtype}"):
            quantize(torch.zeros(4, 64, dtype=dtype))


def test_values_in_an_inexact_dtype():
    with pytest.raises(TypeError, match=r"not torch.float8_e4m3fn"):
        quantize_per_token_values(torch.zeros(1, 16), dtype=torch.float8_e4m3fn)


def test_a_matmul_of_values_is_the_matmul_of_dequantized_rows():
    """Scales applied to the accumulator: what every backend computes."""
    x = matrix("blocks", 7, 256, torch.bfloat16, seed=7, decade=0)
    w = quantize_weight(matrix("normal", 9, 256, torch.bfloat16, seed=8, decade=-2))
    values, row_scale = quantize_per_token_values(x)
    weight = dequantize(w.weight, w.weight_scale, 1.0)
    actual = (values @ weight.T) * (row_scale[:, None] * w.weight_scale_2)
    xd, wd = values.double() * row_scale.double()[:, None], weight.double() * w.weight_scale_2
    bound = matmul_bound(xd, wd) + (xd @ wd.T).abs() * 2.0**-22  # and two products of scales
    assert_rows_close(actual, xd @ wd.T, bound)


# Weights


def test_a_weight_by_hand():
    w = torch.zeros(1, 48)
    w[0, :3] = torch.tensor([2688.0, -1344.0, 0.0])  # 448: 6, -3, 0
    w[0, 16:20] = torch.tensor([6.0, -0.1, -0.0, 5.0])  # 1: 6, -0, 0, 4
    q = quantize_weight(w)  # the third block has scale 1 because it is zero
    assert q.weight_scale_2.item() == 1.0
    assert q.weight_scale.float().tolist() == [[448.0, 1.0, 1.0]]
    assert unpack_codes(q.weight)[0, :3].tolist() == [7, 13, 0]
    assert unpack_codes(q.weight)[0, 16:20].tolist() == [7, 8, 0, 6]


@all_dtypes
def test_matrices_in_a_batch_are_quantized_one_by_one(dtype):
    w = torch.stack(
        [matrix("blocks", 5, 64, dtype, seed=s, decade=-s) for s in range(6)]
    ).unflatten(0, (2, 3))
    w[1, 1] = 0
    q = quantize_weight(w)
    assert (q.weight.dtype, q.weight.shape) == (torch.uint8, (2, 3, 5, 32))
    assert (q.weight_scale.dtype, q.weight_scale.shape) == (torch.float8_e4m3fn, (2, 3, 5, 4))
    assert (q.weight_scale_2.dtype, q.weight_scale_2.shape) == (torch.float32, (2, 3))
    restored = dequantize(*q)
    for i in range(2):
        for j in range(3):
            one = quantize_weight(w[i, j])
            assert one.weight_scale_2.shape == ()
            assert_codes_equal(q.weight[i, j], one.weight)
            assert_scales_equal(q.weight_scale[i, j], one.weight_scale)
            assert_scales_equal(q.weight_scale_2[i, j], one.weight_scale_2)
            assert torch.equal(restored[i, j], dequantize(*one))


def test_a_shared_scale():
    w = matrix("normal", 8, 64, torch.float32, seed=9, decade=0).unflatten(0, (2, 4))
    w[1] *= 0.01
    shared = quantize_weight(w, quantize_weight(w.flatten(0, 1)).weight_scale_2)
    both = quantize_weight(w.flatten(0, 1))
    assert shared.weight_scale_2.tolist() == [both.weight_scale_2.item()] * 2
    assert_codes_equal(shared.weight.flatten(0, 1), both.weight)
    assert_scales_equal(shared.weight_scale.flatten(0, 1), both.weight_scale)


@all_dtypes
def test_weights_of_zeros_dequantize_to_zeros(dtype):
    for w in (torch.zeros(3, 32, dtype=dtype), torch.full((3, 32), 1e-45).to(dtype)):
        q = quantize_weight(w)
        assert q.weight_scale_2.item() == 1.0
        assert dequantize(*q).eq(0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@all_dtypes
def test_weights_that_are_not_finite(value, dtype):
    w = torch.ones(2, 3, 32, dtype=dtype)
    w[1, 2, 5:7] = value
    with pytest.raises(ValueError, match=r"\(2, 3, 32\) hold 2 NaN or .* first at \(1, 2, 5\)"):
        quantize_weight(w)


def test_weights_that_cannot_be_quantized():
    for shape in ((4, 24), (4, 0), (0, 64), (64,)):
        with pytest.raises(ValueError, match=r"\[..., N, K\] with K a multiple of 16.* got \("):
            quantize_weight(torch.zeros(shape))
    with pytest.raises(TypeError, match=r"not torch.float64"):
        quantize_weight(torch.zeros(4, 64, dtype=torch.float64))
    for scale in (0.0, -1.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match="finite and positive"):
            quantize_weight(torch.ones(4, 64), scale)


# Back again


def test_scales_of_rows_of_matrices_and_of_everything():
    q = quantize_weight(torch.ones(3, 4, 32))
    assert (dequantize(q.weight, q.weight_scale, 1.0) == 2688).all()
    per_matrix = torch.tensor([1.0, 2.0, 3.0])
    per_row = torch.arange(12.0).view(3, 4)
    for scale, expected in (
        (2.0, torch.full((3, 4, 32), 2.0)),
        (torch.tensor([2.0]), torch.full((3, 4, 32), 2.0)),
        (per_matrix, per_matrix[:, None, None].expand(3, 4, 32)),
        (per_row, per_row[:, :, None].expand(3, 4, 32)),
    ):
        actual = dequantize(q.weight, q.weight_scale, scale)
        assert torch.equal(actual, expected * 2688), scale
    assert dequantize(q.weight, q.weight_scale, 1.0, torch.bfloat16).dtype == torch.bfloat16


def test_what_does_not_fit_together():
    q = quantize_weight(torch.ones(3, 4, 32))
    with pytest.raises(ValueError, match=r"\(3, 4, 1\) block scales do not fit \(3, 4, 16\)"):
        dequantize(q.weight, q.weight_scale[..., :1], 1.0)
    with pytest.raises(ValueError, match=r"global scale \(4,\) fits neither the rows \(3, 4\)"):
        dequantize(q.weight, q.weight_scale, torch.ones(4))
    with pytest.raises(TypeError, match="codes are uint8 and block scales float8_e4m3fn"):
        dequantize(q.weight, q.weight_scale.float(), 1.0)
