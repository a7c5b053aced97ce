"""Loading of expert tensors: each one checked before it is copied, and all of them counted after.

vLLM's own loader fills a slice of a parameter and says nothing about the slices that no tensor came
for; those would be served as whatever was in memory. Weights in BF16 are quantized on arrival.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vllm_nvfp4_pertoken.checkpoints.layout import COMPRESSED_KINDS, MODELOPT_KINDS
from vllm_nvfp4_pertoken.checkpoints.scales import damaged_scales, invert_, zero_dead_blocks
from vllm_nvfp4_pertoken.engine import host
from vllm_nvfp4_pertoken.engine.quantizing import (
    FLOATS,
    KINDS,
    count_elements,
    quantize_together,
    quantized_like,
)
from vllm_nvfp4_pertoken.errors import CheckpointError, PerTokenError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = ["ExpertLoading"]

_SHOWN_MISSING = 5


class ExpertLoading:
    """What one layer's checkpoint tensors must be, and which of them have arrived.

    Args:
        moe: vLLM's description of the layer.
        prefix: the layer's name, as in ``model.layers.0.mlp.experts``.
        compressed: the checkpoint is compressed-tensors'.
    """

    def __init__(self, moe: host.FusedMoEConfig, prefix: str, compressed: bool = False) -> None:
        self.moe = moe
        self.prefix = prefix
        self.compressed = compressed
        # Kinds of tensors in the checkpoint's words.
        self.kinds = COMPRESSED_KINDS if compressed else MODELOPT_KINDS
        # Per parameter, the local experts and shards whose checkpoint tensors have arrived.
        self._loaded: dict[str, set[tuple[int, str]]] = defaultdict(set)
        # The loaders of the parameters, for tensors of an NVFP4 checkpoint.
        self._loaders: dict[str, Callable[..., bool | None]] = {}
        # Weights of an expert (global number) that are not quantized yet, by shard: they wait for
        # those that they share a scale with.
        self._waiting: dict[tuple[str, int], dict[str, torch.Tensor]] = defaultdict(dict)
        # Whether weights came that were not quantized.
        self._quantizing = False

    @property
    def _w13_shards(self) -> tuple[str, ...]:
        return ("w1", "w3") if self.moe.is_act_and_mul else ("w1",)

    def finish(self, layer: Any) -> None:
        """Check that everything arrived and is sane; zero the blocks of all-zero experts.

        Raises:
            CheckpointError: for missing tensors and damaged scales. During a reload the layers that
                were not reached get their old weights back first.
        """
        try:
            self._check_complete(layer)
            self._sanitize(layer)
        except CheckpointError as error:
            raise self._refuse(error) from None
        self._forget()

    def loader(
        self, layer: Any, name: str, load: Callable[..., bool | None]
    ) -> Callable[..., bool | None]:
        """vLLM's loader for one parameter, with a check before it and a tick in the list after.

        Holds the layer weakly: vLLM keeps parameter attributes for later reloads, and must not
        keep the whole layer with them.
        """
        layer_ref, load_ref = weakref.ref(layer), weakref.WeakMethod(load)
        stem, _, kind = name.partition("_")

        def load_tensor(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
        ) -> bool | None:
            owner, vllm_load = layer_ref(), load_ref()
            assert owner is not None
            assert vllm_load is not None
            loaded = vllm_load(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success=True
            )
            # During a reload vLLM first calls with a parameter on the meta device, to count.
            if loaded and not param.is_meta:
                local = owner._map_global_expert_id_to_local_expert_id(expert_id)
                experts = range(owner.local_num_experts) if loaded_weight.ndim == 3 else (local,)
                self._loaded[name].update((expert, shard_id) for expert in experts)
            return loaded

        self._loaders[name] = load_tensor

        def weight_loader(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            owner = layer_ref()
            assert owner is not None
            here = owner._map_global_expert_id_to_local_expert_id(expert_id) != -1
            if here and loaded_weight.ndim < 3:
                self._check_tensor(owner, name, shard_id, expert_id, loaded_weight)
            floats = here and kind == "weight" and loaded_weight.dtype in FLOATS
            if param.is_meta:
                parameters = [getattr(owner, f"{stem}_{each}") for each in KINDS]
                count_elements(parameters, quantizing=floats)
            if floats:
                self._load_float(owner, stem, param, loaded_weight, shard_id, expert_id)
                return True if return_success else None
            loaded = load_tensor(param, loaded_weight, weight_name, shard_id, expert_id)
            return loaded if return_success else None

        weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
        return weight_loader

    def _load_float(
        self,
        layer: Any,
        stem: str,
        param: torch.nn.Parameter,
        weight: torch.Tensor,
        shard_id: str,
        expert_id: int,
    ) -> None:
        """Quantize a weight, with the others of its group, and load what becomes of it."""
        if param.is_meta:
            quantized = {shard_id: quantized_like(weight)}
        else:
            self._quantizing = True
            group = self._waiting[stem, expert_id]
            group[shard_id] = weight.to(param.device, copy=True)
            if len(group) < (len(self._w13_shards) if stem == "w13" else 1):
                return
            del self._waiting[stem, expert_id]

            def name(shard_id: str) -> str:
                return self._tensor_name(layer, f"{stem}_weight", shard_id, expert_id)

            try:
                quantized = quantize_together(group, name)
            except CheckpointError as error:
                raise self._refuse(error) from None
        for shard, tensors in quantized.items():
            for kind, tensor in zip(KINDS, tensors, strict=True):
                target = f"{stem}_{kind}"
                if kind == "weight_scale_2" and self.compressed:
                    tensor = tensor.reciprocal()
                self._loaders[target](getattr(layer, target), tensor, target, shard, expert_id)

    def _refuse(self, error: CheckpointError) -> PerTokenError:
        self._forget()
        return host.reload_failed(error)

    def _forget(self) -> None:
        self._loaded.clear()
        self._waiting.clear()
        self._quantizing = False

    def _check_tensor(
        self, layer: Any, name: str, shard_id: str, expert_id: int, tensor: torch.Tensor
    ) -> None:
        """Shape and dtype of one expert's tensor, before anything is copied."""
        # Of the layer, not of `moe`, which FlashInfer's experts enter their padded sizes into.
        hidden = layer.hidden_size
        intermediate = layer.intermediate_size_per_partition * self.moe.moe_parallel_config.tp_size
        rows, columns = (hidden, intermediate) if shard_id == "w2" else (intermediate, hidden)
        if name.endswith("weight_scale_2"):
            good = tensor.numel() == 1 and tensor.dtype == torch.float32
            expected = "one torch.float32 value"
        elif name.endswith("weight_scale"):
            shape = (rows, columns // BLOCK_SIZE)
            good = tuple(tensor.shape) == shape and tensor.dtype == torch.float8_e4m3fn
            expected = f"torch.float8_e4m3fn {list(shape)}"
        elif tensor.dtype in FLOATS:
            shape = (rows, columns)
            good = tuple(tensor.shape) == shape
            expected = f"{list(shape)}, to be quantized, or torch.uint8 {[rows, columns // 2]}"
        else:
            shape = (rows, columns // 2)
            good = tuple(tensor.shape) == shape and tensor.dtype == torch.uint8
            expected = f"torch.uint8 {list(shape)}"
        if good:
            return
        raise self._refuse(
            CheckpointError(
                f"{self._tensor_name(layer, name, shard_id, expert_id)} is {tensor.dtype} "
                f"{list(tensor.shape)}",
                expected=expected,
                way_out="export or send the checkpoint again",
            )
        )

    def _tensor_name(self, layer: Any, name: str, shard_id: str, expert_id: int) -> str:
        """A parameter's slice in the checkpoint's words."""
        projection = {
            "w1": layer.ckpt_gate_proj_name,
            "w2": layer.ckpt_down_proj_name,
            "w3": layer.ckpt_up_proj_name,
        }[shard_id]
        kind = "weight" if self._quantizing else self.kinds[name.partition("_")[2]]
        return f"{self.prefix}.{expert_id}.{projection}.{kind}"

    def _expected_slices(self, layer: Any) -> Iterator[tuple[str, int, str]]:
        """Every (parameter, local expert, shard) that the checkpoint must have provided."""
        for stem, shards in (("w13", self._w13_shards), ("w2", ("w2",))):
            for kind in KINDS:
                for expert in range(layer.local_num_experts):
                    for shard in shards:
                        yield f"{stem}_{kind}", expert, shard

    def _group(self, layer: Any, name: str, expert: int) -> Mapping[str, torch.Tensor]:
        """What waits to be quantized for a parameter's local expert."""
        return self._waiting.get((name.partition("_")[0], self._global_expert(layer, expert)), {})

    def _check_complete(self, layer: Any) -> None:
        missing = [
            (name, expert, shard)
            for name, expert, shard in self._expected_slices(layer)
            if (expert, shard) not in self._loaded[name]
        ]
        if self._quantizing:  # only weights come, and some of them are here and wait
            missing = [
                (name, expert, shard)
                for name, expert, shard in missing
                if name.endswith("_weight") and shard not in self._group(layer, name, expert)
            ]
        if not missing:
            return
        names = [
            self._tensor_name(layer, name, shard, self._global_expert(layer, expert))
            for name, expert, shard in missing[:_SHOWN_MISSING]
        ]
        more = len(missing) - len(names)
        raise CheckpointError(
            f"{self.prefix}: {len(missing)} expert tensors were not in the checkpoint: "
            + ", ".join(names)
            + (f" and {more} more" if more else ""),
            expected=f"{'weight' if self._quantizing else ', '.join(self.kinds.values())} of "
            "every expert's projections",
            way_out="export or send the checkpoint again",
        )

    def _sanitize(self, layer: Any) -> None:
        """Zero the blocks of all-zero experts; refuse scales that no exporter means."""
        for stem in ("w13", "w2"):
            scale_2 = getattr(layer, f"{stem}_weight_scale_2").data
            if self.compressed:
                invert_(scale_2)
            shards = scale_2.view(scale_2.shape[0], -1)
            blocks = getattr(layer, f"{stem}_weight_scale").data.view(torch.uint8)
            blocks = blocks.view(*shards.shape, -1)  # expert, shard, bytes
            zero_dead_blocks(shards, blocks)
            bad = {
                "weight_scale_2": ~shards.isfinite() | (shards < 0),
                "weight_scale": damaged_scales(blocks, keep=2),
            }
            for kind, where in bad.items():
                if not where.any():
                    continue
                expert, shard = where.nonzero()[0].tolist()
                shard_id = "w2" if stem == "w2" else ("w1", "w3")[shard]
                if kind == "weight_scale":
                    value = "NaN or negative in places"
                elif self.compressed:
                    value = "not a positive, finite number"
                else:
                    value = f"{shards[expert, shard].item()}"
                raise CheckpointError(
                    self._tensor_name(
                        layer, f"{stem}_{kind}", shard_id, self._global_expert(layer, expert)
                    )
                    + f" is {value}",
                    expected="finite scales, not negative",
                    way_out="export the checkpoint again; its weights are damaged",
                )

    @staticmethod
    def _global_expert(layer: Any, local: int) -> int:
        """The checkpoint's number of a local expert."""
        if layer._expert_map is None:
            return local
        return int((layer._expert_map == local).nonzero()[0].item())
