"""`apply`: a Hugging Face model that computes its experts, and dense layers, as the server does.

Fused experts (transformers 5) are reached through transformers' registry of experts functions, each
layer by a configuration of its own. Experts in a list, and linears, change their class. So nothing
is patched that other models see, parameters keep their names, and a copy of the model is one too.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_nvfp4_pertoken.checkpoints.convert.groups import scale_group
from vllm_nvfp4_pertoken.checkpoints.convert.source import STAY_FUSED, is_dense
from vllm_nvfp4_pertoken.checkpoints.layout import LAYOUTS
from vllm_nvfp4_pertoken.checkpoints.modules import is_excluded
from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.experts.reference import Activation
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE
from vllm_nvfp4_pertoken.training import operators
from vllm_nvfp4_pertoken.training.probe import activation_of_expert, activation_of_fused

__all__ = ["Applied", "apply"]

NAME = "nvfp4_per_token"
_STATE = "nvfp4_per_token"  # the attribute of a module that computes per-token


@dataclass
class _State:
    """What a replaced module needs to know; a copy of the module gets a copy."""

    options: dict[str, Any]
    activation: Activation | None = None
    siblings: Sequence[nn.Module] = ()
    undo: tuple[str, Any] = ("", None)
    keep: bool = False
    cached: Any = None

    def quantized(self, weights: Iterable[torch.Tensor], quantize: Callable[[], Any]) -> Any:
        """What ``quantize`` makes of weights; the same again within `constant_weights`."""
        if not self.keep:
            return quantize()
        key = [(weight.data_ptr(), weight._version) for weight in weights]
        if self.cached is None or self.cached[0] != key:
            self.cached = key, quantize()
        return self.cached[1]


@dataclass(frozen=True)
class Applied:
    """What `apply` did. ``print`` it; leave its ``with`` block, or call `remove`, to undo it.

    Attributes:
        replaced: what computes per-token: module -> what of it.
        left: linears and experts that stay as they are: module -> reason.
    """

    replaced: dict[str, str]
    left: dict[str, str]
    _modules: list[nn.Module] = field(repr=False, default_factory=list)

    def remove(self) -> None:
        """The model computes as before. Calling it again does nothing."""
        for module in self._modules:
            name, before = getattr(module, _STATE).undo
            setattr(module, name, before)
            delattr(module, _STATE)
        self._modules.clear()

    @contextmanager
    def constant_weights(self) -> Iterator[None]:
        """Within the block each layer is quantized once, not in every forward pass.

        For evaluation, or several micro-batches before an update. A weight that changes within is
        quantized anew where torch counts the change: not if it goes through ``.data``.
        """
        states = [getattr(module, _STATE) for module in self._modules]
        for state in states:
            state.keep = True
        try:
            yield
        finally:
            for state in states:
                state.keep, state.cached = False, None

    def __enter__(self) -> "Applied":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __str__(self) -> str:
        lines = []
        for title, modules in (("per-token NVFP4", self.replaced), ("left as it is", self.left)):
            for what in dict.fromkeys(modules.values()):
                names = [name for name, other in modules.items() if other == what]
                shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
                lines.append(f"{title}: {len(names)} x {what}: {shown}")
        return "\n".join(lines)


def apply(
    model: nn.Module,
    *,
    dense: bool = False,
    exclude: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    backward_dtype: torch.dtype = torch.float32,
) -> Applied:
    """Have a Hugging Face model compute as a server of its converted checkpoint does.

    Experts, fused or in a list of modules, and with ``dense`` all linears that ``nvfp4-pertoken
    convert --all`` quantizes. The forward pass of these layers gives the server's bits for the
    server's inputs; all else is the model's own. Of experts in a list, the weighted sum is the
    model's own too.

    Args:
        model: with its parameters in any float dtype.
        dense: dense linears too, as with ``convert --all``.
        exclude: modules that stay as they are: names, containers or wildcards, as for ``convert``
            but in the model's own names.
        dtype: of the checkpoint, or of the tensors that the server is sent.
        backend: as for `training.experts`.
        backward_dtype: in which gradients are computed.

    Raises:
        UnsupportedError: there is nothing to replace, or something that cannot be; nothing is
            changed then.
    """
    options = {"dtype": dtype, "backward_dtype": backward_dtype}
    experts_options = options | {"backend": backend}
    replaced: dict[str, str] = {}
    left: dict[str, str] = {}
    problems: dict[str, str] = {}
    changes: list[tuple[nn.Module, _State]] = []
    inside: list[str] = []  # containers of experts, whose linears are not dense ones
    linears: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if hasattr(module, _STATE):
            problems[name] = "computes per-token already; call remove() first"
        elif name.startswith(tuple(f"{container}." for container in inside)):
            continue
        elif _is_container(module):
            inside.append(name)
            if is_excluded(name, exclude, {}):
                left[name] = "excluded"
                continue
            try:
                activation = _check_experts(module)
            except ValueError as error:
                problems[name] = str(error)
                continue
            listed = isinstance(module, nn.ModuleList)
            parts = module if listed else [module]
            changes += [(part, _State(experts_options, activation)) for part in parts]
            how = "experts in a list, summed by the model" if listed else "fused experts"
            replaced[name] = f"{how} ({activation.name}, {_backend(module, backend)})"
        elif isinstance(module, nn.Linear):
            linears[name] = module
    linears = {n: m for n, m in linears.items() if not n.startswith(tuple(f"{c}." for c in inside))}
    for name, module in linears.items():
        reason = _why_left(name, dense, exclude)
        if reason:
            left[name] = reason
        elif type(module) is not nn.Linear:
            problems[name] = f"is a {type(module).__name__}, not torch's Linear"
        elif module.in_features % BLOCK_SIZE:
            problems[name] = f"has {module.in_features} inputs, not a multiple of {BLOCK_SIZE}"
        else:
            replaced[name] = "linear"
    groups: dict[str, list[str]] = {}
    for name in linears:
        if name in replaced:
            groups.setdefault(scale_group(name), []).append(name)
    for names in groups.values():
        for name in names:
            siblings = tuple(linears[other] for other in names if other != name)
            changes.append((linears[name], _State(options, siblings=siblings)))
    _refuse(model, problems, replaced)
    for module, state in changes:
        _install(module, state)
    return Applied(replaced, left, [module for module, _ in changes])


def _refuse(model: nn.Module, problems: dict[str, str], replaced: dict[str, str]) -> None:
    if problems:
        raise UnsupportedError(
            "; ".join(f"{name} {reason}" for name, reason in problems.items()),
            expected="experts and linears that a server of the converted checkpoint computes too",
            way_out="name them in exclude=, for the conversion too, or leave them out of the model",
        )
    if not replaced:
        raise UnsupportedError(
            f"{type(model).__name__} has nothing to replace",
            expected="experts, fused (transformers 5) or in a list named 'experts'; or linears, "
            "with dense=True",
            way_out="exclude less, or call training.experts and training.linear in your own layers",
        )


def _backend(module: nn.Module, backend: str | None) -> str:
    return backend or operators.default_backend(next(module.parameters()).device)


def _is_container(module: nn.Module) -> bool:
    """What a router chooses from: fused experts, or a list of them."""
    down = getattr(module, "down_proj", None)
    if isinstance(down, nn.Parameter):
        return down.ndim == 3
    return isinstance(module, nn.ModuleList) and len(module) > 0 and bool(_layout(module[0]))


def _layout(expert: nn.Module) -> tuple[str, ...]:
    """The names of an expert's linears: (gate, up, down), or (up, down); empty if it has others."""
    linears = {name for name, child in expert.named_children() if isinstance(child, nn.Linear)}
    for layout in LAYOUTS:
        for names in (layout.projections, layout.projections[1:]):
            if linears == set(names):
                return names
    return ()


