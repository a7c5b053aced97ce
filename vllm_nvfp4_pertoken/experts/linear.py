"""A dense NVFP4 layer in plain torch, on any device: per-token or static activation scales."""

from collections.abc import Sequence

import torch

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts.reference import gemm, weight_values

__all__ = ["linear_forward"]


def linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    part_sizes: Sequence[int],
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` with the rows of ``x`` quantized on the way: [M, N] in the dtype of ``x``.

    Layers that are served as one (q, k and v, say) keep their own scales.

    Args:
        x: [M, K], bfloat16, float16 or float32.
        weight: uint8 [N, K/2], two codes a byte.
        weight_scale: float8_e4m3fn [N, K/16].
        weight_scale_2: float32 [parts].
        part_sizes: rows of each part; their sum is N.
        input_scale: float32 [parts], the static activation scale; None for one scale per token.
    """
    per_token = nvfp4.quantize_per_token_values(x) if input_scale is None else None
    outputs = []
    start = 0
    for part, size in enumerate(part_sizes):
        rows = slice(start, start + size)
        start += size
        if per_token is not None:
            values, row_scale = per_token
        else:
            assert input_scale is not None
            values, row_scale = nvfp4.quantize_static_values(x, input_scale[part])
        outputs.append(
            gemm(
                values,
                row_scale,
                weight_values(weight[rows], weight_scale[rows]),
                weight_scale_2[part],
                None,
            ).to(x.dtype)
        )
    return torch.cat(outputs, dim=1)
