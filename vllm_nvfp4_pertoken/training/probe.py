"""Which activation a model's experts have: found by trying, in fp64, never by name.

Names of activations, and of the attributes that hold a clamp, differ between families; what a
function makes of numbers does not.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from vllm_nvfp4_pertoken.experts.reference import Activation, apply_activation
from vllm_nvfp4_pertoken.training.operators import smooth, unquantized_expert

__all__ = ["activation_of_expert", "activation_of_fused"]

_ROWS = 16


@torch.no_grad()
def activation_of_fused(module: Any, rows: int) -> Activation:
    """The activation of transformers' fused experts, whose w13 has so many rows.

    Raises:
        ValueError: it is none that the server's experts have.
    """
    function = module._apply_gate if module.has_gate else module.act_fn
    limits: list[Any] = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    # Beyond every clamp, on both sides.
    largest = max([2.0, *(2 * limit for limit in limits if _number(limit))])
    fc1 = _random(_ROWS, rows) * largest
    found = function(fc1)
    for activation in _candidates(module, module.has_gate):
        if _close(apply_activation(fc1, activation, smooth), found):
            return activation
    raise ValueError(_none(function))


@torch.no_grad()
def activation_of_expert(expert: nn.Module, names: Sequence[str]) -> Activation:
    """The same of an expert that is a module, whose linears have these names, (gate,) up, down.

    Raises:
        ValueError: it is not an expert, or its activation none that the server's experts have.
    """
    # Other weights, of magnitude 1: those of the model may be on a device without fp64, or zero.
    weights: dict[str, torch.Tensor] = {
        f"{name}.weight": _random(*expert.get_parameter(f"{name}.weight").shape) for name in names
    }
    w13 = torch.cat([weights[f"{name}.weight"] for name in names[:-1]])
    x = _random(_ROWS, w13.shape[1]) / w13.shape[1] ** 0.5 * 3
    found = torch.func.functional_call(expert, weights, (x,))
    for activation in _candidates(expert, len(names) == 3):
        w2 = weights[f"{names[-1]}.weight"]
        if _close(unquantized_expert(activation, x, w13, w2, None, None), found):
            return activation
    raise ValueError(_none(expert.forward))


def _candidates(module: Any, gated: bool) -> Iterator[Activation]:
    if not gated:
        yield from map(Activation, ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul"))
        yield Activation("relu2_no_mul")
        return
    yield from map(Activation, ("silu", "gelu", "gelu_tanh"))
    alphas = [getattr(module, name, None) for name in ("alpha", "swiglu_alpha")]
    limits = [getattr(module, name, None) for name in ("limit", "swiglu_limit")]
    found: Any = product([1.0, *alphas], (0.0, 1.0), [None, *limits])
    for alpha, beta, limit in found:
        if _number(alpha) and (limit is None or _number(limit)):
            yield Activation("silu", float(alpha), beta, None if limit is None else float(limit))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Some functions compute in fp32 whatever they are given."""
    return actual.shape == expected.shape and torch.allclose(
        actual, expected.double(), rtol=1e-5, atol=1e-6
    )


def _none(function: Any) -> str:
    where = getattr(function, "__qualname__", type(function).__name__)
    return f"has an activation ({where}) that the server's experts do not have"
