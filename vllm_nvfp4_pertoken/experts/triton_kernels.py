"""The Triton kernels behind `triton.py`: row quantizer, routing sort, grouped GEMM, top-k sum.

How NVFP4 gets through BF16 tensor cores
  ``code * block_scale`` has at most 6 significant bits, so it is exact in bfloat16 for weights and
  for rows; tensor cores multiply it exactly and add in fp32. Row scale and ``weight_scale_2`` are
  multiplied onto the accumulator. Only the order of sums differs from FP4 tensor cores.

Weights in memory (`triton.pack` writes it; as many bytes as in the checkpoint)
  * A 16-bit unit holds the codes of four consecutive k. Sign and magnitude bits lie so that a shift
    and a mask alone bring each code to bfloat16's bits 15 and 8:6, which reads as value * 2**-126,
    zeros and the subnormal 0.5 included. One multiplication with block_scale * 2**119 makes it
    code * block_scale * 2**-7, exactly; the 2**7 joins weight_scale_2.
  * Block scales are E5M3 without sign, exponent bias 9: every e4m3 value, subnormals too, becomes
    ``1.mmm * 2**(e - 9)``, so that bfloat16 is a shift and an addition away.
  * Rows of a gated w13: 8 gates, 8 ups, 8 gates, …: both land in the same thread's accumulators.

Order of k
  Decoding yields for every unit u four values, k = 4 * u + p. The dot products take them in the
  order (64-element group, p, u within the group); the row quantizer stores rows in that order. It
  does not depend on the tile sizes, so neither does the order in which a dot product adds up.

Triton's interpreter has neither inline assembly nor usable bfloat16: there, the same bits are
decoded by integer arithmetic and numbers are float32 that hold bfloat16 values (``COMPILED``).
"""

import triton
import triton.language as tl

__all__ = [
    "COMPILED",
    "count_kernel",
    "gemm_kernel",
    "place_kernel",
    "quantize_kernel",
    "scan_kernel",
    "sum_kernel",
]

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)

_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_FLT_MIN = tl.constexpr(1.1754943508222875e-38)


# ------------------------------------------------------------------------------- numbers


@triton.jit
def _wait(PDL: tl.constexpr):
    """Until what the kernel before this one wrote is there; the next one may start to launch."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to nearest even; in the interpreter, float32 that holds such a value."""
    if COMPILED:
        result = x.to(DTYPE)
    elif DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        result = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    elif DTYPE == tl.float16:
        result = x.to(tl.float16).to(tl.float32)
    else:
        result = x
    return result


@triton.jit
def _round_on_steps(x, LOWEST: tl.constexpr, MAGIC: tl.constexpr):
    """To the nearest multiple of the step in the binade of x, ties to even.

    Adding 1.5 * 2**23 steps makes the hardware round there. LOWEST: the exponent bits of the binade
    below which the step stays the same; MAGIC: what turns exponent bits into that number's.
    """
    bits = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, LOWEST) + MAGIC
    magic = bits.to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def _e4m3(x):
    """Non-negative float32 to the nearest e4m3 value as float32; saturates at 448, keeps NaN."""
    x = tl.where(x == x, tl.minimum(x, 448.0), x)
    return _round_on_steps(x, 121 << 23, (20 << 23) + (1 << 22))


