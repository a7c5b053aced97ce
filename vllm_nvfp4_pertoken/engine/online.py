"""BF16 and FP16 checkpoints: which modules are quantized while they load.

Those that ``nvfp4-pertoken convert`` would quantize with the same options, by the same code.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_nvfp4_pertoken.checkpoints.convert.groups import Options as ConvertOptions
from vllm_nvfp4_pertoken.checkpoints.convert.groups import modules_to_quantize
from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader
from vllm_nvfp4_pertoken.checkpoints.modules import Packed, is_excluded, parts_of
from vllm_nvfp4_pertoken.engine.options import Options
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError

__all__ = ["OnlinePlan"]


class OnlinePlan:
    """Which modules are quantized while loading: those that a conversion would quantize.

    Args:
        model_config: the engine's.
        options: ours.
        config: the checkpoint's ``config.json``.
        headers: of its tensors.
        rename: from the checkpoint's names to the engine's; None for what is not loaded.

    Raises:
        CheckpointError, UnsupportedError: for what a conversion would refuse, and for vLLM's own
            options of online quantization.
    """

    def __init__(
        self,
        model_config: Any,
        options: Options,
        config: Mapping[str, Any],
        headers: Mapping[str, TensorHeader],
        rename: Callable[[str], str | None],
    ) -> None:
        args = model_config.quantization_config
        if args is not None and (args.linear or args.ignore or args.targets):
            raise UnsupportedError(
                f"--quantization-config has {args}",
                expected="--quantization nvfp4_per_token alone",
                way_out="say what is quantized with the options bf16 and exclude, in "
                "--additional-config '{\"nvfp4_per_token\": {…}}'",
            )
        if not headers:
            raise UnsupportedError(
                f"the headers of {model_config.model} cannot be read before it is loaded",
                expected="an unquantized checkpoint in safetensors files, in a local directory or "
                "on a hub that can be reached",
                way_out="download it, and give the directory",
            )
        self._config = config
        self._options = ConvertOptions(options.bf16 == "all", tuple(options.exclude))
        found = modules_to_quantize(model_config.model, headers, config, self._options)
        # In the engine's words.
        self._modules = {name for name in map(rename, found) if name is not None}
        self._containers = {
            f"{name.rpartition('.experts.')[0]}.experts"
            for name in self._modules
            if ".experts." in name
        }

    def check(self, model: str, headers: Mapping[str, TensorHeader]) -> None:
        """Refuse files that could not be reloaded, before anything is changed."""
        modules_to_quantize(model, headers, self._config, self._options)

    def quantizes(self, prefix: str, experts: bool, packed: Packed) -> bool:
        """Whether a layer is quantized.

        Args:
            prefix: the engine's name; ``….experts`` for routed experts.
            experts: it is a MoE layer.
            packed: fused modules and their parts.

        Raises:
            CheckpointError: for experts whose tensors have other names than the engine's.
        """
        if not experts:
            return not self._modules.isdisjoint(parts_of(prefix, packed) or [prefix])
        if prefix in self._containers:
            return True
        if is_excluded(prefix, self._options.exclude, packed):
            return False
        raise CheckpointError(
            f"no tensors of the experts of {prefix} are known by this name",
            expected=f"names such as {next(iter(self._containers), 'none')}.0.down_proj.weight",
            way_out=f"exclude {prefix}, or convert the checkpoint first (nvfp4-pertoken convert)",
        )
