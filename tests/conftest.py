"""What tests of several kinds share."""

import pytest

from vllm_nvfp4_pertoken.demo import Models, cached_models


@pytest.fixture(scope="session")
def smollm2_models() -> Models:
    """The demo's `e8k2` checkpoints, in the demo's cache: built by the first test that asks."""
    return cached_models("e8k2")
