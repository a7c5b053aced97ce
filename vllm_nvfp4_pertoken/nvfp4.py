"""The NVFP4 format: quantize rows and weights, dequantize, pack. The reference for all backends.

Plain torch on any device, the same bits on each. No step waits for data, so everything but
``quantize_weight``, which checks its input, can be captured in a CUDA graph.

Layout
  A tensor is stored along its last dimension K (a multiple of 16) as 4-bit codes, two a byte, the
  element with even index in the low nibble; a block scale, float8_e4m3fn, for every 16 elements;
  and a float32 scale for the whole row (activations) or matrix (weights)::

      x ~ code * block_scale * row_scale            w ~ code * weight_scale * weight_scale_2

  ``code * block_scale`` has at most 6 significant bits: exact in float32, bfloat16 and float16.

Rows: two arithmetics
  FlashInfer's per-token quantizer (``nvfp4_quantize(..., per_token_activation=True)``) has two, and
  ``exact`` chooses. In float32, one rounding per operation, ``amax`` the largest magnitude:

  ==============  =====================================  =========================================
  step            ``exact=True``                         ``exact=False``
  ==============  =====================================  =========================================
  encode scale    ``e = min(2688 / amax, FLT_MAX)``,     ``e = 1 / row_scale``, 0 for row_scale 0
                  1 where that is 0
  row_scale       ``1 / e``                              ``amax * (1 / 2688)``, 0 if subnormal
  block_scale     ``e4m3(block_amax * (e * (1/6)))``     ``e4m3(e * (block_amax * (1/6)))``
  code            ``e2m1(x * min(1 / (block_scale *      ``e2m1(x * (1 / (block_scale * (1 /
                  row_scale), FLT_MAX))``                e)))``, 0 where the block scale is 0
  ==============  =====================================  =========================================

  ``exact=True`` is FlashInfer with ``FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1`` and the default
  here. ``exact=False`` is FlashInfer's default, except for its reciprocals: the GPU's
  ``rcp.approx.ftz`` is off by a unit in the last place for one value in eight and cannot be had
  elsewhere, so ours are correctly rounded (``1/6`` is the same on both). A code or block scale
  differs where that unit moves a value across a rounding boundary: measured with an H200's
  reciprocals on 1.3e8 normal bfloat16 values, one code in 4000 and one block scale in 14000.

  FlashInfer's kernels flush float32 subnormals to zero; this module keeps them. That matters in
  rows whose amax is below 2688 * 2**-126 (3.2e-35), and in elements below 2**-126. In exact mode
  the factor of a block below 1.8e-38 is cut at FLT_MAX: such blocks come out too small on both.
  float32 rows: the same formulas. (FlashInfer's float32 kernel is a coarser approximation.)

Edge cases of rows (both modes unless noted)
  * A zero row has zero scales and codes and dequantizes to 0; its row_scale is 0, in exact mode
    1 / FLT_MAX.
  * A non-zero block whose scale rounds to 0 dequantizes to 0; its codes are 6 in exact mode.
  * NaN does not take part in the maxima and becomes code +6, so **a NaN can disappear**; only a
    block of 16 NaN keeps a NaN block scale.
  * inf: with ``exact=False`` the row dequantizes to NaN. With ``exact=True`` **it disappears**:
    row_scale is 1 and the element becomes 2688.

Steps that look simplifiable and are not
  * ``2688 / amax`` is written ``torch.div(tensor, tensor)``: ``2688.0 / tensor`` is computed as a
    reciprocal times 2688, and ``tensor / 2688.0`` on CUDA as a product with 1 / 2688. Either is off
    by one unit in a quarter of all cases.
  * ``1 / e`` is not ``amax / 2688``; the order of the three factors of a block scale differs
    between the modes; rounded reciprocals are part of the definition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = [
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


@dataclass(frozen=True)
class Format:
    """What defines NVFP4. There is one instance, ``NVFP4``; nothing derives these from a dtype.

    Attributes:
        block_size: consecutive elements of a row that share a block scale.
        magnitudes: of the e2m1 codes 0 to 7. Codes 8 to 15 are their negatives, 8 is minus zero.
        ties: rounding between two codes goes to the nearest, halfway to the even code, so 0.25,
            1.25, 2.5 and 5 go down and 0.75, 1.75 and 3.5 up; beyond 6 it saturates.
        code_max: largest magnitude of a code.
        scale_max: largest block scale; the conversion to e4m3 saturates.
        scale_min: smallest block scale of a *weight*, ModelOpt's rule, e4m3's smallest subnormal.
            Block scales of rows have no floor: they may round to 0.
        zero_block_scale: block scale, and weight_scale_2, of weights that are all zero.
    """

    block_size: int = 16
    magnitudes: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    ties: str = "even code"
    code_max: float = 6.0
    scale_max: float = 448.0
    scale_min: float = 2.0**-9
    zero_block_scale: float = 1.0

    @property
    def range(self) -> float:
        """Largest ``code * block_scale``: 2688. A row's amax is mapped onto it."""
        return self.code_max * self.scale_max


