"""The FusedMoE method: parameters, loading, processing and reload of per-token NVFP4 experts."""

from typing import TYPE_CHECKING, Any

import torch

from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.engine.experts import PerTokenExperts
from vllm_nvfp4_pertoken.engine.loading import ExpertLoading
from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.experts.select import Choice
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

if TYPE_CHECKING:
    from vllm_nvfp4_pertoken.engine.config import NvFp4PerTokenConfig

__all__ = ["ModelOptNvFp4PerTokenMoEMethod"]


class ModelOptNvFp4PerTokenMoEMethod(host.FusedMoEMethodBase):
    """NVFP4 experts whose inputs are quantized with one FP32 scale per token.

    The class name is part of the contract: vLLM's loader takes the ModelOpt paths (one
    ``weight_scale_2`` for gate and one for up, say) for methods that have "ModelOpt" in theirs.
    """

    # Whether the kernel can weigh rows by their router weights before FC1.
    weighs_input = True

    def __init__(
        self,
        quant_config: "NvFp4PerTokenConfig",
        layer: host.RoutedExperts,
        prefix: str,
        choice: Choice,
    ) -> None:
        super().__init__(layer.moe_config)
        self.quant_config = quant_config
        self.prefix = prefix
        self.experts_cls: type = PerTokenExperts
        self.choice = choice
        self.loading = ExpertLoading(layer.moe_config, prefix, quant_config.is_compressed)
        self.experts: PerTokenExperts | None = None

    def uses_weight_scale_2_pattern(self) -> bool:
        return True

    @property
    def supports_eplb(self) -> bool:
        # Everything per-expert is a contiguous parameter with the experts in dimension 0.
        return True

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters in checkpoint layout; none for activation scales."""
        for name, size in (
            ("hidden_size", hidden_size),
            ("intermediate_size per tensor-parallel rank", intermediate_size_per_partition),
        ):
            if size % BLOCK_SIZE:
                raise UnsupportedError(
                    f"{self.prefix}: {name} is {size}",
                    expected=f"a multiple of {BLOCK_SIZE}, the values that share a block scale",
                    way_out="lower --tensor-parallel-size, or use --enable-expert-parallel, which "
                    "keeps experts whole",
                )
        shards = 2 if self.moe.is_act_and_mul else 1
        rows = shards * intermediate_size_per_partition
        load = extra_weight_attrs["weight_loader"]
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "w13_weight": ((num_experts, rows, hidden_size // 2), torch.uint8),
            "w13_weight_scale": (
                (num_experts, rows, hidden_size // BLOCK_SIZE),
                torch.float8_e4m3fn,
            ),
            "w13_weight_scale_2": ((num_experts, shards), torch.float32),
            "w2_weight": (
                (num_experts, hidden_size, intermediate_size_per_partition // 2),
                torch.uint8,
            ),
            "w2_weight_scale": (
                (num_experts, hidden_size, intermediate_size_per_partition // BLOCK_SIZE),
                torch.float8_e4m3fn,
            ),
            "w2_weight_scale_2": ((num_experts,), torch.float32),
        }
        for name, (shape, dtype) in shapes.items():
            data = torch.empty(shape, dtype=dtype)
            loader = self.loading.loader(layer, name, load)
            parameter: Any
            if name.endswith("weight_scale_2"):
                parameter = host.PerTensorScaleParameter(data=data, weight_loader=loader)
                kind = host.FusedMoeWeightScaleSupported.TENSOR
            else:
                parameter = host.ModelWeightParameter(
                    data=data, input_dim=1, output_dim=2, weight_loader=loader
                )
                kind = host.FusedMoeWeightScaleSupported.BLOCK
            parameter.quant_method = kind.value
            layer.register_parameter(name, parameter)
        if self.moe.has_bias:
            for name, size in (("w13_bias", rows), ("w2_bias", hidden_size)):
                # fp32, as it is added to the fp32 accumulator; exact for every checkpoint's dtype.
                bias: Any = torch.nn.Parameter(
                    torch.zeros(num_experts, size, dtype=torch.float32), requires_grad=False
                )
                bias.weight_loader = load
                layer.register_parameter(name, bias)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that everything arrived, clean up, and bring weights into the kernel's layout.

        Runs after the first load and after every reload. Only values change: the kernel object is
        built once, and vLLM copies the processed parameters into the storage that it holds.
        """
        self.quant_config.announce()
        self.loading.finish(layer)
        first = self.moe_kernel is None
        if first:
            self._build_kernel(layer)
        assert self.experts is not None
        self.experts.pack(layer)
        if first:
            self.experts.warm_up(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> host.FusedMoEQuantConfig:
        return host.FusedMoEQuantConfig.make(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            g1_alphas=layer.w13_weight_scale_2,
            g2_alphas=layer.w2_weight_scale_2,
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            weight_dtype="nvfp4",
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
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
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input and self.weighs_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )

    def _build_kernel(self, layer: Any) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize = host.maybe_make_prepare_finalize(
            moe=self.moe,
            quant_config=self.moe_quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
        )
        assert prepare_finalize is not None
        self.experts = PerTokenExperts(
            moe_config=self.moe, quant_config=self.moe_quant_config, backend=self.choice.name
        )
        self.moe_kernel = host.mk.FusedMoEKernel(prepare_finalize, self.experts)
