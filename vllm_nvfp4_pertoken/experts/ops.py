"""Experts and dense layers as torch operators, so that torch.compile and CUDA graphs see one
opaque call."""

from functools import lru_cache

import torch

from vllm_nvfp4_pertoken.experts import cpu, reference, triton
from vllm_nvfp4_pertoken.experts import linear as linear_reference
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights

__all__ = ["BACKENDS", "PACKERS", "linear", "moe"]

BACKENDS = {
    "reference": reference.moe_forward,
    "cpu": cpu.moe_forward,
    "triton": triton.moe_forward,
}

# From checkpoint layout into that of a backend; the reference takes checkpoint layout.
PACKERS = {"cpu": cpu.pack, "triton": triton.pack}

_LIBRARY = torch.library.Library("vllm_nvfp4_pertoken", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_scale_2, int[] part_sizes, "
    "Tensor? input_scale, str backend) -> Tensor"
)
_LIBRARY.define(
    "moe(Tensor(a!) output, Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, "
    "Tensor w13, Tensor w13_scale, Tensor w13_scale_2, Tensor w2, Tensor w2_scale, "
    "Tensor w2_scale_2, Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map, str activation, "
    "float alpha, float beta, float? limit, bool apply_router_weight_on_input, str backend) -> ()"
)


# Built once per layer kind, not once per call.
_activation = lru_cache(Activation)


def _moe(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    apply_router_weight_on_input: bool,
    backend: str,
) -> None:
    output.copy_(
        BACKENDS[backend](
            hidden_states,
            topk_weights,
            topk_ids,
            ExpertWeights(w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2, w13_bias, w2_bias),
            _activation(activation, alpha, beta, limit),
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
    )


_LIBRARY.impl("moe", _moe, "CompositeExplicitAutograd")
_LIBRARY.impl("moe", lambda *args, **kwargs: None, "Meta")


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_scale_2: torch.Tensor,
    part_sizes: list[int],
    input_scale: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    if backend == "cpu":
        assert input_scale is None
        return cpu.linear_forward(x, weight, weight_scale, weight_scale_2, part_sizes)
    assert backend == "reference"
    return linear_reference.linear_forward(
        x, weight, weight_scale, weight_scale_2, part_sizes, input_scale
    )


def _linear_shape(x, weight, weight_scale, weight_scale_2, part_sizes, input_scale, backend):
    return x.new_empty(x.shape[0], sum(part_sizes))


_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
_LIBRARY.impl("linear", _linear_shape, "Meta")

linear = torch.ops.vllm_nvfp4_pertoken.linear
moe = torch.ops.vllm_nvfp4_pertoken.moe
