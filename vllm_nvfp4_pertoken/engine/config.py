"""The quantization configuration: which layers run how, and what is checked before they do."""

import re
from pathlib import Path
from typing import Any

import torch

from vllm_nvfp4_pertoken.checkpoints.quant_config import QuantDescription, parse_quant_config
from vllm_nvfp4_pertoken.checkpoints.verify import fingerprint, verify_checkpoint
from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.engine.linear import make_linear_method
from vllm_nvfp4_pertoken.engine.moe import ModelOptNvFp4PerTokenMoEMethod
from vllm_nvfp4_pertoken.engine.options import Options
from vllm_nvfp4_pertoken.engine.registration import NAME
from vllm_nvfp4_pertoken.errors import CheckpointError, PerTokenError

__all__ = ["NvFp4PerTokenConfig"]

logger = host.init_logger("vllm.nvfp4_per_token")

# Expert activation scales as checkpoints name them: `experts.3.up_proj.input_scale`, or fused
# `experts.gate_up_proj_input_scale`.
_EXPERT_INPUT_SCALE = re.compile(r"\bexperts\..*input_scale$")
_ANY_INPUT_SCALE = re.compile(r"\binput_scale$|_input_scale$")


class _KVCacheMethod(host.ModelOptKVCacheMethod):
    """Stock handling of KV-cache scales; every model has one, so it also makes the announcement."""

    quant_config: "NvFp4PerTokenConfig"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.quant_config.announce()
        super().process_weights_after_loading(layer)


class NvFp4PerTokenConfig(host.ModelOptNvFp4Config):
    """ModelOpt NVFP4 whose experts run with per-token activation scales.

    Excluded modules, KV-cache scales and names are handled as vLLM does for ModelOpt; what differs
    is which methods the layers get, and that nothing is served when something is missing.
    """

    KVCacheMethodCls = _KVCacheMethod

    def __init__(self, description: QuantDescription) -> None:
        super().__init__(
            quant_method=description.quant_algo,
            is_checkpoint_nvfp4_serialized=True,
            kv_cache_quant_algo=description.kv_cache_quant_algo,
            exclude_modules=list(description.exclude_modules),
            group_size=description.group_size,
        )
        host.warn_outside_tested_window()
        self.options: Options | None = None
        self.moe_methods: dict[str, ModelOptNvFp4PerTokenMoEMethod] = {}
        self.linear_layers: list[str] = []
        self._announced = False
        # The engine's model config, whose `model` says where a reload reads from.
        self._model_config: Any = None
        # Path and state of the files that were found complete.
        self._verified: tuple[str, Any] | None = None

    # vLLM sets this after `from_config`, because the name is also its shorthand for quantizing
    # BF16 layers while loading, and would then refuse experts that are quantized already.
    @property
    def online_quantization_config(self) -> None:  # type: ignore[override]
        return None

    @online_quantization_config.setter
    def online_quantization_config(self, value: Any) -> None:
        pass

    def get_name(self) -> str:  # type: ignore[override]
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NvFp4PerTokenConfig":
        return cls(parse_quant_config(config, source="the checkpoint's quantization config"))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """vLLM's hook between configuration and model: check the files before anything starts."""
        self._verify_files(model_name)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of one layer: per-token experts, a dense method, or unquantized."""
        if self.options is None:
            vllm_config = host.get_current_vllm_config()
            self.options = Options.from_additional_config(vllm_config.additional_config)
            self._model_config = vllm_config.model_config
        if isinstance(layer, host.RoutedExperts) and not self.is_layer_excluded(prefix):
            method = ModelOptNvFp4PerTokenMoEMethod(self, layer.moe_config, prefix)
            self.moe_methods[prefix] = method
            return method
        dense = isinstance(layer, (host.LinearBase, host.ParallelLMHead))
        if dense and self._is_nvfp4(prefix):
            self.linear_layers.append(prefix)
            return make_linear_method(self, self.options.linear, prefix)
        return super().get_quant_method(layer, prefix)

    def _is_nvfp4(self, prefix: str) -> bool:
        """Whether a dense layer is NVFP4: not excluded, and not part of a vision tower."""
        towers = ("vision_tower", "vision_model", "vit_large_projector")
        return not self.is_layer_excluded(prefix) and not any(name in prefix for name in towers)

    def get_checkpoint_weight_mapper(self) -> Any:  # type: ignore[override]
        """vLLM asks for this when weights start to flow: drop the scales that nothing reads.

        A reload comes through here before it touches the first layer, which makes it the place to
        look at the new files: if they are not whole, the old weights stay.
        """
        if self._model_config is not None:
            try:
                self._verify_files(self._model_config.model)
            except PerTokenError as error:
                # Later reloads without a path read the files of the weights that are in place.
                if self._verified is not None:
                    self._model_config.model = self._verified[0]
                raise host.reload_failed(error) from None
        per_token_linear = self.options is not None and self.options.linear == "per_token"
        pattern = _ANY_INPUT_SCALE if per_token_linear else _EXPERT_INPUT_SCALE
        dropped = host.WeightsMapper(orig_to_new_regex={pattern: None})
        return super().get_checkpoint_weight_mapper() | dropped

    def announce(self) -> None:
        """Once all layers exist: refuse a model without per-token layers, or say what runs."""
        if self._announced:
            return
        self._announced = True
        if not self.moe_methods:
            raise CheckpointError(
                "the model has no MoE layer with NVFP4 experts (excluded modules: "
                f"{', '.join(self.exclude_modules) or 'none'})",
                expected="a mixture-of-experts model whose experts are NVFP4",
                way_out="serve it without --quantization nvfp4_per_token",
            )
        choice = next(iter(self.moe_methods.values())).choice
        assert self.options is not None
        dense = {
            "static": "with the checkpoint's static input_scale",
            "per_token": "per-token, on the torch reference",
        }[self.options.linear]
        logger.info_once(
            "nvfp4_per_token: %d MoE layers with per-token activation scales on the %s experts "
            "(%s), activation scales of the checkpoint ignored; %d dense NVFP4 layers%s.",
            len(self.moe_methods),
            choice.name,
            choice.reason,
            len(self.linear_layers),
            f" {dense}" if self.linear_layers else "",
        )
        if choice.warning:
            logger.warning_once("nvfp4_per_token: %s", choice.warning)

    def _verify_files(self, model: str) -> None:
        """Check the checkpoint's headers, unless the same files were found complete before."""
        path = Path(model)
        if not path.is_dir():
            if path.is_absolute() or model.startswith("."):
                raise CheckpointError(
                    f"{model} is not a directory",
                    expected="a checkpoint directory",
                    way_out="check the path; it must exist on the server's machine",
                )
            return  # on a hub: the loader downloads it and every expert tensor is counted then
        state = (model, fingerprint(path))
        if state == self._verified:
            return
        verify_checkpoint(path)
        self._verified = state
