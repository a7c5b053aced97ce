"""An NVFP4 mixture-of-experts layer with per-token activation scales, in plain torch.

The numbers every other backend is compared with; any device, no vLLM. The layer is what
Blackwell's trtllm-gen MoE computes (`docs/numerics.md`):

1. each hidden row is quantized once: ``x ~ values * row_scale``, ``values = code * block_scale``;
2. FC1 accumulates ``values @ w13_values.T`` in fp32, multiplies by ``row_scale * w13_scale_2``
   (gate and up each by their own), adds the bias, applies the activation in fp32 and rounds to
   the model's dtype;
3. every expanded row (token x expert) is quantized afresh; FC2 does the same and rounds to the
   model's dtype;
4. the experts of a token are added in fp32, in the order of its ``top_k`` slots, and rounded once.

Steps that look simplifiable and are not
  * **Order of sums.** A product of two ``code * block_scale`` values has 12 significant bits, and
    the 16 products that share one pair of block scales add up to at most 20, so every block's dot
    product is *exact* in fp32, in any order. Only sums of blocks round. They are defined as
    ``acc = rn(acc + rn(block[2b] + block[2b + 1]))``, b ascending: what an AMX tile does when it is
    fed two blocks side by side, and what any other fp32 unit can do. So all backends on a CPU
    give the same bits, and no row depends on the batch it sits in. ``values @ w.T`` in one matmul
    would give neither.
  * **exp and the normal distribution** are spelled out in additions and multiplications, because
    torch's own differ between machines in the last bit, and a last bit can flip an fp4 code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_nvfp4_pertoken import nvfp4

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ExpertWeights",
    "apply_activation",
    "gemm",
    "moe_forward",
    "weight_values",
]

# Gated activations multiply act(gate) by up; the others have no up half.
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "swigluoai",
    "swigluoai_uninterleave",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
)
_LIMITED = ("silu", "swigluoai", "swigluoai_uninterleave")
_ROW_TILE = 128  # rows per matmul: keeps the partial sums in the cache; results do not depend on it
_TOKEN_CHUNK = 8192  # tokens per pass: bounds the scratch memory; results do not depend on it

# Minimax fits, highest power first. exp: (e**r - 1 - r) / r**2 for |r| <= ln(2) / 2, within 5e-9.
_EXP = (1.3814433e-3, 8.3687967e-3, 4.1668396e-2, 1.6666520e-1, 4.9999994e-1)
# Normal tail: exp(x*x/2) * cdf(-x) / u with u = 1 / (1 + 0.35 * x) for x >= 0, within 5e-8.
_CDF = (
    -2.9145669e-2,
    1.4397052e-1,
    -2.5571203e-1,
    1.5917183e-1,
    -2.3108376e-2,
    1.0550745e-1,
    1.1983299e-1,
    1.3986185e-1,
    1.3962141e-1,
)


@dataclass(frozen=True)
class Activation:
    """What stands between the two GEMMs; names and meaning as vLLM's ``MoEActivation``.

    Gated, with ``gate = min(gate, limit)`` and ``up = clamp(up, -limit, limit)`` where a limit is
    given: ``silu``: ``gate * sigmoid(alpha * gate) * (up + beta)``; ``swigluoai`` and
    ``swigluoai_uninterleave`` the same; ``gelu`` and ``gelu_tanh``: ``gelu(gate) * up``.
    ``*_no_mul``: the function alone, of w13's only half; ``relu2``: ``max(x, 0) ** 2``.

    Attributes:
        name: one of ``ACTIVATIONS``.
        alpha, beta, limit: as above. ``swigluoai`` has vLLM's constants 1.702, 1 and 7 whatever is
            given; ``swigluoai_uninterleave`` needs a limit.
    """

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(
                f"activation {self.name!r} is not supported by the NVFP4 per-token experts; "
                f"supported: {', '.join(ACTIVATIONS)}"
            )
        if self.name == "swigluoai":
            for field, value in (("alpha", 1.702), ("beta", 1.0), ("limit", 7.0)):
                object.__setattr__(self, field, value)
        if self.name == "swigluoai_uninterleave" and self.limit is None:
            raise ValueError("activation 'swigluoai_uninterleave' needs a limit")
        if self.name not in _LIMITED and (self.alpha, self.beta, self.limit) != (1.0, 0.0, None):
            raise ValueError(
                f"activation {self.name!r} takes no alpha, beta or limit, got {self}; "
                f"these do: {', '.join(_LIMITED)}"
            )

    @property
    def is_gated(self) -> bool:
        return not self.name.endswith("_no_mul")

    @property
    def is_interleaved(self) -> bool:
        """Whether w13's rows are gate, up, gate, up, … instead of all gates, then all ups."""
        return self.name == "swigluoai"


