"""Dense NVFP4 layers: per-token, or with static scales on vLLM's kernels where it has some."""

from typing import TYPE_CHECKING, Any

import torch

from vllm_nvfp4_pertoken.checkpoints.scales import damaged_scales, invert_, zero_dead_blocks
from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.engine.quantizing import QuantizingLinearLoader
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.experts import cpu, ops
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

if TYPE_CHECKING:
    from vllm_nvfp4_pertoken.engine.config import NvFp4PerTokenConfig

_E4M3_NAN = 0x7F

__all__ = ["PerTokenLinearMethod", "StaticLinearMethod", "make_linear_method"]

_WAY_OUT = (
    "leave the option 'linear' out, so that dense layers run per-token, without an input_scale"
)


def make_linear_method(quant_config: "NvFp4PerTokenConfig", mode: str, prefix: str) -> Any:
    """The method of one dense NVFP4 layer; ``mode`` is the option ``linear``."""
    # vLLM has NVFP4 linears for GPUs only.
    if mode == "static" and host.current_platform.device_type != "cpu":
        return StaticLinearMethod(quant_config, prefix)
    return PerTokenLinearMethod(quant_config, prefix, static=mode == "static")


def _check_input_scale(scales: torch.Tensor, prefix: str) -> None:
    if bool((scales.isfinite() & (scales > 0)).all()):
        return
    raise CheckpointError(
        f"{prefix}: input_scale is {scales.tolist()} (nan: absent, or not a number)",
        expected="a positive, finite input_scale for every dense NVFP4 layer",
        way_out=f"{_WAY_OUT}; or calibrate the checkpoint",
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
        self.quant_config.quantizing_loader(layer, self.prefix, static=True)  # refuses

    def process_weights_after_loading(self, layer: Any) -> None:
        self.quant_config.announce()
        _check_input_scale(layer.input_scale.data, self.prefix)
        weight_scale_2 = layer.weight_scale_2.data
        if bool((weight_scale_2 != weight_scale_2[0]).any()):
            raise CheckpointError(
                f"{self.prefix}: its parts have different weight_scale_2, "
                f"{weight_scale_2.tolist()}, and the static kernels know one per layer",
                expected="one weight_scale_2 for projections that are served as one layer",
                way_out=f"{_WAY_OUT}, each part with its own scale",
            )
        super().process_weights_after_loading(layer)


@host.register_weight_loader_v2_supported_method
class PerTokenLinearMethod(host.LinearMethodBase):
    """A dense NVFP4 layer on our kernels; every part (q, k and v, say) keeps its own scales.

    Args:
        static: quantize with the checkpoint's ``input_scale``, on the torch reference, as a CPU
            needs it; else with one scale per token, and no ``input_scale`` is read.
    """

    def __init__(
        self, quant_config: "NvFp4PerTokenConfig", prefix: str, static: bool = False
    ) -> None:
        self.quant_config = quant_config
        self.prefix = prefix
        self.static = static
        self.backend = "reference"
        self._loader: QuantizingLinearLoader | None = None

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
        compiled = host.current_platform.device_type == "cpu" and cpu.available()[0]
        if compiled and not self.static and cpu.can_pack_linear(output_partition_sizes):
            self.backend = "cpu"
        loader = extra_weight_attrs.get("weight_loader")
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        for name, columns, dtype in (
            ("weight", input_size_per_partition // 2, torch.uint8),
            ("weight_scale", input_size_per_partition // BLOCK_SIZE, torch.float8_e4m3fn),
        ):
            data = torch.empty(rows, columns, dtype=torch.uint8)
            data.fill_(_E4M3_NAN)  # so that absent scales are noticed
            layer.register_parameter(
                name,
                host.ModelWeightParameter(
                    data=data.view(dtype), input_dim=1, output_dim=0, weight_loader=loader
                ),
            )
        # Scales of layers in other formats cannot be told from ours by name, so that all arrive.
        with_input_scale = self.static or self.quant_config.keeps_input_scales
        for name in ("weight_scale_2", "input_scale") if with_input_scale else ("weight_scale_2",):
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

        self._loader = self.quant_config.quantizing_loader(layer, self.prefix, self.static)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.quant_config.announce()
        try:
            self._check(layer)
        except CheckpointError as error:
            raise host.reload_failed(error) from None
        if self.backend == "cpu":
            cpu.pack_linear(layer.weight.data, layer.weight_scale.data)

    def _check(self, layer: Any) -> None:
        """That all is there and sane; second scales become ModelOpt's, blocks of zeros zero."""
        assert self._loader is not None
        self._loader.finish()
        scale_2 = layer.weight_scale_2.data
        if self.quant_config.is_compressed:
            invert_(scale_2)
        if not bool((scale_2.isfinite() & (scale_2 >= 0)).all()):
            raise CheckpointError(
                f"{self.prefix}: weight_scale_2 is {scale_2.tolist()} (nan: absent, or a "
                "weight_global_scale without an inverse)",
                expected="a finite weight_scale_2, or a positive weight_global_scale, for every "
                "part of the layer",
                way_out="export or send the checkpoint again",
            )
        parts = layer.weight_scale.data.split(layer.logical_widths)
        for part, (part_scale_2, blocks) in enumerate(zip(scale_2, parts, strict=True)):
            zero_dead_blocks(part_scale_2, blocks)
            if bool(damaged_scales(blocks)):
                raise CheckpointError(
                    f"{self.prefix}: part {part} of {len(parts)} has a weight_scale that is NaN "
                    "(absent, or not a number) or negative in places",
                    expected="a weight_scale of positive numbers for every part of the layer",
                    way_out="export or send the checkpoint again",
                )
        if self.static:
            _check_input_scale(layer.input_scale.data, self.prefix)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = ops.linear(
            x.reshape(-1, x.shape[-1]),
            layer.weight,
            layer.weight_scale,
            layer.weight_scale_2,
            layer.logical_widths,
            layer.input_scale if self.static else None,
            self.backend,
        )
        if bias is not None:
            out = out + bias
        return out.reshape(*x.shape[:-1], out.shape[-1])