@triton.jit
def _e2m1(x):
    """float32 to the nearest e2m1 value as float32; saturates at 6, signed zeros, NaN to 6."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -6.0), 6.0), 6.0)
    rounded = _round_on_steps(x, 127 << 23, (22 << 23) + (1 << 22))
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    magnitude = rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (magnitude | sign).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(x):
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


# ------------------------------------------------------------------------------- rows


@triton.jit
def quantize_kernel(
    x_ptr,  # [R, K]
    values_ptr,  # bfloat16 [R, PADDED]: code * block_scale, in the GEMM's order of k
    row_scale_ptr,  # float32 [R]
    K: tl.constexpr,
    PADDED: tl.constexpr,  # K rounded up to a multiple of 64; zeros beyond K
    GROUPS: tl.constexpr,  # PADDED / 64 rounded up to a power of two
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program; the formulas, in this order, are those of nvfp4.py."""
    _wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, GROUPS * 64)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    x = tl.reshape(x, (GROUPS * 4, 16))
    block_max = tl.max(tl.where(x == x, tl.abs(x), -1.0), 1)
    row_max = tl.maximum(tl.max(block_max, 0), 0.0)
    block_max = tl.where(block_max < 0.0, float("nan"), block_max)
    if EXACT:
        encode = tl.math.div_rn(tl.full(row_max.shape, 2688.0, tl.float32), row_max)
        encode = tl.minimum(encode, _FLT_MAX)
        encode = tl.where(encode == 0.0, 1.0, encode)  # an infinite row
        row_scale = _reciprocal(encode)
        block_scale = _e4m3(block_max * (encode * (1.0 / 6.0)))
        factor = _reciprocal(block_scale * row_scale)
        factor = tl.where(factor == factor, tl.minimum(factor, _FLT_MAX), factor)
    else:
        row_scale = row_max * (1.0 / 2688.0)
        row_scale = tl.where(row_scale < _FLT_MIN, 0.0, row_scale)
        encode = tl.where(row_scale == 0.0, 0.0, _reciprocal(row_scale))
        block_scale = _e4m3(encode * (block_max * (1.0 / 6.0)))
        factor = _reciprocal(block_scale * _reciprocal(encode))
        factor = tl.where(block_scale == 0.0, 0.0, factor)
    values = _e2m1(x * factor[:, None]) * block_scale[:, None]
    values = _round(values, tl.bfloat16)  # exact
    values = tl.permute(tl.reshape(values, (GROUPS, 16, 4)), (0, 2, 1))
    tl.store(values_ptr + row * PADDED + k, tl.reshape(values, (GROUPS * 64,)), mask=k < PADDED)
    tl.store(row_scale_ptr + row, row_scale)


# ------------------------------------------------------------------------------- routing


@triton.jit
def _local_ids(ids_ptr, map_ptr, entry, numel, EXPERTS: tl.constexpr, MAPPED: tl.constexpr):
    """The local expert of each entry (token x slot); EXPERTS for those that count nothing here."""
    expert = tl.load(ids_ptr + entry, mask=entry < numel, other=-1).to(tl.int32)
    if MAPPED:
        expert = tl.where(
            expert >= 0, tl.load(map_ptr + expert, mask=expert >= 0, other=-1).to(tl.int32), -1
        )
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