class ExpertWeights(NamedTuple):
    """A layer's experts as a checkpoint has them. ``value = code * scale * scale_2``.

    With E experts, hidden size H, intermediate size I (both multiples of 16), and N1 = 2 * I rows
    for gated activations (gate, then up), N1 = I for the others:

    Attributes:
        w13: uint8 [E, N1, H/2], two codes a byte, the element with even index in the low nibble.
        w13_scale: float8_e4m3fn [E, N1, H/16].
        w13_scale_2: float32 [E, 2] (gate, up), or [E, 1] for activations without a gate.
        w2: uint8 [E, H, I/2].
        w2_scale: float8_e4m3fn [E, H, I/16].
        w2_scale_2: float32 [E].
        w13_bias: [E, N1] or None, any float dtype, in w13's row order.
        w2_bias: [E, H] or None.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_scale_2: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_scale_2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


def moe_forward(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """The layer's output, [M, H] in the dtype of ``hidden_states``.

    Args:
        hidden_states: [M, H], bfloat16, float16 or float32.
        topk_weights: [M, top_k], used in fp32.
        topk_ids: integer [M, top_k], global expert ids; a negative id contributes nothing.
        weights: the local experts.
        activation: between the GEMMs.
        expert_map: int32 [global experts], the local id or -1 for an expert that lives elsewhere
            and contributes nothing; None when all are local.
        apply_router_weight_on_input: the caller has multiplied the hidden states by the routing
            weight (``top_k`` is 1): they are not applied again.
    """
    if apply_router_weight_on_input:
        if topk_ids.shape[1] != 1:
            raise ValueError(f"router weights on the input need top_k 1, got {topk_ids.shape[1]}")
        topk_weights = torch.ones_like(topk_weights)
    local_ids = topk_ids.long()
    if expert_map is not None:
        # Index 0 stands in for padding, which stays padding.
        local_ids = torch.where(local_ids < 0, -1, expert_map.long()[local_ids.clamp(min=0)])
    output = torch.empty_like(hidden_states)
    for start in range(0, hidden_states.shape[0], _TOKEN_CHUNK):
        rows = slice(start, start + _TOKEN_CHUNK)
        output[rows] = _forward_chunk(
            hidden_states[rows], topk_weights[rows].float(), local_ids[rows], weights, activation
        )
    return output


def _forward_chunk(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    values, row_scale = nvfp4.quantize_per_token_values(hidden)
    expanded = hidden.new_zeros(*local_ids.shape, hidden.shape[1])  # [tokens, top_k, H]
    for expert in local_ids[local_ids >= 0].unique().tolist():
        token, slot = torch.where(local_ids == expert)
        fc1 = gemm(
            values[token],
            row_scale[token],
            weight_values(weights.w13[expert], weights.w13_scale[expert]),
            _column_scale(weights.w13_scale_2[expert], weights.w13.shape[1], activation),
            None if weights.w13_bias is None else weights.w13_bias[expert],
        )
        inner = apply_activation(fc1, activation).to(hidden.dtype)
        expanded[token, slot] = gemm(
            *nvfp4.quantize_per_token_values(inner),
            weight_values(weights.w2[expert], weights.w2_scale[expert]),
            weights.w2_scale_2[expert],
            None if weights.w2_bias is None else weights.w2_bias[expert],
        ).to(hidden.dtype)
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for k in range(local_ids.shape[1]):
        # Not a product with 0: an expert elsewhere must not count even if its weight is NaN.
        part = expanded[:, k].float() * topk_weights[:, k, None]
        total = total + torch.where(local_ids[:, k, None] >= 0, part, 0.0)
    return total.to(hidden.dtype)


def weight_values(codes: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """``code * block_scale`` [N, K], exact in fp32."""
    return nvfp4.dequantize(codes, block_scale, 1.0).float()


def _column_scale(scale_2: torch.Tensor, rows: int, activation: Activation) -> torch.Tensor:
    """w13's second scale per row of w13: [2] -> [2 * I] in w13's row order, or [1] as it is."""
    if not activation.is_gated:
        return scale_2
    if activation.is_interleaved:
        return scale_2.repeat(rows // 2)
    return scale_2.repeat_interleave(rows // 2)


def gemm(
    values: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_2: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """fp32 [R, N]: the accumulator times ``row_scale * weight_scale_2``, plus the bias.

    Args:
        values: [R, K], ``code * block_scale`` of the rows.
        row_scale: float32 [R].
        weight: fp32 [N, K], from `weight_values`.
        weight_scale_2: float32, one or [N].
        bias: [N] or None.
    """
    result = _accumulate(values.float(), weight) * (row_scale[:, None] * weight_scale_2)
    return result if bias is None else result + bias.float()


def _accumulate(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``values @ weight.T`` in the defined order of sums: fp32 [R, K] and [N, K] -> [R, N]."""
    rows, k = values.shape
    out = values.new_zeros(rows, weight.shape[0])
    for start in range(0, rows, _ROW_TILE):
        x, acc = values[start : start + _ROW_TILE], out[start : start + _ROW_TILE]
        even, odd = torch.empty_like(acc), torch.empty_like(acc)
        for i in range(0, k, 32):
            torch.mm(x[:, i : i + 16], weight[:, i : i + 16].T, out=even)
            if i + 16 < k:
                torch.mm(x[:, i + 16 : i + 32], weight[:, i + 16 : i + 32].T, out=odd)
                even += odd
            acc += even
    return out


