"""The reference against an independent computation in fp64, stage by stage.

FP4 turns a difference in the last bit into a step of the grid, so a bound on the whole layer would
be loose enough to hide errors. Each GEMM is compared on the operands that it had.
"""

import pytest
import torch
import torch.nn.functional as F
from experts_inputs import ACTIVATIONS, random_weights, routed_rows

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts import reference
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights


def activate(fc1: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activations as vLLM documents them, with torch's own functions, in fp64."""
    name = activation.name
    functions = {
        "silu": F.silu,
        # Not F.gelu, which loses the tail of the normal distribution in 1 + erf(x).
        "gelu": lambda x: x * torch.special.erfc(-x / 2**0.5) / 2,
        # (1 + tanh(z)) / 2 = sigmoid(2 z), for the same reason.
        "gelu_tanh": lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
        "relu2": lambda x: F.relu(x).square(),
    }
    if name.endswith("_no_mul"):
        return functions[name.removesuffix("_no_mul")](fc1)
    if name == "swigluoai":
        gate, up = fc1[:, ::2], fc1[:, 1::2]
    else:
        gate, up = fc1.chunk(2, dim=1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if name.startswith("swigluoai"):
        return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
    return functions[name](gate) * up


def fp64_layer(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    """The whole layer, row by row and expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[row, slot])
            scale = weights.w13_scale_2[expert].double()
            if activation.name == "swigluoai":
                scale = scale.repeat(weights.w13.shape[1] // 2)
            else:
                scale = scale.repeat_interleave(weights.w13.shape[1] // len(scale))
            w13 = nvfp4.dequantize(weights.w13[expert], weights.w13_scale[expert], 1.0).double()
            w2 = nvfp4.dequantize(weights.w2[expert], weights.w2_scale[expert], 1.0).double()
            codes, blocks, row_scale = nvfp4.quantize_per_token(x[row : row + 1])
            a = nvfp4.dequantize(codes, blocks, row_scale, torch.float32).double()
            fc1 = a @ (w13 * scale[:, None]).T
            if weights.w13_bias is not None:
                fc1 = fc1 + weights.w13_bias[expert].double()
            inner = activate(fc1, activation).to(x.dtype)
            codes, blocks, row_scale = nvfp4.quantize_per_token(inner)
            b = nvfp4.dequantize(codes, blocks, row_scale, torch.float32).double()
            fc2 = b @ w2.T * weights.w2_scale_2[expert].double()
            if weights.w2_bias is not None:
                fc2 = fc2 + weights.w2_bias[expert].double()
            out[row] += fc2[0] * topk_weights[row, slot].double()
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_layer(activation, bias):
    """Most rows have the same codes in both computations, and then only roundings differ.

    Two bf16 roundings of fc2 and the sum, 2**-8 relative to the largest output each, and fp32 sums:
    below 2**-6. A code that flips between the two moves one of the 48 inner values by one step of
    its grid, at most half of that value, so even then an output stays within 1/8 of the row's norm.
    """
    weights = random_weights(4, 64, 48, activation, bias=bias)
    x, topk_weights, ids = routed_rows(24, 64, 4, 2)
    actual = reference.moe_forward(x, topk_weights, ids, weights, activation).double()
    expected = fp64_layer(x, topk_weights, ids, weights, activation)
    error = (actual - expected).abs().amax(1) / expected.abs().amax(1)
    assert (error < 2**-6).float().mean() > 0.8, error
    assert (error < 2**-3).all(), error


@pytest.mark.parametrize("shape", [(1, 16, 16), (5, 4096, 32), (130, 48, 80)], ids=str)
def test_accumulator(shape):
    """fp32 sums of at most K/16 exact blocks: relative to the sum of magnitudes, K/16 * 2**-24."""
    rows, k, n = shape
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(rows, k, generator=rng).bfloat16()
    w = nvfp4.quantize_weight(torch.randn(n, k, generator=rng))
    values, _ = nvfp4.quantize_per_token_values(x)
    weight = nvfp4.dequantize(w.weight, w.weight_scale, 1.0)
    actual = reference._accumulate(values, weight).double()
    exact = values.double() @ weight.double().T
    bound = (values.abs().double() @ weight.abs().double().T) * (k / 16) * 2**-24
    assert ((actual - exact).abs() <= bound).all()
    if k == 16:
        assert torch.equal(actual, exact)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_are_torchs(activation):
    """Own exp and normal distribution function, against torch's in fp64.

    A few roundings of fp32; and exp(-x*x/2) has the relative error of its argument's rounding,
    x*x/2 units, and tanh-GELU's argument is a cubic with as large an error.
    """
    x = torch.linspace(-12, 12, 20001).repeat(2, 1).T.contiguous()
    actual = reference.apply_activation(x, activation).double()
    expected = activate(x.double(), activation)
    if activation.is_gated:
        x = x[:, :1]
    bound = (16 + x.double() ** 2 + x.double().abs() ** 3) * 2**-24 * expected.abs() + 2**-120
    assert ((actual - expected).abs() <= bound).all()
