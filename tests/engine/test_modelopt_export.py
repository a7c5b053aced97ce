"""A checkpoint that the installed ModelOpt exports now, whatever it has changed since `data/`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import LAYERS, assert_bitwise, expert_weights, read_tensors
from harness import loaded_model, moe_inputs, moe_layers, run_moe

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.checkpoints.convert import Options, convert_checkpoint
from vllm_nvfp4_pertoken.experts.reference import Activation, moe_forward


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("what", "dense"), [("experts", 0), ("all", 2 * LAYERS)])
def test_fresh_export_is_served_with_its_own_values(what, dense, tmp_path):
    path = tmp_path / what
    script = Path(__file__).with_name("export_with_modelopt.py")
    done = subprocess.run(
        [sys.executable, script, what, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tensors = read_tensors(path)
    original = read_tensors(tmp_path / f"{what}.bf16")

    hidden, weights, ids = moe_inputs()
    with loaded_model(path) as (config, model):
        assert len(moe_layers(model)) == LAYERS
        assert len(config.quant_config.linear_methods) == dense
        for index, layer in enumerate(moe_layers(model)):
            expected = moe_forward(
                hidden, weights, ids, expert_weights(tensors, index), Activation("silu")
            )
            assert_bitwise({"out": run_moe(config, layer, hidden, weights, ids)}, {"out": expected})
    # Our converter writes the bytes that ModelOpt writes; only activation scales are not there.
    converted = tmp_path / "converted"
    convert_checkpoint(tmp_path / f"{what}.bf16", converted, Options(all_linears=what == "all"))
    assert_bitwise(
        read_tensors(converted),
        {name: tensor for name, tensor in tensors.items() if not name.endswith("input_scale")},
    )
    ours, theirs = (
        json.loads((directory / "config.json").read_text())["quantization_config"]
        for directory in (converted, path)
    )
    ours.pop("producer")
    theirs.pop("producer")
    assert ours == theirs
    # The same values as before the export, give or take the half step of a code.
    name = "model.layers.1.mlp.experts.6.down_proj.weight"
    exported = nvfp4.dequantize(
        tensors[name], tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
    ).float()
    error = (exported - original[name].float()).norm() / original[name].float().norm()
    assert isinstance(error, torch.Tensor)
    assert error < 0.12