def apply_activation(
    fc1: torch.Tensor,
    activation: Activation,
    function: Callable[[torch.Tensor, Activation], torch.Tensor] | None = None,
) -> torch.Tensor:
    """fp32 [R, N1] in w13's row order -> fp32 [R, I].

    ``function`` computes silu and the like; by default as defined here, to the bit.
    """
    function = function or _function
    if not activation.is_gated:
        return function(fc1, activation)
    if activation.is_interleaved:
        gate, up = fc1[:, ::2], fc1[:, 1::2]
    else:
        gate, up = fc1.chunk(2, dim=1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return function(gate, activation) * (up + activation.beta)


def _function(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    name = activation.name.removesuffix("_no_mul")
    if name == "relu2":
        return x.clamp(min=0).square()
    if name == "gelu":
        return x * _normal_cdf(x)
    # x * sigmoid(z): tanh-GELU is one too, with 2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3).
    z = (
        x * (x * x * 0.044715 + 1.0) * 1.5957691216057308
        if name == "gelu_tanh"
        else (x * activation.alpha)
    )
    return x / (_exp(-z) + 1.0)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e ** x within 1 ulp; inf from 88.4 on, and no less than 1.6e-38: no subnormal results."""
    x = x.clamp(-87.0, 89.0)
    # 1.5 * 2**23 pushes the fraction out: the nearest integer, as a float and in the low bits.
    magic = x * 1.4426950408889634 + 12582912.0
    n = magic - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    q = r * _EXP[0] + _EXP[1]
    for c in _EXP[2:]:
        q = q * r + c
    power = ((magic.view(torch.int32) - (0x4B400000 - 127)) << 23).view(torch.float32)
    return (q * (r * r) + r + 1.0) * power


def _normal_cdf(x: torch.Tensor) -> torch.Tensor:
    """The normal distribution function: exp(-x*x/2) times a polynomial in 1 / (1 + 0.35 |x|)."""
    u = 1.0 / (x.abs() * 0.35 + 1.0)
    p = u * _CDF[0] + _CDF[1]
    for c in _CDF[2:]:
        p = p * u + c
    tail = p * u * _exp(x * x * -0.5)
    return torch.where(x < 0, tail, 1.0 - tail)
