"""The line at start-up that says what runs."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_nvfp4_pertoken.engine.config import NvFp4PerTokenConfig

__all__ = ["what_runs"]


def what_runs(config: "NvFp4PerTokenConfig") -> str:
    """One line about all layers, once they exist."""
    choices = Counter((m.choice.name, m.choice.reason) for m in config.moe_methods.values())
    experts = " and ".join(
        f"{count} MoE layers with per-token activation scales on the {name} experts ({reason})"
        for (name, reason), count in choices.items()
    )
    source = (
        "weights quantized while loading"
        if config.is_online
        else "activation scales of the checkpoint ignored"
    )
    others = "".join(
        f"; {count} layers in {name}, as the checkpoint has them"
        for name, count in sorted(config.other_formats.items())
    )
    if config.description.quant_algo == "W4A16_NVFP4":
        others += (
            "; the checkpoint quantizes weights only (W4A16_NVFP4), activations are quantized "
            "because this was asked for"
        )
    return f"nvfp4_per_token: {experts}, {source}; {_dense_words(config)}{others}."


def _dense_words(config: "NvFp4PerTokenConfig") -> str:
    words = f"{len(config.linear_methods)} dense NVFP4 layers"
    if not config.linear_methods:
        return words
    assert config.options is not None
    if config.options.linear == "static":
        return f"{words} with the checkpoint's static input_scale"
    slow = sum(method.backend == "reference" for method in config.linear_methods.values())
    words += " per-token as well"
    return f"{words}, {slow} of them on the torch reference, which is slow" if slow else words