# Sizes that depend on the batch are not specialized: no batch may make the engine compile.
@triton.jit(do_not_specialize=["numel"])
def count_kernel(
    ids_ptr, map_ptr, counts_ptr, numel,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """counts[c, e]: how many entries of chunk c go to expert e. int32 [chunks, BINS]."""
    _wait(PDL)
    chunk = tl.program_id(0)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _local_ids(ids_ptr, map_ptr, entry, numel, EXPERTS, MAPPED)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + chunk * BINS + bins, tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(
    counts_ptr, totals_ptr, chunks, BINS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """In place: counts[c, e] of all chunks before c; and totals[e]. WIDTH experts per program."""
    _wait(PDL)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, chunks, STEP):
        chunk = start + tl.arange(0, STEP)
        at = counts_ptr + chunk[:, None] * BINS + column[None, :]
        mask = (chunk < chunks)[:, None] & (column < BINS)[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + column, total, mask=column < BINS)


@triton.jit
def _write_blocks(table_ptr, blocks, total, first, program, programs, CHUNK, BM: tl.constexpr):
    """The table of a GEMM with BM rows per block: int32 [blocks, 3], (expert, first row, end)."""
    expert = tl.arange(0, total.shape[0])
    count = (total + (BM - 1)) // BM
    last = tl.cumsum(count, 0)
    for i in range(program, tl.max(count, 0), programs):
        at = table_ptr + (last - count + i) * 3
        mask = i < count
        tl.store(at, expert, mask=mask)
        tl.store(at + 1, first + i * BM, mask=mask)
        tl.store(at + 2, first + total, mask=mask)
    block = program * CHUNK + tl.arange(0, CHUNK)
    unused = (block >= tl.sum(count, 0)) & (block < blocks)
    tl.store(table_ptr + block * 3, -1, mask=unused)


@triton.jit(do_not_specialize=["blocks1", "blocks2", "numel", "chunks"])
def place_kernel(
    ids_ptr, map_ptr,
    counts_ptr, totals_ptr,  # from scan_kernel; not read unless SCANNED
    sorted_ptr,  # int32 [numel]: entries by expert, in their order
    table1_ptr, table2_ptr, blocks1, blocks2, numel, chunks,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr,
    BM1: tl.constexpr, BM2: tl.constexpr, MAPPED: tl.constexpr, SCANNED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A stable counting sort, one program per chunk; each also writes its share of the tables."""
    _wait(PDL)
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if SCANNED:
        before = tl.load(counts_ptr + program * BINS + bins)
        total = tl.load(totals_ptr + bins)
    else:
        before = tl.zeros((BINS,), tl.int32)
        total = tl.zeros((BINS,), tl.int32)
        for c in range(chunks):
            other = c * CHUNK + tl.arange(0, CHUNK)
            expert = _local_ids(ids_ptr, map_ptr, other, numel, EXPERTS, MAPPED)
            counts = tl.histogram(expert, BINS)
            before += tl.where(c < program, counts, 0)
            total += counts
    total = tl.where(bins < EXPERTS, total, 0)
    first = tl.cumsum(total, 0) - total
    entry = program * CHUNK + tl.arange(0, CHUNK)
    expert = _local_ids(ids_ptr, map_ptr, entry, numel, EXPERTS, MAPPED)
    rank = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, CHUNK, PIECE):
        other = program * CHUNK + start + tl.arange(0, PIECE)
        same = _local_ids(ids_ptr, map_ptr, other, numel, EXPERTS, MAPPED)
        earlier = (same[None, :] == expert[:, None]) & (other[None, :] < entry[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    position = tl.gather(first + before, expert, 0) + rank
    tl.store(sorted_ptr + position, entry, mask=expert < EXPERTS)
    programs = tl.num_programs(0)
    _write_blocks(table1_ptr, blocks1, total, first, program, programs, CHUNK, BM1)
    if BM2 != BM1:
        _write_blocks(table2_ptr, blocks2, total, first, program, programs, CHUNK, BM2)


# ------------------------------------------------------------------------------- weights

# Two units of four codes, and the bfloat16 factor of each; see `triton.UNIT` for the bits.
# x * y + -0 is the product, sign of zero included; bfloat16 has an fma before sm_90, but no mul.
_DECODE = tl.constexpr("""{
.reg .b32 p0, p1, p2, p3, u, v, z;
mov.b32 z, 0x80008000;
and.b32 p0, $4, 0x81C081C0;
shl.b32 u, $4, 3;
and.b32 p1, u, 0x81C081C0;
shl.b32 u, $4, 6;
shl.b32 v, $4, 2;
and.b32 u, u, 0x01C001C0;
lop3.b32 p2, v, 0x80008000, u, 0xEA;
shr.b32 u, $4, 3;
shl.b32 v, $4, 1;
and.b32 u, u, 0x01C001C0;
lop3.b32 p3, v, 0x80008000, u, 0xEA;
fma.rn.bf16x2 $0, p0, $5, z;
fma.rn.bf16x2 $1, p1, $5, z;
fma.rn.bf16x2 $2, p2, $5, z;
fma.rn.bf16x2 $3, p3, $5, z;
}""")
# Four E5M3 scales to bfloat16, times 2**119.
_WIDEN = tl.constexpr("""{
.reg .b32 t0, t1;
prmt.b32 t0, $2, 0, 0x4140;
prmt.b32 t1, $2, 0, 0x4342;
mad.lo.u32 $0, t0, 16, 0x76807680;
mad.lo.u32 $1, t1, 16, 0x76807680;
}""")


@triton.jit
def _code_value(unit, SIGN: tl.constexpr, MAGNITUDE: tl.constexpr):
    """The e2m1 value, float32, of the code at these bits of a unit."""
    code = (unit >> MAGNITUDE) & 7
    size = tl.where(code < 4, code * 0.5, tl.where(code < 6, code - 2.0, code * 2.0 - 8.0))
    return tl.where((unit >> SIGN) & 1 != 0, -size, size)


@triton.jit
def _decode(units, scale, BN: tl.constexpr, BK: tl.constexpr):
    """Packed units int16 [BN, BK/4] and E5M3 scales uint8 [BN, BK/16] to values [BN, BK].

    The values are code * block_scale * 2**-7.
    """
    if COMPILED:
        wide = tl.inline_asm_elementwise(
            _WIDEN, "=r,=r,r", [scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        biased = scale.to(tl.int32)
        wide = ((biased << 20) + (111 << 23)).to(tl.float32, bitcast=True)  # block_scale * 2**-7
    wide = tl.broadcast_to(wide[:, :, None], (BN, BK // 16, 4))
    wide = tl.reshape(wide, (BN, BK // 4))
    if COMPILED:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _DECODE, "=r,=r,=r,=r,r,r", [units, wide],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        unit = units.to(tl.int32) & 0xFFFF
        w0 = _code_value(unit, 15, 6) * wide
        w1 = _code_value(unit, 12, 3) * wide
        w2 = _code_value(unit, 13, 0) * wide
        w3 = _code_value(unit, 14, 9) * wide
    # [BN, BK/4, 4], the last index p; then in the order of k. Registers are renamed, not moved.
    w = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    w = tl.permute(tl.reshape(w, (BN, BK // 64, 16, 4)), (0, 1, 3, 2))
    return tl.reshape(w, (BN, BK))


# ------------------------------------------------------------------------------- activations


@triton.jit
def _exp(x):
    """e ** x as reference.py spells it out, so that FC2's rows get the same codes."""
    x = tl.minimum(tl.maximum(x, -87.0), 89.0)
    magic = x * 1.4426950408889634 + 12582912.0
    n = magic - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    q = r * 1.3814433e-3 + 8.3687967e-3
    q = q * r + 4.1668396e-2
    q = q * r + 1.6666520e-1
    q = q * r + 4.9999994e-1
    power = (magic.to(tl.int32, bitcast=True) - (0x4B400000 - 127)) << 23
    return (q * (r * r) + r + 1.0) * power.to(tl.float32, bitcast=True)


@triton.jit
def _normal_cdf(x):
    u = _reciprocal(tl.abs(x) * 0.35 + 1.0)
    p = u * -2.9145669e-2 + 1.4397052e-1
    p = p * u + -2.5571203e-1
    p = p * u + 1.5917183e-1
    p = p * u + -2.3108376e-2
    p = p * u + 1.0550745e-1
    p = p * u + 1.1983299e-1
    p = p * u + 1.3986185e-1
    p = p * u + 1.3962141e-1
    tail = p * u * _exp(x * x * -0.5)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def _activation(x, alpha, FUNCTION: tl.constexpr):
    if FUNCTION == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # keeps NaN
        result = positive * positive
    elif FUNCTION == "gelu":
        result = x * _normal_cdf(x)
    else:
        if FUNCTION == "gelu_tanh":
            z = x * (x * x * 0.044715 + 1.0) * 1.5957691216057308
        else:
            z = x * alpha
        result = tl.math.div_rn(x, _exp(-z) + 1.0)
    return result


@triton.jit
def _clamp_max(x, limit):
    return tl.where(x > limit, limit, x)  # keeps NaN


# ------------------------------------------------------------------------------- GEMM


@triton.jit
def _tile(
    values_ptr, row_scale_ptr, w_ptr, scale_ptr, scale_2_ptr, bias_ptr, out_ptr, sorted_ptr,
    expert, start, end, pn, alpha, beta, limit,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SORTED: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FUNCTION: tl.constexpr, LIMITED: tl.constexpr, BIASED: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of one expert times BN of its columns."""
    PADDED: tl.constexpr = (K + 63) // 64 * 64
    UNITS: tl.constexpr = K // 4
    BLOCKS: tl.constexpr = K // 16
    slot = start + tl.arange(0, BM)
    live = slot < end
    entry = tl.load(sorted_ptr + slot, mask=live, other=0) if SORTED else slot
    row = tl.where(live, entry // TOP_K if FIRST else slot, 0).to(tl.int64)

    n = pn * BN + tl.arange(0, BN)
    # A column beyond N computes the last one again and is not stored.
    column = tl.minimum(n, N - 1) if N % BN else n
    unit = tl.arange(0, BK // 4)
    block = tl.arange(0, BK // 16)
    k = tl.arange(0, BK)
    w_at = w_ptr + expert * (N * UNITS) + column[:, None] * UNITS + unit[None, :]
    scale_at = scale_ptr + expert * (N * BLOCKS) + column[:, None] * BLOCKS + block[None, :]
    value_at = values_ptr + row[None, :] * PADDED + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for k0 in range(0, PADDED, BK):
        if K % BK:
            units = tl.load(w_at, mask=(unit < UNITS - k0 // 4)[None, :], other=0)
            scale = tl.load(scale_at, mask=(block < BLOCKS - k0 // 16)[None, :], other=0)
            values = tl.load(value_at, mask=(k < PADDED - k0)[:, None], other=0.0)
        else:
            units = tl.load(w_at)
            scale = tl.load(scale_at)
            values = tl.load(value_at)
        acc = tl.dot(_decode(units, scale, BN, BK), values, acc, input_precision="ieee")
        w_at += BK // 4
        scale_at += BK // 16
        value_at += BK

    row_scale = tl.load(row_scale_ptr + row, mask=live, other=0.0)
    if FIRST and GATED:
        pairs = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        gate = tl.reshape(gate, (BN // 2, BM))
        up = tl.reshape(up, (BN // 2, BM))
        n = pn * (BN // 2) + tl.arange(0, BN // 2)
        inside = n < N // 2
        gate_scale = tl.load(scale_2_ptr + expert * 2) * 128.0
        up_scale = tl.load(scale_2_ptr + expert * 2 + 1) * 128.0
        gate = gate * (row_scale * gate_scale)[None, :]
        up = up * (row_scale * up_scale)[None, :]
        if BIASED:
            at = bias_ptr + expert * N + (n * 2 if INTERLEAVED else n)
            step: tl.constexpr = 1 if INTERLEAVED else N // 2
            gate += tl.load(at, mask=inside, other=0.0)[:, None]
            up += tl.load(at + step, mask=inside, other=0.0)[:, None]
        if LIMITED:
            gate = _clamp_max(gate, limit)
            up = -_clamp_max(-_clamp_max(up, limit), limit)
        result = _activation(gate, alpha, FUNCTION) * (up + beta)
    else:
        inside = n < N
        result = acc * (row_scale * (tl.load(scale_2_ptr + expert) * 128.0))[None, :]
        if BIASED:
            result += tl.load(bias_ptr + expert * N + n, mask=inside, other=0.0)[:, None]
        if FIRST:
            result = _activation(result, alpha, FUNCTION)
    WIDTH: tl.constexpr = N // 2 if FIRST and GATED else N
    target = (slot if FIRST else entry).to(tl.int64)
    tl.store(
        out_ptr + target[None, :] * WIDTH + n[:, None],
        _round(result, DTYPE),
        mask=live[None, :] & inside[:, None],
    )


@triton.jit(do_not_specialize=["blocks"])
def gemm_kernel(
    values_ptr,  # [rows, PADDED] from quantize_kernel: of tokens (FC1) or of sorted slots (FC2)
    row_scale_ptr,
    w_ptr,  # int16 [E, N, K/4]
    scale_ptr,  # uint8 [E, N, K/16]
    scale_2_ptr,  # float32 [E, 2] for a gated FC1, else [E]
    bias_ptr,  # float32 [E, N]
    out_ptr,  # FC1: [slots, N/2 or N]; FC2: [entries, N]
    sorted_ptr, table_ptr,  # from place_kernel, when SORTED
    ids_ptr, map_ptr,  # otherwise: every entry is a block of its own
    alpha, beta, limit, blocks,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    SORTED: tl.constexpr, MAPPED: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FUNCTION: tl.constexpr, LIMITED: tl.constexpr, BIASED: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grouped GEMM: for each block of rows that share an expert, a tile of BN columns.

    Columns vary fastest, so that the blocks in flight share few experts' weights.
    """
    _wait(PDL)
    columns: tl.constexpr = (N + BN - 1) // BN
    pm = tl.program_id(0) // columns
    pn = tl.program_id(0) % columns
    if SORTED:
        expert = tl.load(table_ptr + pm * 3).to(tl.int64)
        start = tl.load(table_ptr + pm * 3 + 1)
        end = tl.load(table_ptr + pm * 3 + 2)
    else:
        expert = tl.load(ids_ptr + pm).to(tl.int64)
        if MAPPED:
            if expert >= 0:
                expert = tl.load(map_ptr + expert).to(tl.int64)
        start = pm
        end = pm + 1
    if (expert >= 0) & (expert < EXPERTS):
        # fmt: off
        if HALF:
            if end - start <= BM // 2:
                _tile(
                    values_ptr, row_scale_ptr, w_ptr, scale_ptr, scale_2_ptr, bias_ptr, out_ptr,
                    sorted_ptr, expert, start, end, pn, alpha, beta, limit,
                    N, K, TOP_K, SORTED, FIRST, GATED, INTERLEAVED, FUNCTION, LIMITED, BIASED,
                    DTYPE, BM // 2, BN, BK,
                )
            else:
                _tile(
                    values_ptr, row_scale_ptr, w_ptr, scale_ptr, scale_2_ptr, bias_ptr, out_ptr,
                    sorted_ptr, expert, start, end, pn, alpha, beta, limit,
                    N, K, TOP_K, SORTED, FIRST, GATED, INTERLEAVED, FUNCTION, LIMITED, BIASED,
                    DTYPE, BM, BN, BK,
                )
        else:
            _tile(
                values_ptr, row_scale_ptr, w_ptr, scale_ptr, scale_2_ptr, bias_ptr, out_ptr,
                sorted_ptr, expert, start, end, pn, alpha, beta, limit,
                N, K, TOP_K, SORTED, FIRST, GATED, INTERLEAVED, FUNCTION, LIMITED, BIASED,
                DTYPE, BM, BN, BK,
            )
        # fmt: on


# ------------------------------------------------------------------------------- top-k


@triton.jit
def sum_kernel(
    expanded_ptr,  # [tokens * TOP_K, H]; rows of entries that count nothing hold anything
    weights_ptr,  # float32 [tokens, TOP_K]
    ids_ptr, map_ptr,
    out_ptr,  # [tokens, H]
    H: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BH: tl.constexpr,
    WEIGHTED: tl.constexpr, MAPPED: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The experts of a token, weighted and added in fp32 in the order of its slots."""
    _wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for i in tl.static_range(TOP_K):
        entry = token * TOP_K + i
        expert = tl.load(ids_ptr + entry).to(tl.int32)
        if MAPPED:
            expert = tl.load(map_ptr + expert, mask=expert >= 0, other=-1).to(tl.int32)
        live = tl.where((expert >= 0) & (expert < EXPERTS), h, H) < H
        part = tl.load(expanded_ptr + entry * H + h, mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weights_ptr + entry)
        # Not a product with 0: the weight of an expert elsewhere may be NaN.
        total += tl.where(live, part, 0.0)
    tl.store(out_ptr + token * H + h, _round(total, DTYPE), mask=h < H)
