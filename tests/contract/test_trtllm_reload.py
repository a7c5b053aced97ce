"""New weights under kernels that hold on to addresses: everything derived is new, and in place."""

import pytest
import torch
from cases import EXPERTS, EXPERTS_ONLY, expert_weights, make_case, other_weights, read_tensors
from harness import loaded_model, moe_layers
from layers import assert_same_layer

from vllm_nvfp4_pertoken.experts.reference import Activation, moe_forward

ROWS = 24


@pytest.fixture(autouse=True)
def kernels(blackwell, no_reference):
    return blackwell


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_case(EXPERTS_ONLY, tmp_path_factory.mktemp("reload") / "b", edit=other_weights)


def outputs(config, model) -> list[torch.Tensor]:
    from vllm.forward_context import set_forward_context

    hidden, logits = inputs()
    with set_forward_context(None, config, num_tokens=ROWS):
        return [
            layer.quant_method.apply_monolithic(layer, hidden.clone(), logits)
            for layer in moe_layers(model)
        ]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(9)
    hidden = torch.randn(ROWS, 256, generator=rng).bfloat16()
    return hidden, torch.randn(ROWS, EXPERTS, generator=rng)


def assert_outputs_are_of(path, config, model) -> None:
    hidden, logits = inputs()
    best, ids = logits.softmax(-1).topk(2)
    best = best / best.sum(-1, keepdim=True)
    tensors = read_tensors(path)
    for index, actual in enumerate(outputs(config, model)):
        weights = expert_weights(tensors, index)
        assert_same_layer(actual, moe_forward(hidden, best, ids, weights, Activation("silu")))


def tensors_of(model) -> dict[str, int]:
    """Address of every tensor that a kernel is handed or that a layer owns."""
    found = {}
    for index, layer in enumerate(moe_layers(model)):
        experts = layer.quant_method.moe_kernel.fused_experts
        named = {
            **dict(layer.named_parameters()),
            "kernel w1_scale": experts.quant_config.w1_scale,
            "kernel w2_scale": experts.quant_config.w2_scale,
            "kernel g1_alphas": experts.quant_config.g1_alphas,
            "kernel g2_alphas": experts.quant_config.g2_alphas,
            "kernel g1_scale_c": experts.g1_scale_c,
        }
        found |= {f"{index} {name}": tensor.data_ptr() for name, tensor in named.items()}
        # What the kernel reads is what the layer owns, so that a reload reaches it.
        assert found[f"{index} kernel g1_alphas"] == layer.w13_weight_scale_2.data_ptr()
        assert found[f"{index} kernel g2_alphas"] == layer.w2_weight_scale_2.data_ptr()
        assert found[f"{index} kernel g1_scale_c"] == layer.g1_scale_c.data_ptr()
    return found


def reload(config, model, path) -> None:
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    reload_weights(config, model, None, str(path), True)


def test_reload_is_a_fresh_load_at_the_same_addresses(other):
    with loaded_model(EXPERTS_ONLY) as (config, model):
        addresses = tensors_of(model)
        before = outputs(config, model)
        assert_outputs_are_of(EXPERTS_ONLY, config, model)
        reload(config, model, other)
        assert_outputs_are_of(other, config, model)
        after = outputs(config, model)
        reload(config, model, EXPERTS_ONLY)
        back = outputs(config, model)
        assert addresses == tensors_of(model)
    with loaded_model(other) as (config, model):
        fresh = outputs(config, model)
    for old, new, expected, again in zip(before, after, fresh, back, strict=True):
        assert torch.equal(new, expected)
        assert torch.equal(old, again)
        assert not torch.equal(old, new)


def test_a_scale_that_a_reload_leaves_behind_is_caught(other, monkeypatch):
    """vLLM's own method kept `g1_scale_c` of the old weights (vLLM #57954)."""
    from vllm_nvfp4_pertoken.engine.flashinfer import ModelOptNvFp4FlashInferMoEMethod

    derive = ModelOptNvFp4FlashInferMoEMethod._derive
    first: dict[str, torch.Tensor] = {}

    def stale(self, layer, experts, up_scale):
        derive(self, layer, experts, up_scale)
        layer.g1_scale_c.data.copy_(
            first.setdefault(self.prefix, layer.g1_scale_c.detach().clone())
        )

    monkeypatch.setattr(ModelOptNvFp4FlashInferMoEMethod, "_derive", stale)
    with pytest.raises(AssertionError):
        test_reload_is_a_fresh_load_at_the_same_addresses(other)
