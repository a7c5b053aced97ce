"""The NVFP4 per-token MoE layer on GPUs without FP4: our Triton kernels behind `moe_forward`.

Same function as `reference.moe_forward`, on weights that `pack` has re-encoded. Codes, scales and
activations are computed by the same formulas; only the order of the sums inside dot products is the
tensor cores' own. So results agree with the reference within that, not in their bits.

What is guaranteed in bits: two runs give the same, and with one `Config` for all batches
(``BATCH_INVARIANT``) a row's result does not depend on the rows beside it.
"""

from dataclasses import dataclass

import torch

from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights
from vllm_nvfp4_pertoken.experts.triton_configs import Config, config_for, limits_for
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = [
    "UNIT",
    "available",
    "batch_sizes",
    "moe_forward",
    "pack",
    "quantize_rows",
    "unpack",
    "warm_up",
]

# Where a 16-bit unit keeps its four codes: (bit of the sign, lowest bit of the magnitude).
UNIT = ((15, 6), (12, 3), (13, 0), (14, 9))
_E5M3_BIAS = 9
_CHUNK = 256  # entries per program of the sort
_UNSCANNED = 8  # up to so many chunks, every program counts all of them itself


def available() -> tuple[bool, str]:
    """Whether the kernels can run here, a GPU or TRITON_INTERPRET=1; on what, or why not."""
    try:
        import triton
    except ImportError as error:
        return False, f"triton cannot be imported ({error})"
    if triton.knobs.runtime.interpret:
        return True, "Triton's interpreter: for tests, thousands of times slower than a GPU"
    if not torch.cuda.is_available():
        return False, "there is no GPU that torch can use"
    if torch.version.hip is not None:
        return False, "the kernels have inline PTX, and this GPU is not NVIDIA's"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return False, f"compute capability 8.0 or newer is needed, this GPU has {capability}"
    return True, f"Triton {triton.__version__} on {torch.cuda.get_device_name()}"


def pack(
    weights: ExpertWeights, activation: Activation, *, out: ExpertWeights | None = None
) -> ExpertWeights:
    """The same number of bytes, re-encoded for `triton_kernels`; shapes and dtypes do not change.

    Block scales become E5M3, so their tensors, float8_e4m3fn by name, hold other numbers. Blocks
    whose scale is zero get zero codes and the smallest scale. Second scales stay as they are;
    biases become float32.

    Args:
        weights: in checkpoint layout. Block scales are neither negative nor NaN.
        activation: tells how w13's rows are arranged.
        out: where to put the result; may be ``weights``: then one expert at a time is copied.
    """
    return _rearrange(weights, activation, out, _encode)


def unpack(
    weights: ExpertWeights, activation: Activation, *, out: ExpertWeights | None = None
) -> ExpertWeights:
    """The inverse of `pack`, except that blocks of scale zero come back as zeros of scale 2**-9."""
    return _rearrange(weights, activation, out, _decode, inverse=True)


def _rearrange(weights, activation, out, recode, inverse=False):
    if out is None:
        out = weights._replace(
            **{
                name: torch.empty_like(getattr(weights, name))
                for name in ("w13", "w13_scale", "w2", "w2_scale")
            }
        )
    orders = (_row_order(weights.w13.shape[1], activation, weights.w13.device), None)
    for name, order in zip(("w13", "w2"), orders, strict=True):
        for expert in range(weights.w13.shape[0]):
            codes = getattr(weights, name)[expert]
            scale = getattr(weights, f"{name}_scale")[expert].view(torch.uint8)
            if order is not None and not inverse:
                codes, scale = codes[order], scale[order]
            codes, scale = recode(codes, scale)
            target = getattr(out, name)[expert]
            target_scale = getattr(out, f"{name}_scale")[expert].view(torch.uint8)
            if order is not None and inverse:
                target[order], target_scale[order] = codes, scale
            else:
                target.copy_(codes)
                target_scale.copy_(scale)
    biases = (None if b is None else b.float() for b in (weights.w13_bias, weights.w2_bias))
    return ExpertWeights(*out[:6], *biases)


def _row_order(rows: int, activation: Activation, device: torch.device) -> torch.Tensor | None:
    """Which checkpoint row each packed row of w13 is: 8 gates, 8 ups, 8 gates, …"""
    if not activation.is_gated:
        return None
    order = torch.arange(rows, device=device)
    gate_up = order.view(-1, 2).T if activation.is_interleaved else order.view(2, -1)
    return gate_up.reshape(2, -1, 8).transpose(0, 1).flatten()


