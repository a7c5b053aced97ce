"""What tests of several kinds share."""

import os
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides on its first import whether to interpret. Only here: engines that the tests
    # start must not.
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        from vllm_nvfp4_pertoken.experts import triton_kernels  # noqa: F401

from vllm_nvfp4_pertoken.demo import Models, cached_models


@pytest.fixture(scope="session")
def smollm2_models() -> Models:
    """The demo's `e8k2` checkpoints, in the demo's cache: built by the first test that asks."""
    return cached_models("e8k2")
