"""The trainer's operators against the engine, which serves what `convert` made of the weights."""

import copy

import pytest
import torch
from cases import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, assert_bitwise
from families import FAMILIES, load, logprobs, make_model, make_prompts, quantized
from harness import loaded_model, moe_inputs, moe_layers, run_moe
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from vllm_nvfp4_pertoken import training
from vllm_nvfp4_pertoken.checkpoints.convert import Options, convert_checkpoint
from vllm_nvfp4_pertoken.cli import app
from vllm_nvfp4_pertoken.experts.reference import Activation


def qwen3_moe(seed: int = 0) -> Qwen3MoeForCausalLM:
    """A trainer's model, masters in fp32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    return Qwen3MoeForCausalLM(config)


def save(model, path):
    """What a trainer writes, in BF16, and what the converter makes of it."""
    copy.deepcopy(model).bfloat16().save_pretrained(path / "bf16")
    result = CliRunner().invoke(app, ["convert", str(path / "bf16"), str(path / "nvfp4")])
    assert result.exit_code == 0, result.output
    return path / "nvfp4"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_experts_are_the_engines_before_and_after_an_update(backend, tmp_path):
    model = qwen3_moe()
    inputs = moe_inputs(40)
    for step in range(2):
        masters = [
            {"w13": layer.mlp.experts.gate_up_proj, "w2": layer.mlp.experts.down_proj}
            for layer in model.model.layers
        ]
        trained = [
            training.experts(*inputs, **weights, activation=Activation("silu"), backend=backend)
            for weights in masters
        ]
        with loaded_model(save(model, tmp_path / str(step))) as (config, served):
            for actual, layer in zip(trained, moe_layers(served), strict=True):
                assert_bitwise({"out": actual}, {"out": run_moe(config, layer, *inputs)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sum(output.float().square().mean() for output in trained).backward()
        optimizer.step()
        assert all(weights["w13"].grad.any() for weights in masters)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_applied_model_computes_from_masters_what_the_converted_checkpoint_holds(
    family, dense, tmp_path
):
    """Every bit of the logprobs; `test_families.py` holds that checkpoint's engine to them."""
    source = make_model(family, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "converted", Options(all_linears=dense))
    sequences = torch.tensor(make_prompts())
    expected = logprobs(quantized(source, tmp_path / "converted"), sequences)
    model = load(source)
    before = logprobs(model, sequences)
    training.apply(model, dense=dense)
    assert_bitwise({"logprobs": logprobs(model, sequences)}, {"logprobs": expected})
    assert not torch.equal(before, expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_of_an_applied_model_are_the_engines(family, tmp_path):
    """On the rows, ids and routing weights of transformers' own forward pass."""
    source = make_model(family, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "converted", Options())
    model = load(source)
    seen: dict[str, list] = {}
    for name in training.apply(model).replaced:
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output, name=name: seen.setdefault(name, []).extend((*args, output))
        )
    logprobs(model, torch.tensor(make_prompts()))
    with loaded_model(tmp_path / "converted") as (config, served):
        layers = moe_layers(served)
        assert len(layers) == len(seen) > 0
        for layer, (hidden, ids, weights, output) in zip(layers, seen.values(), strict=True):
            actual = run_moe(config, layer, hidden, weights.float(), ids.int())
            assert output.float().abs().sum() > 0
            assert_bitwise({"out": actual}, {"out": output})