def _why_left(name: str, dense: bool, exclude: Sequence[str]) -> str | None:
    if not is_dense(name):
        return "never quantized"
    if not dense:
        return "dense"
    return "excluded" if is_excluded(name, exclude, {}) else None


# ------------------------------------------------------------------------------- experts


def _check_experts(module: Any) -> Activation:
    """What stands between the GEMMs.

    Raises:
        ValueError: for experts that cannot compute as the server, with the reason.
    """
    if isinstance(module, nn.ModuleList):
        first = module[0]
        if any(type(e) is not type(first) or _layout(e) != _layout(first) for e in module):
            raise ValueError("is a list of experts that are not all alike")
        if any(child.bias is not None for e in module for child in e.children() if _linear(child)):
            raise ValueError("has experts with biases, which cannot be converted")
        sizes = {size for e in module for p in e.parameters() for size in p.shape}
        activation = activation_of_expert(first, _layout(first))
    else:
        needed = ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated")
        if any(not hasattr(module, name) for name in needed):
            raise ValueError("is not called through transformers' registry of experts functions")
        if module.has_bias or getattr(module.config, "model_type", None) in STAY_FUSED:
            raise ValueError(
                "is of a family whose checkpoint keeps experts fused (biases, or one scale for all)"
            )
        if not module.is_concatenated:
            raise ValueError("has interleaved gate and up, which convert does not split")
        w13, w2 = _fused_weights(module)
        sizes = {*w13.shape[1:], w2.shape[2]}
        activation = activation_of_fused(module, w13.shape[1])
    if any(size % BLOCK_SIZE for size in sizes):
        raise ValueError(f"has sizes {sorted(sizes)}, not all multiples of {BLOCK_SIZE}")
    return activation


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _fused_weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, N1, H] and w2 [E, H, I]; views, so that gradients reach the parameters."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    second = module.down_proj
    return (first.mT, second.mT) if module.is_transposed else (first, second)


