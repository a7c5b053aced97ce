"""The quantization configuration: which layers run how, and what is checked before they do."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_nvfp4_pertoken.checkpoints.compressed import renamed
from vllm_nvfp4_pertoken.checkpoints.decide import DRAFT, serve_as
from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader, fingerprint, read_headers
from vllm_nvfp4_pertoken.checkpoints.layout import COMPRESSED_KINDS
from vllm_nvfp4_pertoken.checkpoints.modules import NVFP4_ALGORITHMS, is_excluded, stored_formats
from vllm_nvfp4_pertoken.checkpoints.quant_config import (
    COMPRESSED_TENSORS,
    MODELOPT,
    UNQUANTIZED,
    QuantDescription,
    complete_description,
    parse_quant_config,
)
from vllm_nvfp4_pertoken.checkpoints.verify import verify_checkpoint
from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.engine.announcement import what_runs
from vllm_nvfp4_pertoken.engine.experts import choose_experts
from vllm_nvfp4_pertoken.engine.flashinfer import ModelOptNvFp4FlashInferMoEMethod
from vllm_nvfp4_pertoken.engine.linear import make_linear_method
from vllm_nvfp4_pertoken.engine.moe import ModelOptNvFp4PerTokenMoEMethod
from vllm_nvfp4_pertoken.engine.online import OnlinePlan
from vllm_nvfp4_pertoken.engine.options import Options
from vllm_nvfp4_pertoken.engine.quantizing import QuantizingLinearLoader
from vllm_nvfp4_pertoken.engine.registration import NAME
from vllm_nvfp4_pertoken.errors import CheckpointError, PerTokenError, UnsupportedError

__all__ = ["NvFp4PerTokenConfig"]

logger = host.init_logger("vllm.nvfp4_per_token")

# Expert activation scales as checkpoints name them: `experts.3.up_proj.input_scale`, or fused
# `experts.gate_up_proj_input_scale`.
_EXPERT_INPUT_SCALE = re.compile(r"\bexperts\..*input_scale$")
_ANY_INPUT_SCALE = re.compile(r"\binput_scale$|_input_scale$")
# compressed-tensors' names to ours; its activation scales have no parameter either.
_COMPRESSED: dict[re.Pattern[str], str | None] = {
    re.compile(rf"\.{theirs}$"): f".{ours}"
    for ours, theirs in COMPRESSED_KINDS.items()
    if ours != theirs
}
_COMPRESSED[re.compile(r"\.input_global_scale$")] = None


class _KVCacheMethod(host.ModelOptKVCacheMethod):
    """Stock handling of KV-cache scales; every model has one, so it also makes the announcement."""

    quant_config: "NvFp4PerTokenConfig"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.quant_config.announce()
        super().process_weights_after_loading(layer)


class _CompressedKVCacheMethod(host.CompressedTensorsKVCacheMethod):
    """The same for compressed-tensors; reads ``kv_cache_scheme`` of the config."""

    quant_config: "NvFp4PerTokenConfig"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.quant_config.announce()
        super().process_weights_after_loading(layer)


class NvFp4PerTokenConfig(host.ModelOptNvFp4Config):
    """NVFP4 whose experts run with per-token activation scales.

    KV-cache scales and names are handled as vLLM does for ModelOpt or compressed-tensors; what
    differs is which methods the layers get, and that nothing is served when something is missing.
    """

    # Under the names that vLLM's compressed-tensors config has; None for ModelOpt.
    kv_cache_scheme: dict[str, Any] | None = None
    total_num_heads: int | None = None
    total_num_kv_heads: int | None = None

    def __init__(self, description: QuantDescription) -> None:
        super().__init__(
            quant_method="NVFP4",
            is_checkpoint_nvfp4_serialized=True,
            kv_cache_quant_algo=description.kv_cache_quant_algo,
            exclude_modules=list(description.exclude_modules),
            group_size=description.group_size,
        )
        host.warn_outside_tested_window()
        self.description = description
        self.quantized_layers = dict(description.layers)
        # Name, dtype and dimensions of every tensor of the checkpoint, where they can be had
        # before loading; and the formats of the modules that they belong to.
        self._tensors: list[tuple[str, str, int]] = []
        self._stored: dict[str, str] | None = None
        # Modules that are stored in another format than the config says.
        self.contradictions: dict[str, str] = {}
        self.options: Options | None = None
        # Of an unquantized checkpoint: its config.json and headers, and what is quantized.
        self._hf_config: dict[str, Any] = {}
        self._headers: dict[str, TensorHeader] = {}
        self._rename: Callable[[str], str | None] = str
        self.online: OnlinePlan | None = None
        self.moe_methods: dict[str, ModelOptNvFp4PerTokenMoEMethod] = {}
        self.linear_methods: dict[str, Any] = {}
        self.other_formats = Counter[str]()
        self._is_draft = False
        self._ties_head = False
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
        description = parse_quant_config(config, source="the checkpoint's quantization config")
        self = cls(description)
        if self.is_compressed:
            self.kv_cache_scheme = config.get("kv_cache_scheme")
            # vLLM puts them there.
            self.total_num_heads = config.get("total_num_heads")
            self.total_num_kv_heads = config.get("total_num_kv_heads")
        return self

    @property
    def is_compressed(self) -> bool:
        """Whether the checkpoint is compressed-tensors': other names, and inverse second scales."""
        return self.description.dialect == COMPRESSED_TENSORS

    @property
    def is_online(self) -> bool:
        """Whether the checkpoint is unquantized, and quantized while it loads."""
        return self.description.dialect == UNQUANTIZED

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """vLLM's hook between configuration and model: read all that the files say.

        Both configs are brought together, and the checkpoint's headers are checked.
        """
        if self.is_online:
            self._hf_config = hf_config.to_dict() if hf_config is not None else {}
        else:
            self._complete_description(model_name, revision)
        self._verify_files(model_name)
        if not Path(model_name).is_dir():  # on a hub; empty when it cannot be reached
            metadata = host.get_safetensors_params_metadata(model_name, revision=revision)
            self._note_headers(
                TensorHeader(name, str(tensor["dtype"]), tuple(tensor["shape"]), Path(model_name))
                for name, tensor in metadata.items()
            )

    def _note_headers(self, headers: Iterable[TensorHeader]) -> None:
        headers = list(headers)
        self._tensors = [(h.name, h.dtype, len(h.shape)) for h in headers]
        if self.is_online:
            self._headers = {header.name: header for header in headers}

    def _complete_description(self, model_name: str, revision: str | None) -> None:
        legacy = host.get_hf_file_to_dict("hf_quant_config.json", model_name, revision)
        self.description, disagreements = complete_description(self.description, legacy, model_name)
        for disagreement in disagreements:
            logger.warning_once("nvfp4_per_token: %s.", disagreement)
        self.quantized_layers = dict(self.description.layers)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Bring names of the checkpoint into the engine's words; vLLM calls this per model."""
        self._rename = hf_to_vllm_mapper.map_name
        if self.is_compressed:
            names = renamed(self.exclude_modules, hf_to_vllm_mapper.map_name)
            self.exclude_modules = list(names.values())
            targets = renamed(self.quantized_layers, hf_to_vllm_mapper.map_name)
            self.quantized_layers = {
                new: self.quantized_layers[old] for old, new in targets.items()
            }
        else:
            super().apply_vllm_mapper(hf_to_vllm_mapper)
            self.quantized_layers = hf_to_vllm_mapper.apply_dict(self.quantized_layers)
        mapped = ((hf_to_vllm_mapper.map_name(name), *rest) for name, *rest in self._tensors)
        self._tensors = [(name, *rest) for name, *rest in mapped if name is not None]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of one layer: per-token, another format of the checkpoint, or none."""
        self._look_at_engine()
        if isinstance(layer, (host.Attention, host.MLAAttention)):
            if self.is_compressed:
                return _CompressedKVCacheMethod(self)  # type: ignore[arg-type]
            return _KVCacheMethod(self)
        if not isinstance(layer, (host.RoutedExperts, host.LinearBase, host.ParallelLMHead)):
            return None
        algorithm = self._algorithm(layer, prefix)
        dense = not isinstance(layer, host.RoutedExperts)
        if algorithm is None:
            return host.UnquantizedLinearMethod() if dense else None
        if algorithm not in NVFP4_ALGORITHMS:
            self.other_formats[algorithm] += 1
            return host.stock_method(layer, prefix, algorithm, self.description.kv_cache_quant_algo)
        if dense:
            assert self.options is not None
            self.linear_methods[prefix] = make_linear_method(self, self.options.linear, prefix)
            return self.linear_methods[prefix]
        assert isinstance(layer, host.RoutedExperts)
        choice = choose_experts(layer, layer.moe_config, prefix)
        on_flashinfer = choice.name.startswith("flashinfer")
        method_cls = (
            ModelOptNvFp4FlashInferMoEMethod if on_flashinfer else ModelOptNvFp4PerTokenMoEMethod
        )
        method = method_cls(self, layer, prefix, choice)
        self.moe_methods[prefix] = method
        return method

    def quantizing_loader(self, layer: Any, prefix: str, static: bool) -> QuantizingLinearLoader:
        """Have a dense layer quantize weights that arrive unquantized, or refuse them."""
        return QuantizingLinearLoader(
            layer,
            prefix,
            self.packed_modules_mapping,
            self._stored or (),
            inverse=self.is_compressed,
            static=static,
        )

    @property
    def keeps_input_scales(self) -> bool:
        """Whether layers in other formats need theirs, which a mapper by name cannot tell apart."""
        return not set(self.quantized_layers.values()).issubset(NVFP4_ALGORITHMS)

    def is_layer_excluded(self, prefix: str) -> bool:
        """As vLLM's, but names match at dots only; see ``checkpoints/modules.py``."""
        return is_excluded(prefix, self.exclude_modules, self.packed_modules_mapping)

    def _look_at_engine(self) -> None:
        """Once, with the first layer: options, and what else the engine was started with."""
        if self.options is not None:
            return
        vllm_config = host.get_current_vllm_config()
        self.options = Options.from_additional_config(vllm_config.additional_config)
        self._model_config = vllm_config.model_config
        # The layers of a draft have a quantization config of their own.
        self._is_draft = (
            vllm_config.quant_config is not self or vllm_config.model_config.runner_type == "draft"
        )
        text_config = vllm_config.model_config.hf_text_config
        self._ties_head = bool(getattr(text_config, "tie_word_embeddings", False))
        self._stored = stored_formats(self._tensors)
        if self.is_online:
            self.online = OnlinePlan(
                self._model_config, self.options, self._hf_config, self._headers, self._rename
            )
        elif self.options.bf16 == "all" or self.options.exclude:
            raise UnsupportedError(
                "the options 'bf16' and 'exclude' say what is quantized while loading, and the "
                "checkpoint is quantized already",
                expected="these options with a BF16 or FP16 checkpoint",
                way_out="leave them out",
            )
        if self.description.dialect != MODELOPT and self.options.linear == "static":
            raise UnsupportedError(
                "the option 'linear' is 'static', and the checkpoint is "
                + ("unquantized" if self.is_online else "compressed-tensors'"),
                expected="linear: per_token for all but ModelOpt's checkpoints",
                way_out="leave the option out",
            )
        cache_dtype, scheme = vllm_config.cache_config.cache_dtype, self.kv_cache_quant_algo
        # Of compressed-tensors, vLLM's attention layers take the scheme over by themselves.
        if scheme is not None and cache_dtype == "auto" and not self.is_compressed:
            logger.warning_once(
                "nvfp4_per_token: the checkpoint was made for a KV cache in %s, and the engine "
                "runs it in the model's dtype; --kv-cache-dtype %s chooses.",
                scheme,
                scheme.lower(),
            )

    def _algorithm(self, layer: torch.nn.Module, prefix: str) -> str | None:
        """How a layer's weight is quantized; modules that contradict the config are noted."""
        if self.online is not None:
            # Drafts stay as they are, as conversion leaves them.
            experts = isinstance(layer, host.RoutedExperts)
            names = self.packed_modules_mapping
            quantized = not self._is_draft and self.online.quantizes(prefix, experts, names)
            return "NVFP4" if quantized else None
        assert self._stored is not None
        # The same, in the engine's words.
        description = replace(
            self.description,
            exclude_modules=tuple(self.exclude_modules),
            layers=self.quantized_layers,
        )
        tied = isinstance(layer, host.ParallelLMHead) and self._ties_head
        served = serve_as(
            prefix, description, self._stored, self.packed_modules_mapping, tied_head=tied
        )
        if served.contradiction is not None:
            self.contradictions[prefix] = served.contradiction
        return served.algorithm

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
        assert self.options is not None
        drop_all = self.options.linear == "per_token" and not self.keeps_input_scales
        pattern = _ANY_INPUT_SCALE if drop_all else _EXPERT_INPUT_SCALE
        renames = {**_COMPRESSED, pattern: None} if self.is_compressed else {pattern: None}
        if not self._is_draft:
            # Layers of a draft beside the model's own, which most models do not expect.
            renames[DRAFT] = None
        return super().get_checkpoint_weight_mapper() | host.WeightsMapper(
            orig_to_new_regex=renames
        )

    def announce(self) -> None:
        """Once all layers exist: refuse a model without per-token layers, or say what runs."""
        if self._announced:
            return
        self._announced = True
        if self.contradictions:
            shown = [f"{name} ({form})" for name, form in self.contradictions.items()]
            logger.warning_once(
                "nvfp4_per_token: %d modules are not stored as the checkpoint's config says, and "
                "are served as they are stored: %s%s.",
                len(shown),
                ", ".join(shown[:5]),
                ", …" if len(shown) > 5 else "",
            )
        if not self.moe_methods:
            if self._is_draft:
                return
            raise CheckpointError(
                "the model has no MoE layer with NVFP4 experts (excluded modules: "
                f"{', '.join(self.exclude_modules) or 'none'})",
                expected="a mixture-of-experts model whose experts are NVFP4",
                way_out="serve it without --quantization nvfp4_per_token",
            )
        assert self.options is not None
        logger.info_once("%s", what_runs(self))
        for warning in dict.fromkeys(m.choice.warning for m in self.moe_methods.values()):
            if warning:
                logger.warning_once("nvfp4_per_token: %s", warning)

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
        headers = read_headers(path)
        if not self.is_online:
            verify_checkpoint(path, headers)
        elif self.online is not None:  # else once the options are known
            self.online.check(model, headers)
        if self._verified is None:
            self._note_headers(headers.values())
        self._verified = state
