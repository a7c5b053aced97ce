"""Experts on Blackwell: vLLM's own classes around FlashInfer's kernels, with per-token scales on.

vLLM's classes run in its CI on such GPUs. Ours is what feeds them: the choice, the parameters,
their layout, and what is derived from them. Nothing is folded into the weights' scales: per-token
mode is vLLM's static mode with input scales of 1, and rows quantized on the way in.
"""

from typing import Any

import torch

from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.engine.moe import ModelOptNvFp4PerTokenMoEMethod
from vllm_nvfp4_pertoken.experts.select import Choice

__all__ = ["ModelOptNvFp4FlashInferMoEMethod"]


class ModelOptNvFp4FlashInferMoEMethod(ModelOptNvFp4PerTokenMoEMethod):
    """NVFP4 experts on ``flashinfer_trtllm``; named as its parent is."""

    # vLLM's classes hand the weights to the kernel in any case, which would weigh twice.
    weighs_input = False

    def __init__(self, quant_config: Any, layer: Any, prefix: str, choice: Choice) -> None:
        # CuTe-DSL kernels take one scale for gate and up, and SwiGLU's parameters.
        assert choice.name == "flashinfer_trtllm", choice.name
        super().__init__(quant_config, layer, prefix, choice)
        self.nvfp4_backend, self.experts_cls = host.flashinfer_experts(choice.name, choice.routes)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything arrived, and bring it into the kernel's layout.

        vLLM's layerwise reload hands in new tensors, and copies them afterwards into the storage
        that the kernel and CUDA graphs hold. So the kernel is built once, and everything derived
        from weights is a parameter that every call registers anew, from the new tensors.
        """
        self.quant_config.announce()
        self.loading.finish(layer)
        gate_scale, up_scale = self._w13_scales(layer)
        ones = torch.ones_like(gate_scale)
        w13, w13_scale, _, _, w2, w2_scale, _, _ = host.convert_to_nvfp4_moe_kernel_format(
            nvfp4_backend=self.nvfp4_backend,
            layer=layer,
            w13=layer.w13_weight,
            w13_scale=layer.w13_weight_scale,
            w13_scale_2=gate_scale,
            a13_scale=ones,
            w2=layer.w2_weight,
            w2_scale=layer.w2_weight_scale,
            w2_scale_2=layer.w2_weight_scale_2,
            a2_scale=ones,
            is_act_and_mul=self.moe.is_act_and_mul,
            trtllm_hidden_alignment=host.trtllm_nvfp4_hidden_alignment(
                per_token_activation=True, is_act_and_mul=self.moe.is_act_and_mul
            ),
        )
        for name, tensor in (
            ("w13_weight", w13),
            ("w13_weight_scale", w13_scale),
            ("w13_weight_scale_2", gate_scale),
            ("w2_weight", w2),
            ("w2_weight_scale", w2_scale),
        ):
            host.replace_parameter(layer, name, tensor)
        quant_config = self.get_fused_moe_quant_config(layer)
        if self.moe_kernel is None:
            self.moe_quant_config = quant_config
            self.moe_kernel = host.make_nvfp4_moe_kernel(
                moe_quant_config=quant_config,
                moe_config=self.moe,
                experts_cls=self.experts_cls,
                backend=self.nvfp4_backend,
                routing_tables=layer._expert_routing_tables(),
                per_token_activation=True,
            )
            experts = self.moe_kernel.fused_experts
        else:
            # The one that serves looks at the old tensors, and would derive old scales from them.
            experts = self.experts_cls(
                moe_config=self.moe, quant_config=quant_config, per_token_activation=True
            )
        self._derive(layer, experts, up_scale)

    def get_fused_moe_quant_config(self, layer: Any) -> host.FusedMoEQuantConfig:
        ones = torch.ones_like(layer.w13_weight_scale_2)
        return host.make_nvfp4_moe_quant_config(
            backend=self.nvfp4_backend,
            w13_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            w13_scale_2=layer.w13_weight_scale_2,
            w2_scale_2=layer.w2_weight_scale_2,
            a13_scale=ones,
            a2_scale=ones,
            layer=layer,
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> Any:
        if layer.apply_router_weight_on_input:
            if shared_experts is not None and shared_experts_input is None:
                shared_experts_input = x
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> Any:
        assert self.moe_kernel is not None
        if x.shape[0] == 0:  # the kernel does not take it
            return torch.empty_like(x)
        return self.moe_kernel.apply_monolithic(
            x,
            layer.w13_weight,
            layer.w2_weight,
            router_logits,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            num_expert_group=layer.num_expert_group,
            topk_group=layer.topk_group,
            e_score_correction_bias=layer.e_score_correction_bias,
            routed_scaling_factor=layer.routed_scaling_factor,
            routing_sink=layer.routing_sink,
        )

    def _w13_scales(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``weight_scale_2`` of gate and up, float32 [E]; of the only half, twice.

        A matrix of zeros, whose scale is 0, takes its sibling's or 1: any scale does.
        """
        scales = layer.w13_weight_scale_2.data
        gate, up = scales[:, 0], scales[:, -1]
        gate, up = torch.where(gate == 0, up, gate), torch.where(up == 0, gate, up)
        gate, up = torch.where(gate == 0, 1, gate), torch.where(up == 0, 1, up)
        return gate.contiguous(), up.contiguous()

    def _derive(self, layer: Any, experts: Any, up_scale: torch.Tensor) -> None:
        """Register what vLLM derives from the scales, with input scales of 1.

        trtllm-gen computes ``(up * g1_scale_c) * silu(gate * g1_alphas)`` from raw accumulators
        (FlashInfer's ``batched_gemm/KernelRunner.h``), so gate and up keep a scale each. vLLM
        fills both with the gate's.
        """
        layer.w13_input_scale = torch.ones_like(up_scale)
        layer.w2_input_scale = torch.ones_like(up_scale)
        try:
            experts.process_weights_after_loading(layer)
        finally:
            del layer.w13_input_scale, layer.w2_input_scale
        if self.moe.is_act_and_mul:
            layer.g1_scale_c.data.copy_(up_scale)
