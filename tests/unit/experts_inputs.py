"""Random layers and routed rows for tests of the experts."""

import torch

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights

ACTIVATIONS = (
    Activation("silu"),
    Activation("silu", limit=2.0),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("swigluoai"),
    Activation("swigluoai_uninterleave", alpha=1.3, beta=0.5, limit=3.0),
    Activation("silu_no_mul"),
    Activation("gelu_no_mul"),
    Activation("gelu_tanh_no_mul"),
    Activation("relu2_no_mul"),
)


def random_weights(
    experts: int,
    hidden: int,
    inter: int,
    activation: Activation,
    *,
    bias: bool = False,
    seed: int = 0,
) -> ExpertWeights:
    """Gate and up get different second scales, as checkpoints have them."""
    rng = torch.Generator().manual_seed(seed)
    halves = 2 if activation.is_gated else 1
    w13 = nvfp4.quantize_weight(torch.randn(experts, halves * inter, hidden, generator=rng))
    w2 = nvfp4.quantize_weight(torch.randn(experts, hidden, inter, generator=rng))
    w13_scale_2 = w13.weight_scale_2[:, None] * torch.rand(experts, halves, generator=rng)
    return ExpertWeights(
        w13.weight,
        w13.weight_scale,
        (w13_scale_2 / hidden**0.5).contiguous(),
        w2.weight,
        w2.weight_scale,
        w2.weight_scale_2 / inter**0.5,
        torch.randn(experts, halves * inter, generator=rng) if bias else None,
        torch.randn(experts, hidden, generator=rng) if bias else None,
    )


def routed_rows(
    rows: int,
    hidden: int,
    experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of magnitudes from 1e-3 to 1e3, routing weights, and distinct experts."""
    rng = torch.Generator().manual_seed(seed)
    magnitude = 10 ** (6 * torch.rand(rows, 1, generator=rng) - 3)
    x = (torch.randn(rows, hidden, generator=rng) * magnitude).to(dtype)
    ids = torch.rand(rows, experts, generator=rng).argsort(dim=1)[:, :top_k].int().contiguous()
    return x, torch.rand(rows, top_k, generator=rng), ids
