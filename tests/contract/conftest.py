"""A data-center Blackwell without one: vLLM is told of it, and FlashInfer's kernels stand in."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from standin import StandIn


class _Blackwell:
    """What vLLM's classes ask the platform before they agree to run; the rest is the CPU's."""

    device_name = "NVIDIA B200"

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_device_capability_family(self, capability: int) -> bool:
        return capability == 100


@pytest.fixture
def blackwell(monkeypatch) -> Iterator[StandIn]:
    """A B200 as far as vLLM's experts can see, with stand-ins for the kernels."""
    import flashinfer
    import flashinfer.fused_moe
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts import (
        flashinfer_cutedsl_moe,
        trtllm_nvfp4_moe,
    )
    from vllm.utils import flashinfer as vllm_flashinfer

    from vllm_nvfp4_pertoken.engine import host

    kernels = StandIn()
    for name in ("nvfp4_quantize", "nvfp4_block_scale_interleave"):
        monkeypatch.setattr(flashinfer, name, getattr(kernels, name))
    for name in ("trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"):
        monkeypatch.setattr(flashinfer.fused_moe, name, getattr(kernels, name))
    for module in (config, trtllm_nvfp4_moe, flashinfer_cutedsl_moe):
        monkeypatch.setattr(module, "current_platform", _Blackwell(module.current_platform))
    monkeypatch.setattr(host, "platform_name", lambda: "cuda")
    monkeypatch.setattr(host, "compute_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: torch.device("cpu"))
    monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
    cached = (vllm_flashinfer.has_flashinfer, vllm_flashinfer.has_flashinfer_trtllm_fused_moe)
    for function in cached:
        function.cache_clear()
    yield kernels
    for function in cached:
        function.cache_clear()


@pytest.fixture
def no_reference(monkeypatch) -> None:
    """Our own experts fail when they are called: nothing else may do the kernel's work."""
    from vllm_nvfp4_pertoken.experts import ops

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("experts of ours were called")

    for name in ops.BACKENDS:
        monkeypatch.setitem(ops.BACKENDS, name, fail)
