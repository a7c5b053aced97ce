"""Our experts behind vLLM's modular interface, which brings TP, EP and DP around them."""

import os
from dataclasses import replace
from typing import Any

import torch

from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.experts import cpu, ops, triton
from vllm_nvfp4_pertoken.experts.reference import ACTIVATIONS, Activation, ExpertWeights
from vllm_nvfp4_pertoken.experts.select import FOUR_OVER_SIX, Choice, Facts, Layer, choose

__all__ = ["PerTokenExperts", "choose_experts", "layer_facts", "machine_facts"]


def choose_experts(layer: Any, moe_config: host.FusedMoEConfig, prefix: str) -> Choice:
    """Gather the facts and choose; raises when this layer cannot run per-token here.

    Raises:
        UnsupportedError: for a backend, an activation or a deployment that cannot.
    """
    if moe_config.is_lora_enabled:
        raise UnsupportedError(
            f"{prefix}: LoRA is on (--enable-lora), and experts in NVFP4 cannot take adapters",
            expected="an engine without LoRA",
            way_out="merge the adapter into the weights and quantize those, or drop --enable-lora",
        )
    if moe_config.activation.value not in ACTIVATIONS:
        raise UnsupportedError(
            f"{prefix}: the activation is {moe_config.activation.value!r}",
            expected="one of " + ", ".join(sorted(ACTIVATIONS)),
            way_out="serve this model without --quantization nvfp4_per_token",
        )
    facts = machine_facts(str(moe_config.moe_backend))
    if facts.flashinfer is not None and facts.platform == "cuda":
        # What vLLM itself says against its classes for this layer.
        rejections = host.flashinfer_rejections(moe_config)
        facts = replace(facts, unavailable=rejections | dict(facts.unavailable))
    return choose(facts, layer_facts(layer, moe_config))


def machine_facts(moe_backend: str) -> Facts:
    """What the choice depends on besides the layer."""
    unavailable = {"flashinfer_cutedsl": "not in this release"}
    for name, (available, reason) in {"cpu": cpu.available(), "triton": triton.available()}.items():
        if not available:
            unavailable[name] = reason
    return Facts(
        moe_backend=moe_backend,
        platform=host.platform_name(),
        capability=host.compute_capability(),
        vllm=host.vllm_version(),
        flashinfer=host.installed_version("flashinfer-python"),
        flashinfer_unusable=host.flashinfer_unusable(),
        unavailable=unavailable,
        triton_interpreted=host.current_platform.device_type == "cpu"
        and "triton" not in unavailable,
        environment={
            name: value for name, value in os.environ.items() if name.startswith(FOUR_OVER_SIX)
        },
    )


def layer_facts(layer: Any, moe: host.FusedMoEConfig) -> Layer:
    """What the choice depends on of a ``RoutedExperts`` layer."""
    parallel = moe.moe_parallel_config
    return Layer(
        hidden=moe.hidden_dim,
        intermediate=moe.intermediate_size_per_partition,
        activation=moe.activation.value,
        alpha=getattr(layer, "swiglu_alpha", None),
        beta=getattr(layer, "swiglu_beta", None),
        limit=getattr(layer, "swiglu_limit", None),
        has_bias=moe.has_bias,
        dtype=str(moe.in_dtype).removeprefix("torch."),
        top_k=moe.experts_per_token,
        num_experts=moe.num_experts,
        routing=moe.routing_method.name,
        router_dtype=str(moe.router_logits_dtype).removeprefix("torch."),
        router_weight_on_input=layer.apply_router_weight_on_input,
        has_hash_routing=moe.has_hash_routing,
        ep_size=parallel.ep_size,
        eplb=parallel.enable_eplb,
        all2all=parallel.all2all_backend if parallel.use_all2all_kernels else None,
        batched=parallel.use_batched_activation_format,
    )


class PerTokenExperts(host.mk.FusedMoEExpertsModular):
    """Quantize rows, GEMM, activation, quantize rows again, GEMM, weigh and reduce: in one call.

    Args:
        backend: a key of :data:`vllm_nvfp4_pertoken.experts.ops.BACKENDS`.
    """

    def __init__(
        self,
        moe_config: host.FusedMoEConfig,
        quant_config: host.FusedMoEQuantConfig,
        backend: str,
    ) -> None:
        super().__init__(moe_config, quant_config)
        self.backend = backend
        config = self.activation_config
        self.expert_activation = Activation(
            moe_config.activation.value,
            alpha=config.alpha,
            beta=config.beta,
            limit=config.clamp_limit,
        )

    def pack(self, layer: Any) -> None:
        """Bring a layer's parameters from checkpoint layout into the backend's, in place."""
        pack = ops.PACKERS.get(self.backend)
        if pack is not None:
            weights = self._weights(layer)
            pack(weights, self.expert_activation, out=weights)

    def warm_up(self, layer: Any) -> None:
        """Compile what has to be compiled for a layer, once for each shape."""
        if self.backend == "triton" and host.current_platform.device_type == "cuda":
            triton.warm_up(
                self._weights(layer)._replace(w13_bias=self.w1_bias, w2_bias=self.w2_bias),
                self.expert_activation,
                self.moe_config.experts_per_token,
                self.moe_config.in_dtype,
                layer.expert_map,
            )

    def _weights(self, layer: Any) -> ExpertWeights:
        return ExpertWeights(
            w13=layer.w13_weight.data,
            w13_scale=layer.w13_weight_scale.data,
            w13_scale_2=layer.w13_weight_scale_2.data,
            w2=layer.w2_weight.data,
            w2_scale=layer.w2_weight_scale.data,
            w2_scale_2=layer.w2_weight_scale_2.data,
        )

    @property
    def expects_unquantized_inputs(self) -> bool:
        # Rows are quantized here, after dispatch: their scale must be that of the row as it is.
        return True

    @staticmethod
    def activation_format() -> Any:
        return host.mk.FusedMoEActivationFormat.Standard

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: host.MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return host.TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: host.MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        expert_activation = self.expert_activation
        ops.moe(
            output,
            hidden_states,
            topk_weights,
            topk_ids,
            w1,
            self.w1_scale,
            self.g1_alphas,
            w2,
            self.w2_scale,
            self.g2_alphas,
            self.w1_bias,
            self.w2_bias,
            expert_map,
            expert_activation.name,
            expert_activation.alpha,
            expert_activation.beta,
            expert_activation.limit,
            apply_router_weight_on_input,
            self.backend,
        )

    # What vLLM's own selection would ask; ours is in `choose_experts`.

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: host.MoEActivation) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True