def _encode(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [N, K/2] and e4m3 bytes [N, K/16] of the checkpoint to units and E5M3, as bytes."""
    value = scale.view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(value)  # value = mantissa * 2**exponent, mantissa in [0.5, 1)
    e5m3 = (exponent + (_E5M3_BIAS - 1)) * 8 + (mantissa * 16 - 8).int()
    e5m3 = torch.where(value > 0, e5m3, 0).to(torch.uint8)
    codes = codes * (value > 0).repeat_interleave(BLOCK_SIZE // 2, dim=-1)
    pair = codes.int()
    low, high = pair[:, ::2], pair[:, 1::2]
    unit = torch.zeros_like(low)
    for code, (sign, magnitude) in zip((low & 15, low >> 4, high & 15, high >> 4), UNIT):  # noqa: B905
        unit |= (code >> 3) << sign | (code & 7) << magnitude
    return torch.stack((unit & 255, unit >> 8), dim=-1).flatten(1).to(torch.uint8), e5m3


def _decode(units: torch.Tensor, e5m3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pair = units.int()
    unit = pair[:, ::2] | pair[:, 1::2] << 8
    c0, c1, c2, c3 = ((unit >> sign & 1) << 3 | unit >> magnitude & 7 for sign, magnitude in UNIT)
    codes = torch.stack((c0 | c1 << 4, c2 | c3 << 4), dim=-1).flatten(1).to(torch.uint8)
    biased = e5m3.int()
    value = torch.ldexp(1 + (biased & 7) / 8, (biased >> 3) - _E5M3_BIAS)
    return codes, value.to(torch.float8_e4m3fn).view(torch.uint8)


def quantize_rows(x: torch.Tensor, *, exact: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """`nvfp4.quantize_per_token_values`, bitwise, in the order of k that the GEMM takes.

    Args:
        x: [M, K], bfloat16, float16 or float32, contiguous, K a multiple of 16.
        exact: which of the two arithmetics of nvfp4.py.

    Returns:
        values, bfloat16 [M, K rounded up to a multiple of 64], zero beyond K: element
        64 * g + 16 * p + u is ``code * block_scale`` of k = 64 * g + 4 * u + p; and row_scale,
        float32 [M].
    """
    from vllm_nvfp4_pertoken.experts import triton_kernels as kernels

    rows, k = x.shape
    padded = -(-k // 64) * 64
    values = x.new_empty(rows, padded, dtype=torch.bfloat16)
    row_scale = x.new_empty(rows, dtype=torch.float32)
    if not rows:
        return values, row_scale
    groups = 1 << (padded // 64 - 1).bit_length()
    target, pdl = _numbers(values), _pdl(x)
    kernels.quantize_kernel[(rows,)](
        _numbers(x), target, row_scale, k, padded, groups, exact, pdl,
        num_warps=max(1, min(8, groups // 8)), enable_fp_fusion=False, **_launch(pdl),
    )  # fmt: skip
    return values if target is values else values.copy_(target), row_scale


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """``x``; for Triton's interpreter, which cannot do bfloat16, as float32."""
    from vllm_nvfp4_pertoken.experts import triton_kernels as kernels

    return x if kernels.COMPILED else x.float()


def moe_forward(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    configs: tuple[Config, Config] | None = None,
) -> torch.Tensor:
    """`reference.moe_forward` for weights from `pack`, on a GPU (or in Triton's interpreter).

    Args:
        configs: for FC1 and FC2; None for those of the table for this device and these sizes.
    """
    _check(hidden_states, topk_weights, topk_ids, weights, activation, apply_router_weight_on_input)
    if not topk_ids.numel():
        return torch.zeros_like(hidden_states)
    experts = weights.w13.shape[0]
    if configs is None:
        share = topk_ids.numel() / experts
        first, second = _gemm_sizes(weights)
        device = hidden_states.device
        configs = config_for(device, share, *first), config_for(device, share, *second)
    topk_ids = topk_ids.contiguous()
    route = _sort(topk_ids, expert_map, experts, configs, _pdl(hidden_states))
    inner = _first(hidden_states.contiguous(), weights, activation, route, configs[0])
    expanded = _second(inner, weights, activation, route, configs[1])
    weigh = None if apply_router_weight_on_input else topk_weights.float().contiguous()
    return _sum(expanded, weigh, route, experts)


def _gemm_sizes(weights: ExpertWeights) -> tuple[tuple[int, int], tuple[int, int]]:
    """(n, k) of FC1 and of FC2."""
    w13, w2 = weights.w13, weights.w2
    return (w13.shape[1], w13.shape[2] * 2), (w2.shape[1], w2.shape[2] * 2)


def batch_sizes(weights: ExpertWeights, top_k: int) -> list[int]:
    """Numbers of tokens that together launch every kernel which any number of tokens launches.

    Both sides of each point where `moe_forward` changes its mind.
    """
    experts, device = weights.w13.shape[0], weights.w13.device
    entries = [experts // 4, _CHUNK * _UNSCANNED]  # sorted or not, scanned or not: see _sort
    for n, k in _gemm_sizes(weights):
        entries += [int(limit * experts) for limit in limits_for(device, n, k)]
    sizes = {e // top_k for e in entries} | {e // top_k + 1 for e in entries}
    return sorted(sizes - {0})


def warm_up(
    weights: ExpertWeights,
    activation: Activation,
    top_k: int,
    dtype: torch.dtype,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Compile everything that `moe_forward` may need for these weights, so that no request waits.

    Args:
        weights: from `pack`; what they hold does not matter.
        activation, expert_map: as for `moe_forward`.
        top_k: of the router.
        dtype: of the hidden states.
    """
    experts = weights.w13.shape[0] if expert_map is None else expert_map.shape[0]
    for tokens in batch_sizes(weights, top_k):
        x = torch.zeros(tokens, weights.w2.shape[1], dtype=dtype, device=weights.w13.device)
        ids = torch.arange(tokens * top_k, dtype=torch.int32, device=x.device) % experts
        ids = ids.view(tokens, top_k)
        moe_forward(x, torch.ones_like(ids), ids, weights, activation, expert_map=expert_map)


def _first(x, weights, activation, route, config) -> torch.Tensor:
    """FC1 and the activation: [tokens, H] -> [slots, I], a slot being a place in `_Route`."""
    values, row_scale = quantize_rows(x)
    inner = x.new_empty(route.ids.numel(), weights.w2.shape[2] * 2)
    _gemm(
        values, row_scale, weights.w13, weights.w13_scale, weights.w13_scale_2, weights.w13_bias,
        inner, route, 0, config, activation, x.shape[1],
    )  # fmt: skip
    return inner


def _second(inner, weights, activation, route, config) -> torch.Tensor:
    """FC2: [slots, I] -> [entries, H]. Rows of entries that count nothing here stay unwritten."""
    values, row_scale = quantize_rows(inner)
    expanded = inner.new_empty(inner.shape[0], weights.w2.shape[1])
    _gemm(
        values, row_scale, weights.w2, weights.w2_scale, weights.w2_scale_2, weights.w2_bias,
        expanded, route, 1, config, activation, inner.shape[1],
    )  # fmt: skip
    return expanded


def _sum(expanded, topk_weights, route, experts) -> torch.Tensor:
    """[entries, H] -> [tokens, H]."""
    from vllm_nvfp4_pertoken.experts import triton_kernels as kernels

    tokens, top_k = route.ids.shape
    hidden = expanded.shape[1]
    out = expanded.new_empty(tokens, hidden)
    source, target = _numbers(expanded), _numbers(out)
    block = min(1024, 1 << (hidden - 1).bit_length())
    pdl = _pdl(expanded)
    kernels.sum_kernel[(tokens, -(-hidden // block))](
        source, topk_weights, route.ids, route.expert_map, target,
        hidden, top_k, experts, block, topk_weights is not None, route.expert_map is not None,
        _triton_dtype(out.dtype), pdl, num_warps=4, enable_fp_fusion=False, **_launch(pdl),
    )  # fmt: skip
    return target if target is out else out.copy_(target)


@dataclass
class _Route:
    """Which rows go where: as `place_kernel` sorted them, or unsorted where `table` is None."""

    ids: torch.Tensor
    expert_map: torch.Tensor | None
    entries: torch.Tensor | None
    tables: tuple[torch.Tensor, torch.Tensor] | None
    blocks: tuple[int, int]


def _sort(topk_ids, expert_map, experts, configs, pdl) -> _Route:
    from vllm_nvfp4_pertoken.experts import triton_kernels as kernels

    numel = topk_ids.numel()
    bm1, bm2 = configs[0].bm, configs[1].bm
    if numel * 4 <= experts:
        # So few rows that hardly two share an expert: every row is a block.
        return _Route(topk_ids, expert_map, None, None, (numel, numel))
    bins = 1 << experts.bit_length()  # at least one more than experts
    chunks = -(-numel // _CHUNK)
    # Every expert can have one block that is not full.
    blocks1, blocks2 = (min(numel, experts + numel // bm) for bm in (bm1, bm2))
    scanned = chunks > _UNSCANNED
    # One buffer: entries, counts, totals, tables. Each starts at 16 bytes, because Triton compiles
    # anew for a pointer that does not.
    sizes = [numel, chunks * bins if scanned else 0, bins if scanned else 0, 3 * blocks1]
    sizes = [-(-size // 4) * 4 for size in (*sizes, 3 * blocks2 if bm1 != bm2 else 0)]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=topk_ids.device)
    entries, counts, totals, table1, table2 = buffer.split(sizes)
    mapped = expert_map is not None
    launch = _launch(pdl)
    if scanned:
        kernels.count_kernel[(chunks,)](
            topk_ids, expert_map, counts, numel, experts, bins, _CHUNK, mapped, pdl, **launch
        )
        width = 4
        step = min(256, 1 << (chunks - 1).bit_length())
        kernels.scan_kernel[(-(-bins // width),)](
            counts, totals, chunks, bins, width, step, pdl, **launch
        )
    kernels.place_kernel[(chunks,)](
        topk_ids, expert_map, counts, totals, entries, table1, table2, blocks1, blocks2, numel,
        chunks, experts, bins, _CHUNK, 32, bm1, bm2, mapped, scanned, pdl,
        num_warps=8, **launch,
    )  # fmt: skip
    tables = (table1, table2 if bm1 != bm2 else table1)
    return _Route(topk_ids, expert_map, entries, tables, (blocks1, blocks2))


def _gemm(
    values, row_scale, w, scale, scale_2, bias, out, route, which, config, activation, k
) -> None:
    """FC1 (which=0) or FC2 (which=1), into ``out``."""
    from vllm_nvfp4_pertoken.experts import triton_kernels as kernels

    experts, n, _ = w.shape
    blocks = route.blocks[which]
    target, pdl = _numbers(out), _pdl(out)
    name = activation.name.removesuffix("_no_mul").removesuffix("_uninterleave")
    kernels.gemm_kernel[(blocks * -(-n // config.bn),)](
        _numbers(values), row_scale, w.view(torch.int16), scale.view(torch.uint8), scale_2, bias,
        target, route.entries, None if route.tables is None else route.tables[which],
        route.ids, route.expert_map,
        float(activation.alpha), float(activation.beta), float(activation.limit or 0.0), blocks,
        n, k, route.ids.shape[1], experts, route.tables is not None, route.expert_map is not None,
        which == 0, activation.is_gated, activation.is_interleaved,
        "silu" if name == "swigluoai" else name, activation.limit is not None, bias is not None,
        _triton_dtype(out.dtype), config.bm, config.bn, config.bk, config.half, pdl,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False, **_launch(pdl),
    )  # fmt: skip
    if target is not out:
        out.copy_(target)


def _triton_dtype(dtype: torch.dtype):
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _pdl(x: torch.Tensor) -> bool:
    """Whether a kernel may launch before the one before it ends: programmatic launch, sm_90 on."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def _check(
    hidden_states, topk_weights, topk_ids, weights, activation, apply_router_weight_on_input
) -> None:
    """Kernels see only pointers."""
    tokens, hidden = hidden_states.shape
    experts, rows13, _ = weights.w13.shape
    inter = rows13 // 2 if activation.is_gated else rows13
    if hidden_states.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"hidden_states must be bfloat16 or float16, got {hidden_states.dtype}")
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        raise ValueError(f"router weights on the input need top_k 1, got {topk_ids.shape[1]}")
    if topk_ids.shape[0] != tokens or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must "
            f"both be [{tokens}, top_k]"
        )
    if hidden % BLOCK_SIZE or inter % BLOCK_SIZE:
        raise ValueError(
            f"hidden size {hidden} and intermediate size {inter}: multiples of 16 only"
        )
    for name, dtype, shape in (
        ("w13", torch.uint8, (experts, rows13, hidden // 2)),
        ("w13_scale", torch.float8_e4m3fn, (experts, rows13, hidden // BLOCK_SIZE)),
        ("w13_scale_2", torch.float32, (experts, 2 if activation.is_gated else 1)),
        ("w2", torch.uint8, (experts, hidden, inter // 2)),
        ("w2_scale", torch.float8_e4m3fn, (experts, hidden, inter // BLOCK_SIZE)),
        ("w2_scale_2", torch.float32, (experts,)),
        ("w13_bias", torch.float32, (experts, rows13)),
        ("w2_bias", torch.float32, (experts, hidden)),
    ):
        tensor = getattr(weights, name)
        if tensor is None and name.endswith("bias"):
            continue
        if not (
            tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.is_contiguous()
            and tensor.device == hidden_states.device
        ):
            raise ValueError(
                f"{name} must be a contiguous {dtype} tensor {shape} on {hidden_states.device}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, "
                f"on {tensor.device}"
            )
