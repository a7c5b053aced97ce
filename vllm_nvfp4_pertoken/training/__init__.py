"""The server's per-token NVFP4 operators for the trainer: the same numbers, and gradients.

torch only. Forward, a layer computes what the server computes, with the same code; backward, what
the layer without quantization would (straight-through).
"""

from vllm_nvfp4_pertoken.training.operators import (
    experts,
    linear,
    quantize_experts,
    quantize_linear,
)

__all__ = ["experts", "linear", "quantize_experts", "quantize_linear"]
