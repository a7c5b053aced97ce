"""The NVFP4 per-token MoE layer, and dense layers, on a CPU: the compiled kernel.

Same functions and same bits as `reference.moe_forward` and `linear.linear_forward`, on weights that
`pack` and `pack_linear` have put in the kernel's order. The kernel (cpu_kernel.c) is built when the
package is installed; without it, `available` says why and the reference still works.
"""

import ctypes
import functools
import importlib.machinery
import threading
from collections.abc import Sequence
from pathlib import Path

# Before the kernel: libtorch brings OpenMP's run-time library, and the kernel, which asks for the
# same one by name, then shares its threads and torch.set_num_threads.
import torch

from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights

__all__ = [
    "ISAS",
    "available",
    "can_pack_linear",
    "linear_forward",
    "moe_forward",
    "pack",
    "pack_linear",
    "unpack",
]

# What the kernel can run on, worst to best; `amx` includes avx512, for experts with few rows.
ISAS = ("portable", "avx2", "avx512", "amx")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FUNCTIONS = {"silu": 0, "swigluoai": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}
_LINEAR = 4  # instead of a function
_STRIP = 16  # rows of a weight that are packed together
_SCRATCH_LIMIT = 256 << 20  # bytes; more tokens are computed in chunks, which changes no result
_scratch = threading.local()


