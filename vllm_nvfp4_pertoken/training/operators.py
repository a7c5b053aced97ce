"""Experts and dense layers with the server's forward and straight-through gradients.

Forward
  Weights are cast to the dtype of the checkpoint that the server gets, quantized as
  ``nvfp4-pertoken convert`` quantizes that checkpoint, brought into the order of the server's
  kernel, and given to that kernel. So on the same inputs the result is the server's to the bit,
  where the server runs the same backend (or the reference and the compiled CPU kernel, which agree
  to the bit), holds all experts of the layer, and keeps experts whole (no tensor parallelism): sums
  over ranks are added in another order.

Backward
  The gradients of the same layer without quantization of weights and activations, at the masters'
  and inputs' own values, for hidden states, weights, biases and routing weights. Computed anew
  from these, one expert at a time, in ``backward_dtype``: nothing but the inputs is kept for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts import cpu, ops
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights, apply_activation

__all__ = [
    "default_backend",
    "experts",
    "linear",
    "quantize_experts",
    "quantize_linear",
    "smooth",
    "unquantized_expert",
]


def default_backend(device: torch.device) -> str:
    """The experts that the server takes on such a device: a key of ``experts.ops.BACKENDS``."""
    if device.type == "cuda":
        return "triton"
    return "cpu" if device.type == "cpu" and cpu.available()[0] else "reference"


@torch.no_grad()
def quantize_experts(
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: Activation,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> ExpertWeights:
    """What the server makes of a layer's experts: the bytes of ``convert``, in a kernel's order.

    Args:
        w13: [E, N1, H], any float dtype: N1 = 2 * I rows for gated activations (gate, then up;
            alternating for ``swigluoai``), which share one ``weight_scale_2``; N1 = I for others.
        w2: [E, H, I].
        activation: between the two.
        w13_bias, w2_bias: [E, N1] and [E, H], or None.
        dtype: of the checkpoint, or of the tensors that the server is sent.
        backend: a key of ``experts.ops.BACKENDS``; None for the server's choice on this device.

    Raises:
        ValueError: shapes do not fit together or into NVFP4, or a weight is not finite.
    """
    backend = backend or default_backend(w13.device)
    experts, rows, hidden = w13.shape
    halves = 2 if activation.is_gated else 1
    if rows % halves or tuple(w2.shape) != (experts, hidden, rows // halves):
        raise ValueError(
            f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} do not fit together: expected "
            f"[E, {'2 * I' if halves == 2 else 'I'}, H] and [E, H, I] for {activation.name}"
        )
    first = nvfp4.quantize_weight(w13.detach().to(dtype))
    second = nvfp4.quantize_weight(w2.detach().to(dtype))
    # The checkpoint's dtype, then the server's, which adds biases in fp32.
    biases = (None if b is None else b.detach().to(dtype).float() for b in (w13_bias, w2_bias))
    weights = ExpertWeights(
        first.weight,
        first.weight_scale,
        first.weight_scale_2[:, None].expand(experts, halves).contiguous(),
        *second,
        *biases,
    )
    pack = ops.PACKERS.get(backend)
    return pack(weights, activation, out=weights) if pack else weights


def experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: Activation,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    backward_dtype: torch.dtype = torch.float32,
    quantized: ExpertWeights | None = None,
) -> torch.Tensor:
    """The server's experts, routed: [M, H] in the dtype of ``hidden_states``.

    Under ``torch.autocast`` the hidden states are cast as a linear's would be.

    Args:
        hidden_states: [M, H], in the server's dtype.
        topk_weights: [M, top_k]; the kernel computes with them in fp32.
        topk_ids: integer [M, top_k]; a negative id contributes nothing.
        w13, w2, activation, w13_bias, w2_bias, dtype, backend: as for `quantize_experts`.
        backward_dtype: in which gradients are computed.
        quantized: what `quantize_experts` made of these weights, to do that once where they are
            used several times in between two updates. Not compared with the weights.

    Raises:
        ValueError, TypeError: as `quantize_experts`; or shapes or dtypes are not the kernel's.
    """
    hidden_states = _autocast(hidden_states)
    backend = backend or default_backend(w13.device)
    if quantized is None:
        quantized = quantize_experts(
            w13, w2, activation, w13_bias=w13_bias, w2_bias=w2_bias, dtype=dtype, backend=backend
        )
    call = _ExpertsCall(activation, backend, backward_dtype, quantized)
    return _Experts.apply(call, hidden_states, topk_weights, topk_ids, w13, w2, w13_bias, w2_bias)


@torch.no_grad()
def quantize_linear(
    weight: torch.Tensor,
    *,
    shared_with: Sequence[torch.Tensor] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> nvfp4.QuantizedWeight:
    """What the server makes of a dense layer's weight: convert's bytes, in a kernel's order.

    Args:
        weight: [N, K], any float dtype.
        shared_with: the weights with which it shares ``weight_scale_2``, itself among them or not:
            q, k and v of an attention, gate and up of an MLP.
        dtype: of the checkpoint, or of the tensors that the server is sent.

    Raises:
        ValueError: the shape does not fit into NVFP4, or a weight is not finite.
    """
    parts = [part.detach().to(dtype) for part in (weight, *shared_with)]
    amax = torch.stack([torch.maximum(part.amax(), -part.amin()) for part in parts]).amax()
    if not amax.isfinite():
        for part in parts:
            nvfp4.quantize_weight(part)  # says which value
    quantized = nvfp4.quantize_weight(parts[0], nvfp4.scale_of_weights(amax.float()))
    if _linear_backend(weight) == "cpu":
        cpu.pack_linear(quantized.weight, quantized.weight_scale)
    return quantized


def _linear_backend(weight: torch.Tensor) -> str:
    """Either gives the same bits."""
    compiled = weight.is_cpu and cpu.available()[0] and cpu.can_pack_linear(weight.shape[:1])
    return "cpu" if compiled else "reference"


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    shared_with: Sequence[torch.Tensor] = (),
    dtype: torch.dtype = torch.bfloat16,
    backward_dtype: torch.dtype = torch.float32,
    quantized: nvfp4.QuantizedWeight | None = None,
) -> torch.Tensor:
    """The server's dense layer, ``x @ weight.T + bias``: [..., N] in the dtype of ``x``.

    Args:
        x: [..., K], in the server's dtype; cast under ``torch.autocast`` as a linear's would be.
        weight, shared_with, dtype: as for `quantize_linear`.
        bias: [N] or None.
        backward_dtype, quantized: as for `experts`.

    Raises:
        ValueError, TypeError: as `quantize_linear`; or shapes do not fit together.
    """
    x = _autocast(x)
    if quantized is None:
        quantized = quantize_linear(weight, shared_with=shared_with, dtype=dtype)
    rows = x.reshape(-1, x.shape[-1])
    out = _Linear.apply(quantized, backward_dtype, rows, weight).view(
        *x.shape[:-1], weight.shape[0]
    )
    return out if bias is None else out + bias.to(dtype).to(x.dtype)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


@dataclass(frozen=True)
class _ExpertsCall:
    """What a call needs besides differentiable tensors."""

    activation: Activation
    backend: str
    backward_dtype: torch.dtype
    quantized: ExpertWeights


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, hidden, topk_weights, topk_ids, w13, w2, w13_bias, w2_bias):
        ctx.activation, ctx.dtype = call.activation, call.backward_dtype
        ctx.save_for_backward(hidden, topk_weights, topk_ids, w13, w2, w13_bias, w2_bias)
        forward = ops.BACKENDS[call.backend]
        return forward(hidden, topk_weights, topk_ids, call.quantized, call.activation)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        hidden, topk_weights, topk_ids, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            grads = _experts_backward(
                grad_output.to(ctx.dtype), hidden, topk_weights, topk_ids, weights,
                ctx.activation, (needed[1], needed[2], *needed[4:]),
            )  # fmt: skip
        return None, grads[0], grads[1], None, *grads[2:]


def _experts_backward(
    grad_output: torch.Tensor,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: Sequence[Any],
    activation: Activation,
    needed: Sequence[bool],
) -> list[Any]:
    """Gradients of hidden states, routing weights, w13, w2 and their biases, where needed."""
    dtype = grad_output.dtype
    inputs = (hidden, topk_weights, *weights)
    wanted = [i for i, tensor in enumerate(inputs) if needed[i] and tensor is not None]
    grads: list[Any] = [None] * len(inputs)
    for i in wanted:
        # Rows get a part from every expert: these add up in the wider dtype.
        grads[i] = torch.zeros_like(inputs[i], dtype=dtype if i == 0 else None)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, slot = torch.where(topk_ids == expert)
        # Where an expert's part is in each of the inputs.
        places: list[Any] = [token, (token, slot), *[expert] * 4]
        parts: list[Any] = [
            None if tensor is None else tensor[place].to(dtype, copy=True)
            for tensor, place in zip(inputs, places, strict=True)
        ]
        with torch.enable_grad():
            leaves = [parts[i].requires_grad_() for i in wanted]
            x, weigh, *own = parts
            out = unquantized_expert(activation, x, *own) * weigh[:, None]
            found = torch.autograd.grad(out, leaves, grad_output[token])
        for i, part in zip(wanted, found, strict=True):
            if i == 0:
                grads[i].index_add_(0, token, part)
            else:
                grads[i][places[i]] = part.to(grads[i].dtype)
    if grads[0] is not None:
        grads[0] = grads[0].to(hidden.dtype)
    return grads


def unquantized_expert(activation, x, w13, w2, w13_bias, w2_bias):
    """What an expert without quantization makes of rows, in their dtype: [R, H] -> [R, H]."""
    inner = apply_activation(F.linear(x, w13, w13_bias), activation, smooth)
    return F.linear(inner, w2, w2_bias)


def smooth(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """reference.py's activations by torch's functions, which have gradients."""
    name = activation.name.removesuffix("_no_mul")
    if name == "relu2":
        return F.relu(x).square()
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return x * torch.sigmoid(x * activation.alpha)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, quantized, backward_dtype, x, weight):
        ctx.dtype = backward_dtype
        ctx.save_for_backward(x, weight)
        codes, scale, scale_2 = quantized
        parts, backend = [weight.shape[0]], _linear_backend(weight)
        return ops.linear(x, codes, scale, scale_2.reshape(1), parts, None, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        _, _, x_needed, weight_needed = ctx.needs_input_grad
        grad = grad_output.to(ctx.dtype)
        with torch.autocast(x.device.type, enabled=False):
            grad_x = (grad @ weight.to(ctx.dtype)).to(x.dtype) if x_needed else None
            grad_w = (grad.T @ x.to(ctx.dtype)).to(weight.dtype) if weight_needed else None
        return None, None, grad_x, grad_w
