"""Make ``nvfp4_per_token`` known to vLLM, cheaply: this runs in every vLLM process there is.

vLLM (0.26 and later) has a quantization of this name itself: a shorthand that quantizes BF16
experts while loading, on SM100 only. Two classes are needed to take it over:

- A class under the built-in name, which builds the configuration, also of a checkpoint that is not
  quantized.
- A class under a name of its own, which claims checkpoints for it: vLLM refuses a class under a
  built-in name that overrides the checkpoint's method.

Both import the rest of the engine only when they are used.
"""

from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

__all__ = ["DETECTOR_NAME", "NAME", "register_quantization"]

NAME = "nvfp4_per_token"
DETECTOR_NAME = "nvfp4_per_token_checkpoint"


class _Entry(QuantizationConfig):
    """What both classes share; never instantiated."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        # vLLM looks for these, as ends of paths, where it found no quantization config: a
        # checkpoint that is not quantized. The slash keeps generation_config.json out.
        return ["/config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from vllm_nvfp4_pertoken.engine.config import NvFp4PerTokenConfig

        return NvFp4PerTokenConfig.from_config(config)

    def get_name(self) -> str:  # type: ignore[override]
        raise NotImplementedError

    def get_supported_act_dtypes(self) -> list[Any]:
        raise NotImplementedError

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        raise NotImplementedError


class NvFp4PerTokenEntry(_Entry):
    """Under the built-in name: builds the configuration."""


class NvFp4PerTokenDetector(_Entry):
    """Under its own name: claims every quantized checkpoint that is to be served per-token."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """``"nvfp4_per_token"`` when the user asked for it and the checkpoint can do it.

        Raises:
            CheckpointError: when the user asked for it and the checkpoint cannot; going on would
                serve something else.
        """
        if user_quant != NAME:
            return None
        from vllm_nvfp4_pertoken.checkpoints.quant_config import parse_quant_config

        path = getattr(hf_config, "_name_or_path", "") or "the checkpoint"
        parse_quant_config(hf_quant_cfg, source=f"the quantization config of {path}")
        return NAME


def register_quantization() -> None:
    """Register both classes. Safe to call again."""
    register_quantization_config(NAME)(NvFp4PerTokenEntry)
    register_quantization_config(DETECTOR_NAME)(NvFp4PerTokenDetector)