class _Args(ctypes.Structure):
    """moe_args of cpu_kernel.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "output", "topk_weights", "topk_ids")),
        *((name, ctypes.c_void_p) for name in ("expert_map", "w13", "w13_scale", "w2")),
        *((name, ctypes.c_void_p) for name in ("w2_scale", "w13_scale_2", "w2_scale_2")),
        *((name, ctypes.c_void_p) for name in ("w13_bias", "w2_bias", "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "top_k", "experts", "global_experts")),
        *((name, ctypes.c_int64) for name in ("hidden_size", "inter_size")),
        *((name, ctypes.c_int32) for name in ("dtype", "function", "gated", "interleaved")),
        *((name, ctypes.c_int32) for name in ("isa", "threads")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "limit")),
    )


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, int, str]:
    """The library, the best of ISAS here, and what is to be said about it."""
    folder = Path(__file__).parent
    names = [f"_cpu_kernel{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        reason = (
            f"the kernel was not compiled when the package was installed (no {names[0]} in "
            f"{folder}); with a C compiler that knows OpenMP, reinstall it"
        )
        return None, 0, reason
    try:
        library = ctypes.CDLL(str(path))
        library.moe_scratch_bytes.restype = ctypes.c_int64
        library.moe_args_bytes.restype = ctypes.c_int64
        library.linear_forward.restype = ctypes.c_int  # absent in older builds
        if library.moe_args_bytes() != ctypes.sizeof(_Args):
            raise AttributeError("it was compiled from another version, reinstall the package")
        best = library.moe_isa()
    except (OSError, AttributeError) as error:
        return None, 0, f"the compiled kernel {path} cannot be used: {error}"
    return library, best, f"compiled kernel, {ISAS[best]}"


def available() -> tuple[bool, str]:
    """Whether the kernel can run here; and which instructions it uses, or why not."""
    library, _, reason = _load()
    return library is not None, reason


def pack(
    weights: ExpertWeights, activation: Activation, *, out: ExpertWeights | None = None
) -> ExpertWeights:
    """The same bytes in the order the kernel streams them; shapes and dtypes do not change.

    Rows go into strips of 16 (of w13: gate, up, gate, up, …), and within a strip the 16 rows'
    bytes lie side by side; cpu_kernel.c has the formula. Second scales and biases stay as they
    are, except that biases become float32.

    Args:
        weights: in checkpoint layout.
        activation: tells how w13's rows are arranged.
        out: where to put the result; may be ``weights``: then one expert at a time is copied.
    """
    return _rearrange(weights, activation, out, _pack_codes, _pack_scales, inverse=False)


def unpack(
    weights: ExpertWeights, activation: Activation, *, out: ExpertWeights | None = None
) -> ExpertWeights:
    """The inverse of `pack`."""
    return _rearrange(weights, activation, out, _unpack_codes, _unpack_scales, inverse=True)


def _rearrange(weights, activation, out, codes, scales, inverse):
    if out is None:
        out = weights._replace(
            **{name: torch.empty_like(getattr(weights, name)) for name in _PACKED}
        )
    rows13 = _row_order(weights.w13.shape[1], activation)
    rows2 = torch.arange(weights.w2.shape[1])
    for name, order in zip(_PACKED, (rows13, rows13, rows2, rows2), strict=True):
        permute = scales if name.endswith("scale") else codes
        source, target = (getattr(w, name).view(torch.uint8) for w in (weights, out))
        for expert in range(source.shape[0]):
            if inverse:
                target[expert, order] = permute(source[expert])
            else:
                target[expert] = permute(source[expert, order])
    biases = (None if b is None else b.float() for b in (weights.w13_bias, weights.w2_bias))
    return ExpertWeights(*out[:6], *biases)


_PACKED = ("w13", "w13_scale", "w2", "w2_scale")


def _row_order(rows: int, activation: Activation) -> torch.Tensor:
    """Which checkpoint row each packed row of w13 is."""
    order = torch.arange(rows)
    if not activation.is_gated:
        return order
    gate_up = order.view(-1, 2).T if activation.is_interleaved else order.view(2, -1)
    return gate_up.reshape(2, -1, 16).transpose(0, 1).flatten()


def _pack_codes(w: torch.Tensor) -> torch.Tensor:
    rows, half_k = w.shape
    nibbles = torch.stack((w & 15, w >> 4), dim=-1).view(rows, 2 * half_k)
    parts = []
    for part, pairs in _chunks(nibbles):
        # [strip, row, chunk, low or high nibble, g, i]
        part = part.reshape(rows // 16, 16, -1, 2, pairs // 4, 4)
        part = part[:, :, :, 0] | part[:, :, :, 1] << 4
        parts.append(part.permute(0, 2, 3, 1, 4).reshape(rows // 16, -1))
    return torch.cat(parts, dim=1).view(rows, half_k)


def _unpack_codes(w: torch.Tensor) -> torch.Tensor:
    rows, half_k = w.shape
    strips = w.view(rows // 16, -1)
    parts = []
    for part, pairs in _chunks(strips, 8):
        part = part.reshape(rows // 16, -1, pairs // 4, 16, 4).permute(0, 3, 1, 2, 4)
        part = torch.stack((part & 15, part >> 4), dim=3)
        parts.append(part.reshape(rows, -1))
    nibbles = torch.cat(parts, dim=1).view(rows, half_k, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4


def _chunks(x: torch.Tensor, per_k: int = 1) -> list[tuple[torch.Tensor, int]]:
    """The columns of chunks of 32 k, and those of the last 16 k, each if there; and the number of
    bytes that a row has in a chunk."""
    whole = x.shape[1] // (32 * per_k) * (32 * per_k)
    parts = [(x[:, :whole], 16), (x[:, whole:], 8)]
    return [(part, pairs) for part, pairs in parts if part.shape[1]]


def _pack_scales(scale: torch.Tensor) -> torch.Tensor:
    rows, blocks = scale.shape
    return scale.view(rows // 16, 16, blocks).transpose(1, 2).reshape(rows, blocks)


def _unpack_scales(scale: torch.Tensor) -> torch.Tensor:
    rows, blocks = scale.shape
    return scale.view(rows // 16, blocks, 16).transpose(1, 2).reshape(rows, blocks)


def can_pack_linear(part_sizes: Sequence[int]) -> bool:
    """Whether the kernel takes a dense layer: it wants parts of whole strips."""
    return all(size % _STRIP == 0 for size in part_sizes)


def pack_linear(weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    """Bring a dense layer's bytes into the kernel's order, in place.

    Args:
        weight: uint8 [N, K/2], two codes a byte, N a multiple of 16.
        weight_scale: float8_e4m3fn [N, K/16].
    """
    weight.copy_(_pack_codes(weight))
    scale = weight_scale.view(torch.uint8)
    scale.copy_(_pack_scales(scale))


def linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    part_sizes: Sequence[int],
    *,
    isa: str | None = None,
) -> torch.Tensor:
    """`linear.linear_forward` without an input scale, bitwise, for weights from `pack_linear`.

    Args:
        x: [M, K], bfloat16, float16 or float32, on the CPU.
        weight, weight_scale: packed.
        weight_scale_2: float32 [parts].
        part_sizes: rows of each part, multiples of 16; their sum is N.
        isa: for tests: one of `ISAS` instead of the best that this machine has.
    """
    library, level = _library(isa)
    x = x.contiguous()
    tokens, k = x.shape
    n = sum(part_sizes)
    if x.dtype not in _DTYPES or not x.is_cpu:
        raise TypeError(f"x must be {_DTYPES} on the CPU, got {x.dtype} on {x.device}")
    if not can_pack_linear(part_sizes) or not k or k % 16:
        raise ValueError(f"parts {list(part_sizes)} and {k} columns must be multiples of 16")
    _check("weight", weight, torch.uint8, (n, k // 2))
    _check("weight_scale", weight_scale, torch.float8_e4m3fn, (n, k // 16))
    _check("weight_scale_2", weight_scale_2, torch.float32, (len(part_sizes),))
    strips = torch.tensor([size // _STRIP for size in part_sizes])
    strip_scale = weight_scale_2.repeat_interleave(strips)
    only_expert = torch.zeros(tokens, dtype=torch.int32)
    output = x.new_empty(tokens, n)
    args = _Args()
    args.w13, args.w13_scale = weight.data_ptr(), weight_scale.data_ptr()
    args.w13_scale_2 = strip_scale.data_ptr()
    args.topk_ids = only_expert.data_ptr()
    args.top_k = args.experts = args.global_experts = 1
    args.hidden_size, args.inter_size = k, n
    args.dtype, args.function = _DTYPES.index(x.dtype), _LINEAR
    args.isa, args.threads = level, torch.get_num_threads()
    step = max(64, _SCRATCH_LIMIT // (4 * k + 64))
    pointer = ctypes.byref(args)
    for start in range(0, tokens, step):
        args.tokens = min(step, tokens - start)
        args.hidden = x.data_ptr() + start * k * x.element_size()
        args.output = output.data_ptr() + start * n * x.element_size()
        args.scratch = _scratch_pointer(library.moe_scratch_bytes(pointer))
        if library.linear_forward(pointer):
            raise RuntimeError("the compiled kernel refused a dense layer")
    return output


def _library(isa: str | None) -> tuple[ctypes.CDLL, int]:
    """The kernel, and which instructions to use."""
    library, best, reason = _load()
    if library is None:
        raise RuntimeError(reason)
    level = best if isa is None else ISAS.index(isa)
    if level > best:
        raise RuntimeError(f"this machine has no {isa}: {reason}")
    return library, level


def moe_forward(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    isa: str | None = None,
) -> torch.Tensor:
    """`reference.moe_forward`, bitwise, for weights from `pack`.

    Args:
        isa: for tests: one of `ISAS` instead of the best that this machine has.
    """
    library, level = _library(isa)
    if apply_router_weight_on_input:
        if topk_ids.shape[1] != 1:
            raise ValueError(f"router weights on the input need top_k 1, got {topk_ids.shape[1]}")
        topk_weights = torch.ones_like(topk_weights)
    hidden_states = hidden_states.contiguous()
    topk_weights = topk_weights.to(torch.float32).contiguous()
    topk_ids = topk_ids.to(torch.int32).contiguous()
    args = _arguments(hidden_states, topk_weights, topk_ids, weights, activation, expert_map)
    args.isa = level
    args.threads = torch.get_num_threads()
    output = torch.empty_like(hidden_states)
    # For each token, how far the kernel's pointers move.
    strides = (
        ("hidden", hidden_states.data_ptr(), args.hidden_size * hidden_states.element_size()),
        ("output", output.data_ptr(), args.hidden_size * hidden_states.element_size()),
        ("topk_weights", topk_weights.data_ptr(), args.top_k * 4),
        ("topk_ids", topk_ids.data_ptr(), args.top_k * 4),
    )
    tokens, step = hidden_states.shape[0], _chunk_tokens(args)
    pointer = ctypes.byref(args)
    for start in range(0, tokens, step):
        args.tokens = min(step, tokens - start)
        for name, first, stride in strides:
            setattr(args, name, first + start * stride)
        args.scratch = _scratch_pointer(library.moe_scratch_bytes(pointer))
        if library.moe_forward(pointer):
            raise ValueError(
                f"topk_ids {topk_ids.min().item()}..{topk_ids.max().item()} or what expert_map "
                f"makes of them is out of range: {args.global_experts} experts, "
                f"{args.experts} of them local"
            )
    return output


def _chunk_tokens(args: _Args) -> int:
    """Tokens per call that keep the scratch memory below the limit; cpu_kernel.c: make_plan."""
    h, i = args.hidden_size, args.inter_size
    element = 4 if _DTYPES[args.dtype] == torch.float32 else 2
    per_slot = (h + i) * (2 + element) + 2 * i + 64
    return max(64, _SCRATCH_LIMIT // (2 * h + args.top_k * per_slot))


def _scratch_pointer(size: int) -> int:
    """At least ``size`` bytes, aligned to 64; kept, because fresh pages cost more than the sums."""
    buffer = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < size + 64:
        _scratch.buffer = None  # free before allocating
        buffer = _scratch.buffer = torch.empty(size + 64, dtype=torch.uint8)
    return -(-buffer.data_ptr() // 64) * 64


def _arguments(hidden, topk_weights, topk_ids, weights, activation, expert_map) -> _Args:
    """Everything that does not change between chunks, checked: the kernel sees only pointers."""
    tokens, h = hidden.shape
    experts, rows13, _ = weights.w13.shape
    inter = rows13 // 2 if activation.is_gated else rows13
    if hidden.dtype not in _DTYPES or not hidden.is_cpu:
        raise TypeError(f"hidden_states must be {_DTYPES} on the CPU, got {hidden.dtype}")
    if not h or not inter or h % 16 or inter % 16 or (activation.is_gated and rows13 % 2):
        raise ValueError(f"hidden size {h} and intermediate size {inter} must be multiples of 16")
    if not (
        topk_ids.shape[0] == tokens
        and topk_weights.shape == topk_ids.shape
        and topk_ids.is_cpu
        and topk_weights.is_cpu
    ):
        raise ValueError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must "
            f"both be [{tokens}, top_k], on the CPU"
        )
    args = _Args()
    for name, dtype, shape in (
        ("w13", torch.uint8, (experts, rows13, h // 2)),
        ("w13_scale", torch.float8_e4m3fn, (experts, rows13, h // 16)),
        ("w13_scale_2", torch.float32, (experts, 2 if activation.is_gated else 1)),
        ("w2", torch.uint8, (experts, h, inter // 2)),
        ("w2_scale", torch.float8_e4m3fn, (experts, h, inter // 16)),
        ("w2_scale_2", torch.float32, (experts,)),
        ("w13_bias", torch.float32, (experts, rows13)),
        ("w2_bias", torch.float32, (experts, h)),
    ):
        tensor = getattr(weights, name)
        if tensor is None and name.endswith("bias"):
            continue
        _check(name, tensor, dtype, shape)
        setattr(args, name, tensor.data_ptr())
    args.global_experts = experts
    if expert_map is not None:
        _check("expert_map", expert_map, torch.int32, tuple(expert_map.shape[:1]))
        args.expert_map = expert_map.data_ptr()
        args.global_experts = expert_map.shape[0]
    args.top_k, args.experts = topk_ids.shape[1], experts
    args.hidden_size, args.inter_size = h, inter
    args.dtype = _DTYPES.index(hidden.dtype)
    name = activation.name.removesuffix("_no_mul").removesuffix("_uninterleave")
    args.function = _FUNCTIONS[name]
    args.gated, args.interleaved = activation.is_gated, activation.is_interleaved
    args.alpha, args.beta = activation.alpha, activation.beta
    args.limit = float("inf") if activation.limit is None else activation.limit
    return args


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if not (
        tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu
    ):
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor {shape} on the CPU, got {tensor.dtype} "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        )
