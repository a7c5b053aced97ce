"""The server's per-token NVFP4 operators for the trainer: the same numbers, and gradients.

Forward, a layer computes what the server computes, with the same code; backward, what the layer
without quantization would (straight-through). torch only; transformers where `apply` is given one
of its models.
"""

from vllm_nvfp4_pertoken.training.huggingface import Applied, apply
from vllm_nvfp4_pertoken.training.operators import (
    experts,
    linear,
    quantize_experts,
    quantize_linear,
)

__all__ = ["Applied", "apply", "experts", "linear", "quantize_experts", "quantize_linear"]
