"""Checkpoints for tests: three that ModelOpt wrote, one of llm-compressor, and edited variants.

`data/` holds tiny random Qwen3-MoE models exported by ModelOpt: two layers, eight experts, hidden
size 256, expert size 128. `modelopt-qwen3moe_experts_only` has dense layers in BF16, `…_nvfp4` in
NVFP4, and `…_nocalib` is the latter without a calibration run, so without any input scale.
`compressed-tensors-qwen3moe_nvfp4` is a model of the same shape from llm-compressor, all NVFP4.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_nvfp4_pertoken.experts.reference import ExpertWeights

DATA = Path(__file__).parent / "data"
EXPERTS_ONLY = DATA / "modelopt-qwen3moe_experts_only"
ALL_NVFP4 = DATA / "modelopt-qwen3moe_nvfp4"
COMPRESSED = DATA / "compressed-tensors-qwen3moe_nvfp4"
NO_CALIBRATION = DATA / "modelopt-qwen3moe_nocalib"

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 256, 128, 8, 2

Tensors = dict[str, torch.Tensor]


def read_tensors(path: Path) -> Tensors:
    """All tensors of a checkpoint, read with safetensors alone."""
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def make_case(
    source: Path,
    target: Path,
    *,
    edit: Callable[[Tensors], None] | None = None,
    config: Callable[[dict[str, Any]], None] | None = None,
    hf_quant_config: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A copy of a checkpoint; the functions change its tensors and JSON files in place."""
    shutil.copytree(source, target)
    if edit is not None:
        tensors = read_tensors(target)
        edit(tensors)
        # Contiguous and without shared storage, as safetensors wants them.
        whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
    for name, change in (("config.json", config), ("hf_quant_config.json", hf_quant_config)):
        if change is not None:
            content = json.loads((target / name).read_text())
            change(content)
            (target / name).write_text(json.dumps(content))
    return target


def expert_tensor(layer: int, expert: int, projection: str, kind: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.{kind}"


def expert_weights(
    tensors: Tensors, layer: int, experts: range | list[int] = range(EXPERTS)
) -> ExpertWeights:
    """One MoE layer's experts as the reference wants them, straight from the checkpoint."""

    def stack(projections: tuple[str, ...], kind: str, join: Any) -> torch.Tensor:
        return torch.stack(
            [
                join([tensors[expert_tensor(layer, expert, p, kind)] for p in projections])
                for expert in experts
            ]
        )

    both, down = ("gate", "up"), ("down",)
    return ExpertWeights(
        w13=stack(both, "weight", torch.cat),
        w13_scale=stack(both, "weight_scale", torch.cat),
        w13_scale_2=stack(both, "weight_scale_2", lambda parts: torch.stack(parts).reshape(-1)),
        w2=stack(down, "weight", torch.cat),
        w2_scale=stack(down, "weight_scale", torch.cat),
        w2_scale_2=stack(down, "weight_scale_2", lambda parts: parts[0].reshape(())),
    )


def other_weights(tensors: Tensors) -> None:
    """An edit: the same model with every weight another one, so that a stale one shows."""
    before = dict(tensors)
    for name, tensor in before.items():
        if ".experts." in name:
            head, _, rest = name.partition(".experts.")
            expert, _, rest = rest.partition(".")
            source = before[f"{head}.experts.{(int(expert) + 1) % EXPERTS}.{rest}"]
            if rest.endswith("proj.weight"):
                source = source ^ 0x88  # both signs of the byte
            elif rest.endswith("weight_scale_2"):
                source = source * 1.25
            tensors[name] = source
        elif tensor.dtype == torch.bfloat16:
            tensors[name] = tensor.roll(1, 0) * 1.25
        elif name.endswith("weight_scale_2"):
            tensors[name] = tensor * 1.25
        elif tensor.dim() == 2:  # codes and block scales of dense layers
            tensors[name] = tensor.view(torch.uint8).roll(1, 0).view(tensor.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: equal for equal NaNs too, and for no two different zeros."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_bitwise(actual: Tensors, expected: Tensors) -> None:
    """Two sets of named tensors have the same names and the same bytes."""
    assert actual.keys() == expected.keys()
    different = [
        name
        for name in expected
        if actual[name].shape != expected[name].shape
        or not torch.equal(bits(actual[name]), bits(expected[name]))
    ]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:5]}"
