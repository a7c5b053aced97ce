"""BF16, FP16 and FP32 weights on their way into NVFP4 parameters: quantized as they arrive.

What a weight becomes is what ``nvfp4-pertoken convert`` would have written of it: matrices that
share a ``weight_scale_2`` there wait for each other here, and the three tensors of each then go
where a converted checkpoint's would. So layers, kernels and reloads are the same for both, and what
is held besides is one expert's matrices, or one layer's q, k and v.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch

from vllm_nvfp4_pertoken.checkpoints.convert.groups import scale_group
from vllm_nvfp4_pertoken.checkpoints.convert.quantize import largest_magnitude
from vllm_nvfp4_pertoken.checkpoints.modules import Packed, parts_of
from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE, QuantizedWeight, quantize_weight, scale_of_weights

__all__ = [
    "FLOATS",
    "KINDS",
    "QuantizingLinearLoader",
    "count_elements",
    "quantize_together",
    "quantized_like",
]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# What a quantized weight consists of, and what parameters are called after.
KINDS = ("weight", "weight_scale", "weight_scale_2")
# Values quantized at a time, which bounds the temporaries.
_CHUNK = 16 << 20

Key = TypeVar("Key")


def quantize_together(
    weights: Mapping[Key, torch.Tensor], name: Callable[[Key], str]
) -> dict[Key, QuantizedWeight]:
    """Quantize matrices that share one ``weight_scale_2``, by the rule of the conversion.

    Args:
        weights: bfloat16, float16 or float32 [N, K] each.
        name: the tensor's, for errors.

    Raises:
        CheckpointError: for a weight that is NaN or infinite.
    """
    amax = torch.zeros(())
    for key, weight in weights.items():
        largest = largest_magnitude(weight)
        if not largest.isfinite():
            row, column = (~weight.isfinite()).nonzero()[0].tolist()
            raise CheckpointError(
                f"{name(key)} has {weight[row, column].item()} at row {row}, column {column}",
                expected="finite weights, since NVFP4 has neither NaN nor infinity",
                way_out="export or send the checkpoint again",
            )
        amax = torch.maximum(amax, largest)
    scale_2 = scale_of_weights(amax)
    return {key: _quantize(weight, scale_2) for key, weight in weights.items()}


def _quantize(weight: torch.Tensor, scale_2: torch.Tensor) -> QuantizedWeight:
    rows = max(1, _CHUNK // weight.shape[1])
    parts = [quantize_weight(c, scale_2.to(weight.device)) for c in weight.split(rows)]
    return QuantizedWeight(
        torch.cat([part.weight for part in parts]),
        torch.cat([part.weight_scale for part in parts]),
        scale_2,
    )


def quantized_like(weight: torch.Tensor) -> QuantizedWeight:
    """What :func:`quantize_together` would give, without values, for vLLM to count."""
    rows, columns = weight.shape
    with torch.device("meta"):
        return QuantizedWeight(
            torch.empty(rows, columns // 2, dtype=torch.uint8),
            torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.float8_e4m3fn),
            torch.empty((), dtype=torch.float32),
        )


def count_elements(parameters: list[Any], quantizing: bool) -> None:
    """Have a reload count a float weight for all three tensors that it becomes, or only its own.

    vLLM processes a layer when as many elements came as it has, and takes no more of one call than
    its parameter has (``weight_loader_numel``). The sum over the parameters stays the same.

    Args:
        parameters: of a projection or linear, by kind.
    """
    numels = [parameter.numel() for parameter in parameters]
    if quantizing:
        numels = [sum(numels), *(0 for _ in numels[1:])]
    for parameter, numel in zip(parameters, numels, strict=True):
        parameter.weight_loader_numel = numel


class QuantizingLinearLoader:
    """Wraps the loaders of a dense layer's parameters; weights that are quantized pass through.

    Args:
        layer: has the parameters, with vLLM's loaders. Held weakly: vLLM keeps parameters'
            attributes for later reloads, and must not keep the whole layer with them.
        prefix: the layer's name.
        packed: fused modules and their parts.
        modules: names of the checkpoint's modules, in the engine's words.
        inverse: second scales are stored as compressed-tensors does.
        static: the layer needs an ``input_scale``, which no weight brings: refuse it.
    """

    def __init__(
        self,
        layer: Any,
        prefix: str,
        packed: Packed,
        modules: Collection[str] = (),
        inverse: bool = False,
        static: bool = False,
    ) -> None:
        self._static = static
        self._layer = weakref.ref(layer)
        self._prefix = prefix
        self._parts = parts_of(prefix, packed)
        self._modules = modules
        self._inverse = inverse
        self._shared = _shared_shards(self._parts)
        # Matrices that came before the rest of those that they share a scale with.
        self._waiting: dict[Any, torch.Tensor] = {}
        self._loaders = {kind: _weakly(getattr(layer, kind).weight_loader) for kind in KINDS}
        for kind in KINDS:
            getattr(layer, kind).weight_loader = self._make(kind)

    def finish(self) -> None:
        """Once the layer's weights are in.

        Raises:
            CheckpointError: that names a matrix that others wait for.
        """
        if not self._waiting:
            return
        came = [self._name(shard) for shard in self._waiting]
        lacking = [self._name(shard) for shard in self._shared if shard not in self._waiting]
        self._waiting.clear()
        raise CheckpointError(
            f"{', '.join(lacking)} did not come, though {', '.join(came)} did",
            expected="all that is served as one layer",
            way_out="export or send the checkpoint again, whole",
        )

    def _make(self, kind: str) -> Callable[..., None]:
        def weight_loader(
            param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None
        ) -> None:
            floats = kind == "weight" and loaded_weight.dtype in FLOATS
            if param.is_meta:
                layer = self._layer()
                count_elements([getattr(layer, name) for name in KINDS], quantizing=floats)
            if not floats:
                self._load(kind, param, loaded_weight, loaded_shard_id)
                return
            try:
                self._load_float(param, loaded_weight, loaded_shard_id)
            except CheckpointError as error:
                self._waiting.clear()
                raise host.reload_failed(error) from None

        return weight_loader

    def _load_float(self, param: torch.nn.Parameter, weight: torch.Tensor, shard: Any) -> None:
        self._check(weight, shard)
        if param.is_meta:
            self._fill({shard: quantized_like(weight)})
            return
        group = {shard: weight.to(param.device, copy=True)}
        if shard in self._shared:
            self._waiting.update(group)
            if len(self._waiting) < len(self._shared):
                return
            group = dict(self._waiting)
            self._waiting.clear()
        self._fill(quantize_together(group, self._name))

    def _fill(self, quantized: Mapping[Any, QuantizedWeight]) -> None:
        layer = self._layer()
        for shard, tensors in quantized.items():
            for kind, tensor in zip(KINDS, tensors, strict=True):
                if kind == "weight_scale_2" and self._inverse:
                    tensor = tensor.reciprocal()
                self._load(kind, getattr(layer, kind), tensor, shard)

    def _load(self, kind: str, param: Any, tensor: torch.Tensor, shard: Any) -> None:
        load = self._loaders[kind]()
        assert load is not None
        load(param, tensor, *(() if shard is None else (shard,)))

    def _check(self, weight: torch.Tensor, shard: Any) -> None:
        if weight.ndim != 2 or weight.shape[1] % BLOCK_SIZE:
            raise CheckpointError(
                f"{self._name(shard)} is {weight.dtype} {list(weight.shape)}",
                expected=f"a weight of [rows, a multiple of {BLOCK_SIZE}], to be quantized",
                way_out="export or send the checkpoint again",
            )
        if self._static:
            raise CheckpointError(
                f"{self._name(shard)} is {weight.dtype}, and the option 'linear' is 'static'",
                expected="NVFP4 weights, with an input_scale",
                way_out="leave the option out, so that dense layers run per-token, or send NVFP4",
            )
        group = scale_group(self._prefix)
        if self._parts or group == self._prefix:
            return
        others = [m for m in self._modules if m != self._prefix and scale_group(m) == group]
        if others:
            raise UnsupportedError(
                f"{self._prefix}.weight would share its weight_scale_2 with {others[0]}, which "
                "this model has as another layer",
                expected="q, k and v, or gate and up, in one layer",
                way_out="convert the checkpoint first (nvfp4-pertoken convert --all)",
            )

    def _name(self, shard: Any) -> str:
        index = {"q": 0, "k": 1, "v": 2}.get(shard, shard)
        if isinstance(index, int) and index < len(self._parts):
            return f"{self._parts[index]}.weight"
        return f"{self._prefix}.weight"


def _shared_shards(parts: list[str]) -> tuple[Any, ...]:
    """vLLM's shard ids of parts that share a ``weight_scale_2``; often none."""
    if len(parts) < 2 or len({scale_group(part) for part in parts}) > 1:
        return ()
    return ("q", "k", "v") if len(parts) == 3 else tuple(range(len(parts)))


def _weakly(load: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """A loader, without its layer where it is a method."""
    return weakref.WeakMethod(load) if isinstance(load, MethodType) else lambda: load