def _install(module: Any, state: _State) -> None:
    """From now on the module computes per-token; `Applied.remove` is the way back."""
    if isinstance(module, nn.Linear):
        state.undo = "__class__", nn.Linear
        module.__class__ = _PerTokenLinear
    elif _layout(module):
        before = type(module)
        state.undo = "__class__", before
        module.__class__ = type(f"PerToken{before.__name__}", (_ListedExpert, before), {})
    else:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, _fused_forward)
        state.undo = "config", module.config
        module.config = copy.copy(module.config)
        module.config._experts_implementation = {"": NAME}  # not those of sub-configs
    setattr(module, _STATE, state)


def _fused_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' interface of experts: [M, H], ids and weights [M, top_k] -> [M, H]."""
    state = getattr(module, _STATE, None)
    if state is None or module._is_expert_parallel:
        what = "not prepared by training.apply" if state is None else "expert parallel"
        raise UnsupportedError(
            f"{type(module).__name__} with the experts implementation {NAME!r} is {what}",
            expected="a model whose experts are whole, given to training.apply",
            way_out="call vllm_nvfp4_pertoken.training.apply(model)",
        )
    routed = hidden_states, top_k_weights, top_k_index
    return _experts(state, routed, _fused_weights(module), module.parameters())


def _experts(
    state: _State,
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    parameters: Iterable[nn.Parameter],
) -> torch.Tensor:
    assert state.activation is not None
    options = {key: state.options[key] for key in ("dtype", "backend")}
    quantize = partial(operators.quantize_experts, *weights, state.activation, **options)
    quantized = state.quantized(parameters, quantize)
    return operators.experts(
        *routed, *weights, state.activation, quantized=quantized, **state.options
    )


class _ListedExpert:
    """Goes before an expert's own class: a layer with one expert, for all the rows it is given."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        *first, last = [self.get_submodule(name).weight for name in _layout(self)]
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights = rows.new_ones(len(rows), 1, dtype=torch.float32)
        routed = rows, weights, torch.zeros_like(weights, dtype=torch.int32)
        both = torch.cat(first)[None], last[None]
        return _experts(getattr(self, _STATE), routed, both, (*first, last)).view_as(hidden_states)


class _PerTokenLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = getattr(self, _STATE)
        siblings = [module.weight for module in state.siblings]
        dtype = state.options["dtype"]
        quantize = partial(
            operators.quantize_linear, self.weight, shared_with=siblings, dtype=dtype
        )
        quantized = state.quantized((self.weight, *siblings), quantize)
        return operators.linear(input, self.weight, self.bias, quantized=quantized, **state.options)