NVFP4 = Format()
BLOCK_SIZE = NVFP4.block_size

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FLT_MAX = torch.finfo(torch.float32).max
_FLT_MIN = torch.finfo(torch.float32).tiny  # smallest normal
_TILE = 1 << 17  # elements; see _tiles


class QuantizedRows(NamedTuple):
    """Rows in NVFP4: ``x ~ code * block_scale * row_scale``.

    Attributes:
        codes: uint8 [M, K/2], element 2i in the low nibble of byte i.
        block_scale: float8_e4m3fn [M, K/16], linear layout.
        row_scale: float32 [M].
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    row_scale: torch.Tensor


class QuantizedWeight(NamedTuple):
    """Weights in NVFP4, as ModelOpt stores them: ``w ~ code * weight_scale * weight_scale_2``.

    Attributes:
        weight: uint8 [..., N, K/2], element 2i in the low nibble of byte i.
        weight_scale: float8_e4m3fn [..., N, K/16], linear layout.
        weight_scale_2: float32 [...], one per matrix.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor


@torch.no_grad()
def quantize_per_token(x: torch.Tensor, *, exact: bool = True) -> QuantizedRows:
    """Quantize rows, each with a scale of its own. The formulas are in the module's docstring.

    Args:
        x: float16, bfloat16 or float32 [M, K], K % 16 == 0, K > 0; M may be 0.
        exact: which of FlashInfer's two arithmetics.

    Raises:
        TypeError: the dtype is another.
        ValueError: the shape is.
    """
    rows, columns = _check_rows(x)
    codes = x.new_empty(rows, columns // 2, dtype=torch.uint8)
    block_scale = x.new_empty(rows, columns // BLOCK_SIZE, dtype=torch.float8_e4m3fn)
    row_scale = x.new_empty(rows, dtype=torch.float32)
    for tile in _tiles(x):
        grid, block_scale[tile], row_scale[tile] = _quantize_rows(x[tile], exact)
        codes[tile] = pack_codes(_encode(grid).flatten(-2))
    return QuantizedRows(codes, block_scale, row_scale)


@torch.no_grad()
def quantize_per_token_values(
    x: torch.Tensor, *, exact: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_per_token`` without the packing: what a kernel multiplies.

    Args:
        x: as for ``quantize_per_token``.
        exact: as for ``quantize_per_token``.
        dtype: of the values: float32, bfloat16 or float16, exact in each.

    Returns:
        ``code * block_scale``, [M, K] in ``dtype``, bitwise
        ``dequantize(codes, block_scale, 1.0, dtype)``; and row_scale, float32 [M].

    Raises:
        TypeError, ValueError: as ``quantize_per_token``.
    """
    rows, columns = _check_rows(x)
    _check_dtype(dtype)
    values = x.new_empty(rows, columns, dtype=dtype)
    row_scale = x.new_empty(rows, dtype=torch.float32)
    for tile in _tiles(x):
        grid, block_scale, row_scale[tile] = _quantize_rows(x[tile], exact)
        values[tile] = grid.mul_(block_scale.float().unsqueeze(-1)).flatten(-2)
    return values, row_scale


@torch.no_grad()
def quantize_static_values(
    x: torch.Tensor,
    input_scale: torch.Tensor | float,
    *,
    exact: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``quantize_per_token_values``, but with one scale for all rows, known beforehand.

    Encode scale ``e = 1 / input_scale``; the formulas for blocks and codes are the same. Elements
    beyond ``2688 * input_scale`` saturate.

    Args:
        x, exact, dtype: as for ``quantize_per_token_values``.
        input_scale: a checkpoint's, ``amax / 2688`` of calibrated activations: a number or a tensor
            with one element, positive and finite (unchecked: that would wait for the device).

    Returns:
        ``code * block_scale``, [M, K] in ``dtype``; and ``input_scale`` for every row, float32 [M].

    Raises:
        TypeError, ValueError: as ``quantize_per_token``.
    """
    rows, columns = _check_rows(x)
    _check_dtype(dtype)
    scale = _scale_tensor(input_scale, x.device).reshape(1, 1)
    encode = scale.reciprocal()
    values = x.new_empty(rows, columns, dtype=dtype)
    for tile in _tiles(x):
        blocks = x[tile].unflatten(-1, (-1, BLOCK_SIZE))
        grid, block_scale = _quantize_blocks(blocks, _block_max(blocks), encode, exact)
        values[tile] = grid.mul_(block_scale.float().unsqueeze(-1)).flatten(-2)
    return values, scale.reshape(1).expand(rows)


@torch.no_grad()
def fake_quantize_per_token(x: torch.Tensor, *, exact: bool = True) -> torch.Tensor:
    """What ``quantize_per_token`` leaves of ``x``: [M, K], rounded once more to x's dtype."""
    values, row_scale = quantize_per_token_values(x, exact=exact)
    return values.mul_(row_scale.unsqueeze(-1)).to(x.dtype)


@torch.no_grad()
def dequantize(
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor | float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``code * block_scale * global_scale``, [..., N, K] in ``dtype``.

    The first product is exact and the second rounded to float32; then the result is rounded to
    ``dtype``. (ModelOpt multiplies the two scales first: the last bit of float32 can differ.)

    Args:
        codes: uint8 [..., N, K/2], element 2i in the low nibble of byte i.
        block_scale: float8_e4m3fn [..., N, K/16].
        global_scale: a number or a tensor with one element; or [..., N], one per row (row_scale);
            or [...], one per matrix (weight_scale_2).
        dtype: of the result.

    Raises:
        TypeError: codes or block scales have another dtype.
        ValueError: shapes do not fit together.
    """
    if codes.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"codes are uint8 and block scales float8_e4m3fn, got {codes.dtype} and "
            f"{block_scale.dtype}"
        )
    half = BLOCK_SIZE // 2
    if codes.shape != (*block_scale.shape[:-1], block_scale.shape[-1] * half):
        raise ValueError(
            f"{tuple(block_scale.shape)} block scales do not fit {tuple(codes.shape)} bytes of "
            f"codes: expected one for {half} bytes in a row"
        )
    table = _pair_table(codes.device)
    values = table.index_select(0, codes.reshape(-1).int()).view(torch.float32)
    values = values.view(*block_scale.shape, BLOCK_SIZE).mul_(block_scale.float().unsqueeze(-1))
    values = values.flatten(-2)
    scale = _scale_tensor(global_scale, codes.device)
    if scale.numel() == 1:
        scale = scale.reshape(())
    elif scale.shape == codes.shape[:-1]:
        scale = scale.unsqueeze(-1)
    elif scale.shape == codes.shape[:-2]:
        scale = scale[..., None, None]
    else:
        raise ValueError(
            f"global scale {tuple(scale.shape)} fits neither the rows {tuple(codes.shape[:-1])} "
            f"nor the matrices {tuple(codes.shape[:-2])} of the codes, and is not a single one"
        )
    return values.mul_(scale).to(dtype)


@torch.no_grad()
def quantize_weight(
    w: torch.Tensor, weight_scale_2: torch.Tensor | float | None = None
) -> QuantizedWeight:
    """Quantize weight matrices by ModelOpt's rule, byte for byte ``NVFP4QTensor.quantize``.

    In float32: ``weight_scale_2 = amax / 2688``; ``weight_scale = e4m3(clamp(block_amax / (6 *
    weight_scale_2), 2**-9, 448))``, 1 for a block of zeros; ``code = e2m1(w / (weight_scale *
    weight_scale_2))``, where minus zero becomes plus zero, a small negative number minus zero.
    (ModelOpt on CUDA multiplies by 1 / 2688: its weight_scale_2 can differ in the last bit.)

    Args:
        w: float16, bfloat16 or float32 [..., N, K], K % 16 == 0, N and K > 0.
        weight_scale_2: one per matrix, [...] or anything that broadcasts to it, finite and
            positive; for matrices that must share one (q, k and v, or gate and up), the largest.
            None: from each matrix; 1 for a matrix of zeros, which dequantizes to zeros.

    Raises:
        TypeError: the dtype is another.
        ValueError: the shape is; a weight is NaN or infinite; ``weight_scale_2`` is not usable.
    """
    if w.dtype not in _FLOATS:
        raise TypeError(f"weights must be float16, bfloat16 or float32, not {w.dtype}")
    if w.ndim < 2 or not w.shape[-2] or not w.shape[-1] or w.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"weights must be [..., N, K] with K a multiple of {BLOCK_SIZE} and neither 0, "
            f"got {tuple(w.shape)}"
        )
    amax = torch.maximum(w.amax((-2, -1)), -w.amin((-2, -1))).float()
    if not amax.isfinite().all():
        bad = ~w.isfinite()
        raise ValueError(
            f"weights of shape {tuple(w.shape)} hold {int(bad.sum())} NaN or infinite values, "
            f"the first at {tuple(bad.nonzero()[0].tolist())}; NVFP4 has neither"
        )
    if weight_scale_2 is None:
        scale_2 = scale_of_weights(amax)
    else:
        scale_2 = torch.as_tensor(weight_scale_2, dtype=torch.float32, device=w.device)
        if not (scale_2.isfinite() & (scale_2 > 0)).all():
            raise ValueError(f"weight_scale_2 must be finite and positive, got {weight_scale_2}")
        scale_2 = scale_2.expand(amax.shape).clone()
    rows = w.reshape(-1, w.shape[-1])
    row_scale_2 = scale_2.unsqueeze(-1).expand(w.shape[:-1]).reshape(-1)
    codes = w.new_empty(rows.shape[0], rows.shape[1] // 2, dtype=torch.uint8)
    scale = w.new_empty(rows.shape[0], rows.shape[1] // BLOCK_SIZE, dtype=torch.float8_e4m3fn)
    for tile in _tiles(rows):
        grid, scale[tile] = _quantize_weight_rows(rows[tile], row_scale_2[tile].unsqueeze(-1))
        codes[tile] = pack_codes(_encode(grid).flatten(-2))
    return QuantizedWeight(codes.view(*w.shape[:-1], -1), scale.view(*w.shape[:-1], -1), scale_2)


def scale_of_weights(amax: torch.Tensor) -> torch.Tensor:
    """``weight_scale_2`` of weights whose largest magnitude is ``amax``: float32, any shape.

    ``amax / 2688``, and 1 for weights that are all zero. For matrices that are served as one (q, k
    and v; gate and up), ``amax`` is taken over all of them.
    """
    scale_2 = torch.div(amax, amax.new_full((), NVFP4.range))
    return scale_2.masked_fill(scale_2 == 0, NVFP4.zero_block_scale)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte: uint8 [..., K], each 0 to 15, K even, to uint8 [..., K/2].

    Element 2i goes into the low nibble of byte i, element 2i + 1 into the high one.
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_codes``: uint8 [..., K/2] to uint8 [..., K], each 0 to 15."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _check_rows(x: torch.Tensor) -> torch.Size:
    if x.dtype not in _FLOATS:
        raise TypeError(f"rows must be float16, bfloat16 or float32, not {x.dtype}")
    if x.ndim != 2 or not x.shape[1] or x.shape[1] % BLOCK_SIZE:
        raise ValueError(
            f"rows must be [M, K] with K a positive multiple of {BLOCK_SIZE}, got {tuple(x.shape)}"
        )
    return x.shape


def _scale_tensor(scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.to(device, torch.float32)
    # Filled on the device: a copy from the host cannot be captured in a CUDA graph.
    return torch.full((), scale, dtype=torch.float32, device=device)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _FLOATS:
        raise TypeError(f"values can be float16, bfloat16 or float32, not {dtype}")


def _tiles(x: torch.Tensor) -> Iterator[slice]:
    """Slices of rows to work on, one after the other; the results do not depend on them.

    On a CPU the scratch tensors of a tile stay in the cache; in one piece, most of the time goes
    into fetching fresh pages for them. Other devices get one piece, to launch few kernels.
    """
    rows, columns = x.shape
    step = max(1, _TILE // columns) if x.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _quantize_rows(x: torch.Tensor, exact: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unpacked codes as float32 [M, K/16, 16], block_scale [M, K/16], row_scale [M]."""
    blocks = x.unflatten(-1, (-1, BLOCK_SIZE))
    block_max = _block_max(blocks)
    row_max = block_max.nan_to_num(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    if exact:
        encode = torch.div(row_max.new_full((), NVFP4.range), row_max).clamp_(max=_FLT_MAX)
        encode.masked_fill_(encode == 0, 1.0)  # an infinite row
        row_scale = encode.reciprocal()
    else:
        row_scale = row_max * (1 / NVFP4.range)
        row_scale.masked_fill_(row_scale < _FLT_MIN, 0.0)  # 1 / subnormal would overflow
        encode = row_scale.reciprocal().masked_fill_(row_scale == 0, 0.0)
    return *_quantize_blocks(blocks, block_max, encode, exact), row_scale.squeeze(-1)


def _block_max(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitudes of [M, K/16, 16], float32 [M, K/16]; NaN only where there is no number."""
    size = blocks.abs().nan_to_num_(nan=-1.0, posinf=torch.inf).amax(-1).float()
    return size.masked_fill_(size < 0, torch.nan)


def _quantize_blocks(
    blocks: torch.Tensor, block_max: torch.Tensor, encode: torch.Tensor, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpacked codes as float32 and block scales, given each row's encode scale [M, 1]."""
    if exact:
        block_scale = _to_e4m3(block_max * (encode * (1 / NVFP4.code_max)))
        factor = (block_scale.float() * encode.reciprocal()).reciprocal_().clamp_(max=_FLT_MAX)
    else:
        block_scale = _to_e4m3(encode * (block_max * (1 / NVFP4.code_max)))
        stored = block_scale.float()
        factor = (stored * encode.reciprocal()).reciprocal_().masked_fill_(stored == 0, 0.0)
    return _round_to_grid(blocks.float().mul(factor.unsqueeze(-1))), block_scale


def _quantize_weight_rows(
    w: torch.Tensor, scale_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpacked codes as float32 [N, K/16, 16], weight_scale [N, K/16]; ``scale_2`` is [N, 1]."""
    blocks = w.unflatten(-1, (-1, BLOCK_SIZE))
    block_scale = torch.div(blocks.abs().amax(-1).float(), scale_2 * NVFP4.code_max)
    block_scale.masked_fill_(block_scale == 0, NVFP4.zero_block_scale)
    weight_scale = _to_e4m3(block_scale.clamp_(min=NVFP4.scale_min))
    scaled = torch.div(blocks.float(), (weight_scale.float() * scale_2).unsqueeze(-1))
    return _round_to_grid(scaled.add_(0.0)), weight_scale  # -0 + 0 is +0


def _to_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Non-negative float32 to float8_e4m3fn, nearest, ties to even, saturating; NaN is 0x7F.

    torch's conversion saturates only in newer versions (2.13 does, NaN before), and keeps NaN's
    sign bit, which x86 sets and GPUs clear.
    """
    return scale.abs().clamp_(max=NVFP4.scale_max).to(torch.float8_e4m3fn)


def _round_to_grid(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 value, ties to the even code, saturating, signs kept (zero's too), NaN to +6.

    ``x`` is float32 and is changed. The grid's step in the binade of x (1/2 below 1) is the unit in
    the last place of ``magic``, so adding it rounds as the hardware rounds sums, to even.
    """
    x = x.nan_to_num_(nan=NVFP4.code_max, posinf=NVFP4.code_max, neginf=-NVFP4.code_max)
    x = x.clamp_(-NVFP4.code_max, NVFP4.code_max)
    exponent = (x.view(torch.int32) & 0x7F800000).clamp_(min=0x3F800000)  # that of 1 at least
    magic = exponent.add_((22 << 23) + (1 << 22)).view(torch.float32)  # 1.5 * 2**22 * binade
    return (x + magic).sub_(magic).copysign_(x)


def _encode(grid: torch.Tensor) -> torch.Tensor:
    """Codes, uint8, of e2m1 values: the steps are 1/2 up to 2, 1 up to 4, 2 up to 6."""
    size = grid.abs()
    code = torch.minimum(size * 2, size + 2)
    code = torch.minimum(code, size.mul_(0.5).add_(4)).to(torch.uint8)
    return code.bitwise_or_(grid.signbit().to(torch.uint8) << 3)


def _pair_table(device: torch.device) -> torch.Tensor:
    """For each byte its two e2m1 values, float32 seen as one int64: int64 [256].

    Computed, not copied from the host, so that it can be captured in a CUDA graph.
    """
    code = unpack_codes(torch.arange(256, dtype=torch.uint8, device=device))
    index = (code & 7).float()
    size = torch.maximum(torch.maximum(index / 2, index - 2), index * 2 - 8)  # inverts _encode
    return torch.where(code > 7, -size, size).view(torch.int64)
