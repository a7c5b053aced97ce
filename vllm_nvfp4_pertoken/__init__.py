"""Serve NVFP4 mixture-of-experts models on vLLM with per-token activation scales."""

__version__ = "0.1.0"

__all__ = ["__version__", "register"]


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: makes ``nvfp4_per_token`` known to vLLM.

    vLLM calls this in every process it starts, sometimes more than once; calling it again is
    harmless. Nothing is decided and nothing can fail here, because an exception in this function
    would stop every vLLM process on the machine, also those that serve other models.
    """
    from vllm_nvfp4_pertoken.engine.registration import register_quantization

    register_quantization()
