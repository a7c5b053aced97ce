"""One MoE layer at a time, of any shape, as vLLM makes, loads, processes and runs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cases import EXPERTS_ONLY
from harness import worker

from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights, moe_forward

PREFIX = "model.layers.0.mlp.experts"  # one that the checkpoint says is NVFP4


@contextmanager
def moe_layer(
    weights: ExpertWeights,
    activation: str = "silu",
    *,
    top_k: int = 2,
    tp_size: int = 1,
    backend: str = "auto",
    engine: dict[str, Any] | None = None,
    **layer: Any,
) -> Iterator[tuple[Any, Any]]:
    """A layer with these weights on rank 0 of ``tp_size``; yields (vllm_config, runner)."""
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    gated = not activation.endswith("_no_mul")
    experts, hidden, _ = weights.w2.shape
    with worker(EXPERTS_ONLY, moe_backend=backend, **(engine or {})) as config:
        runner = FusedMoEFactory(
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=2 * weights.w2.shape[2],
            params_dtype=torch.bfloat16,
            tp_size=tp_size,
            quant_config=config.quant_config,
            prefix=PREFIX,
            activation=activation,
            ckpt_names=("gate", "down", "up") if gated else ("up", "down", None),
            **layer,
        )
        load(runner, weights)
        runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
        yield config, runner


def load(runner: Any, weights: ExpertWeights) -> None:
    """Hand in every expert's tensors, one by one, as a checkpoint's loader does."""
    layer = runner.routed_experts
    halves = weights.w13_scale_2.shape[1]
    for expert in range(len(weights.w2)):
        for shard, name in enumerate(("w1", "w3")[:halves]):
            rows = slice(
                shard * weights.w13.shape[1] // halves, (shard + 1) * weights.w13.shape[1] // halves
            )
            _put(layer, "w13_weight", weights.w13[expert, rows], name, expert)
            _put(layer, "w13_weight_scale", weights.w13_scale[expert, rows], name, expert)
            _put(layer, "w13_weight_scale_2", weights.w13_scale_2[expert, shard], name, expert)
        _put(layer, "w2_weight", weights.w2[expert], "w2", expert)
        _put(layer, "w2_weight_scale", weights.w2_scale[expert], "w2", expert)
        _put(layer, "w2_weight_scale_2", weights.w2_scale_2[expert], "w2", expert)


def _put(layer: Any, name: str, tensor: torch.Tensor, shard: str, expert: int) -> None:
    parameter = getattr(layer, name)
    parameter.weight_loader(parameter, tensor, f"experts.{expert}.{name}", shard, expert)


def run(config: Any, runner: Any, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The layer's output for rows that are not routed yet, through vLLM's runner."""
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config, num_tokens=len(hidden)):
        return runner(hidden.clone(), logits)


def expected(
    runner: Any,
    weights: ExpertWeights,
    activation: Activation,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    tp_size: int = 1,
) -> torch.Tensor:
    """The same of routed rows from the reference, with rank 0's share of the weights."""
    layer = runner.routed_experts
    on_input = layer.apply_router_weight_on_input
    return moe_forward(
        hidden * topk_weights.to(hidden.dtype) if on_input else hidden,
        topk_weights,
        ids,
        share(weights, tp_size) if not layer.use_ep else weights_of_rank_0(weights, tp_size),
        activation,
        expert_map=layer.expert_map,
        apply_router_weight_on_input=on_input,
    )


def weights_of_rank_0(weights: ExpertWeights, ep_size: int) -> ExpertWeights:
    mine = slice(0, len(weights.w2) // ep_size)
    return ExpertWeights(*(None if part is None else part[mine] for part in weights))


def share(weights: ExpertWeights, tp_size: int) -> ExpertWeights:
    """Rank 0's rows of gate and up, and columns of down."""
    halves = weights.w13_scale_2.shape[1]

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.unflatten(1, (halves, tp_size, -1))
        return parts[:, :, 0].flatten(1, 2).contiguous()

    return weights._replace(
        w13=rows(weights.w13),
        w13_scale=rows(weights.w13_scale.view(torch.uint8)).view(torch.float8_e4m3fn),
        w2=weights.w2.chunk(tp_size, dim=2)[0].contiguous(),
        w2_scale=weights.w2_scale.chunk(tp_size, dim=2)[0].contiguous(),
    )


def assert_same_layer(actual: torch.Tensor, reference: torch.Tensor) -> None:
    """Two computations of one layer that round at the same places, but add up in another order.

    Roundings: FC1 to bf16 (its FP4 codes mostly agree), FC2 and the sum to bf16, and routing
    weights to bf16 where the kernel routes, 2**-9 of the largest output each, and fp32 sums: below
    2**-6. A value of FC1 on a rounding boundary may get another code, which moves it by up to half
    of itself, so a few rows may be further off, within 2**-3 of their norm.
    """
    actual, reference = actual.double(), reference.double()
    assert actual.shape == reference.shape
    assert actual.isfinite().all()
    size = reference.abs().amax(1)
    error = (actual - reference).abs().amax(1)
    assert (error[size == 0] == 0).all()
    relative = error[size > 0] / size[size > 0]
    assert (relative < 2**-3).all(), relative.max()
    assert (relative < 2**-6).double().mean() > 0.8 or len(relative) == 0, relative
