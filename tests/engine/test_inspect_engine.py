"""`inspect` says beforehand what the engine then does: which layers run how, or that none will."""

import math
from collections.abc import Callable

import pytest
import torch
from cases import ALL_NVFP4, COMPRESSED, EXPERTS_ONLY, Tensors, expert_tensor, make_case
from harness import loaded_model

from vllm_nvfp4_pertoken.checkpoints.inspect import inspect_checkpoint
from vllm_nvfp4_pertoken.errors import PerTokenError

Q = "model.layers.0.self_attn.q_proj"


def unchanged(tensors: Tensors) -> None:
    pass


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def filled(name: str, byte: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8).flatten()[-1] = byte

    return edit


def replaced(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def dense_bf16(tensors: Tensors) -> None:
    """A layer that the config does not exclude, stored in BF16."""
    for name in [name for name in tensors if name.startswith("model.layers.1.self_attn.o_proj.")]:
        del tensors[name]
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(256, 256).bfloat16()


def head(tensors: Tensors) -> None:
    """An NVFP4 head that the config excludes."""
    tensors["lm_head.weight"] = torch.zeros(512, 128, dtype=torch.uint8)
    tensors["lm_head.weight_scale"] = torch.ones(512, 16).to(torch.float8_e4m3fn)
    tensors["lm_head.weight_scale_2"] = torch.tensor(0.1)


@pytest.mark.parametrize(
    ("source", "edit"),
    [
        pytest.param(ALL_NVFP4, unchanged, id="all"),
        pytest.param(EXPERTS_ONLY, unchanged, id="experts only"),
        pytest.param(COMPRESSED, unchanged, id="compressed-tensors"),
        pytest.param(ALL_NVFP4, dense_bf16, id="a BF16 layer"),
        pytest.param(ALL_NVFP4, head, id="an NVFP4 head"),
        pytest.param(ALL_NVFP4, without(expert_tensor(0, 1, "up", "input_scale")), id="no input"),
        pytest.param(ALL_NVFP4, without(expert_tensor(0, 1, "up", "weight_scale")), id="no blocks"),
        pytest.param(ALL_NVFP4, without(f"{Q}.weight_scale_2"), id="no weight_scale_2"),
        pytest.param(ALL_NVFP4, filled(f"{Q}.weight_scale", 0x7F), id="NaN in a dense layer"),
        pytest.param(ALL_NVFP4, filled(f"{Q}.weight_scale", 0x80), id="minus zero"),
        pytest.param(
            ALL_NVFP4, filled(expert_tensor(1, 7, "down", "weight_scale"), 0x81), id="negative"
        ),
        pytest.param(
            ALL_NVFP4,
            replaced(expert_tensor(1, 0, "gate", "weight_scale_2"), torch.tensor(math.inf)),
            id="infinite",
        ),
        pytest.param(
            COMPRESSED,
            replaced(expert_tensor(1, 0, "gate", "weight_global_scale"), torch.zeros(1)),
            id="no inverse",
        ),
    ],
)
def test_says_what_the_engine_does(source, edit, tmp_path):
    path = make_case(source, tmp_path / "case", edit=edit)
    report = inspect_checkpoint(path)
    per_token = sum(
        row.layers
        for row in report.rows
        if row.served == "per-token" and row.kind != "routed experts w2"
    )
    try:
        with loaded_model(path) as (_, model):
            methods = [type(getattr(m, "quant_method", None)).__name__ for m in model.modules()]
    except (PerTokenError, ValueError):
        assert not report.serves
        return
    assert report.serves
    assert sum("PerToken" in name for name in methods) == per_token
