"""Dense NVFP4 layers: vLLM's kernels where it has some, the torch reference elsewhere."""

from typing import TYPE_CHECKING, Any

import torch

from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.experts.linear import linear_forward
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

if TYPE_CHECKING:
    from vllm_nvfp4_pertoken.engine.config import NvFp4PerTokenConfig

__all__ = ["StaticLinearMethod", "TorchLinearMethod", "make_linear_method"]

_PER_TOKEN_OPTION = '--additional-config \'{"nvfp4_per_token": {"linear": "per_token"}}\''


def make_linear_method(quant_config: "NvFp4PerTokenConfig", mode: str, prefix: str) -> Any:
    """The method of one dense NVFP4 layer; ``mode`` is the option ``linear``."""
    # vLLM has NVFP4 linears for GPUs only.
    if mode == "static" and host.current_platform.device_type != "cpu":
        return StaticLinearMethod(quant_config, prefix)
    return TorchLinearMethod(quant_config, prefix, static=mode == "static")


def _check_input_scale(scales: torch.Tensor, prefix: str) -> None:
    if bool((scales.isfinite() & (scales > 0)).all()):
        return
    raise CheckpointError(
        f"{prefix}: input_scale is {scales.tolist()} (nan: absent, or not a number)",
        expected="a positive, finite input_scale for every dense NVFP4 layer",
        way_out=f"run dense layers per-token as well, with {_PER_TOKEN_OPTION}; or calibrate the "
        "checkpoint; or leave these layers unquantized in it",
    )


@host.register_weight_loader_v2_supported_method
class StaticLinearMethod(host.ModelOptLinearMethod):
    """vLLM's NVFP4 linear with the checkpoint's static ``input_scale``, which must be usable."""

    def __init__(self, quant_config: "NvFp4PerTokenConfig", prefix: str) -> None:
        super().__init__(*host.resolve("NVFP4", quant_config, prefix))
        self.quant_config = quant_config
        self.prefix = prefix

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        # vLLM leaves it uninitialized, and an absent scale would become whatever was in memory.
        layer.input_scale.data.fill_(float("nan"))

    def process_weights_after_loading(self, layer: Any) -> None:
        self.quant_config.announce()
        _check_input_scale(layer.input_scale.data, self.prefix)
        weight_scale_2 = layer.weight_scale_2.data
        if bool((weight_scale_2 != weight_scale_2[0]).any()):
            raise CheckpointError(
                f"{self.prefix}: its parts have different weight_scale_2, "
                f"{weight_scale_2.tolist()}, and the static kernels know one per layer",
                expected="one weight_scale_2 for projections that are served as one layer",
                way_out=f"run dense layers per-token, with {_PER_TOKEN_OPTION}, which keeps "
                "each part's own scale",
            )
        super().process_weights_after_loading(layer)


@host.register_weight_loader_v2_supported_method
class TorchLinearMethod(host.LinearMethodBase):
    """A dense NVFP4 layer on the torch reference; every part keeps its own scales.

    Args:
        static: quantize with the checkpoint's ``input_scale``; else with one scale per token, and
            no parameter for an input scale exists.
    """

    def __init__(self, quant_config: "NvFp4PerTokenConfig", prefix: str, static: bool) -> None:
        self.quant_config = quant_config
        self.prefix = prefix
        self.static = static

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if input_size_per_partition % BLOCK_SIZE:
            raise UnsupportedError(
                f"{self.prefix}: {input_size_per_partition} input features on each rank",
                expected=f"a multiple of {BLOCK_SIZE}, the values that share a block scale",
                way_out="lower --tensor-parallel-size",
            )
        loader = extra_weight_attrs.get("weight_loader")
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        for name, columns, dtype in (
            ("weight", input_size_per_partition // 2, torch.uint8),
            ("weight_scale", input_size_per_partition // BLOCK_SIZE, torch.float8_e4m3fn),
        ):
            layer.register_parameter(
                name,
                host.ModelWeightParameter(
                    data=torch.empty(rows, columns, dtype=dtype),
                    input_dim=1,
                    output_dim=0,
                    weight_loader=loader,
                ),
            )
        for name in ("weight_scale_2", "input_scale") if self.static else ("weight_scale_2",):
            layer.register_parameter(
                name,
                host.PerTensorScaleParameter(
                    # Not a number until it is loaded, so that an absent one is noticed.
                    data=torch.full(
                        (len(output_partition_sizes),), float("nan"), dtype=torch.float32
                    ),
                    weight_loader=loader,
                ),
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        self.quant_config.announce()
        scale_2 = layer.weight_scale_2.data
        if not bool((scale_2.isfinite() & (scale_2 >= 0)).all()):
            raise CheckpointError(
                f"{self.prefix}: weight_scale_2 is {scale_2.tolist()} (nan: absent)",
                expected="a finite weight_scale_2 for every part of the layer",
                way_out="export or send the checkpoint again",
            )
        if self.static:
            _check_input_scale(layer.input_scale.data, self.prefix)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = linear_forward(
            x.reshape(-1, x.shape[-1]),
            layer.weight,
            layer.weight_scale,
            layer.weight_scale_2,
            layer.logical_widths,
            layer.input_scale if self.static else None,
        )
        if bias is not None:
            out = out + bias
        return out.reshape(*x.shape[:-1], out.shape[-1])
