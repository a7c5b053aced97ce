"""Per-token experts on trtllm-gen: vLLM's whole path but the compiled kernels."""

from typing import Any

import pytest
import torch
from experts_inputs import random_weights, routed_rows
from layers import assert_same_layer, expected, moe_layer, run

from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.experts.reference import Activation

SILU = Activation("silu")
ROUTES, ROUTED = "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"


def logits_for(rows: int, experts: int) -> torch.Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(4)).bfloat16()


def check(
    hidden_size: int = 256,
    inter: int = 128,
    experts: int = 8,
    activation: Activation = SILU,
    *,
    rows: int = 24,
    top_k: int = 2,
    tp_size: int = 1,
    router: Any = None,
    **arguments: Any,
) -> None:
    """A random layer gives what the reference makes of it, routed by ``router`` or vLLM's."""
    weights = random_weights(experts, hidden_size, inter, activation)
    hidden, _, _ = routed_rows(rows, hidden_size, experts, top_k)
    logits = logits_for(rows, experts)
    arguments = {"top_k": top_k, "tp_size": tp_size, **arguments}
    with moe_layer(weights, activation.name, **arguments) as (config, runner):
        assert runner.routed_experts.quant_method.choice.name == "flashinfer_trtllm"
        actual = run(config, runner, hidden, logits)
        routed = router(logits, top_k) if router else runner.router.select_experts(hidden, logits)
        reference = expected(runner, weights, activation, hidden, *routed, tp_size)
        assert_same_layer(actual, reference)


@pytest.fixture(autouse=True)
def kernels(blackwell, no_reference):
    return blackwell


@pytest.mark.parametrize("rows", [0, 1, 7, 4096, 9000])
def test_rows(rows, kernels):
    check(rows=rows)
    assert kernels.calls == ([(ROUTES, rows)] if rows else [])


@pytest.mark.parametrize("hidden", [256, 576, 2688, 2880])
@pytest.mark.parametrize("activation", [SILU, Activation("relu2_no_mul")], ids=lambda a: a.name)
def test_hidden_sizes_are_padded(hidden, activation):
    check(hidden, 64, 4, activation)


@pytest.mark.parametrize(
    ("inter", "tp_size"),
    [(704, 1), (704, 2), (704, 4), (720, 1), (768, 1), (768, 2), (768, 4), (768, 8)],
)
@pytest.mark.parametrize("activation", [SILU, Activation("relu2_no_mul")], ids=lambda a: a.name)
def test_intermediate_sizes_are_padded(inter, tp_size, activation):
    check(256, inter, 4, activation, tp_size=tp_size)


@pytest.mark.parametrize(("inter", "tp_size"), [(704, 8), (720, 2), (720, 4), (720, 8)])
def test_parts_of_blocks_are_refused(inter, tp_size):
    with pytest.raises(UnsupportedError, match=rf"is {inter // tp_size}\. Expected: a multiple of"):
        check(256, inter, 4, tp_size=tp_size)


def bias(experts: int) -> torch.nn.Parameter:
    values = torch.randn(experts, generator=torch.Generator().manual_seed(6))
    return torch.nn.Parameter(values, requires_grad=False)


def sigmoid_routing(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which vLLM has no router for on CPUs."""
    scores, ids = logits.float().sigmoid().topk(top_k)
    return scores, ids.int()


def unit_sums(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weights / weights.sum(-1, keepdim=True), ids


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3": ({"experts": 16, "top_k": 4}, ROUTES),
    "mixtral": ({"experts": 8, "top_k": 2}, ROUTES),
    "not renormalized": ({"renormalize": False}, ROUTED),
    "sigmoid": (
        {"scoring_func": "sigmoid", "renormalize": False, "router": sigmoid_routing},
        ROUTES,
    ),
    "sigmoid renormalized": (
        {"scoring_func": "sigmoid", "router": lambda *given: unit_sums(*sigmoid_routing(*given))},
        ROUTES,
    ),
    "deepseek v3": (
        {
            "experts": 32,
            "top_k": 4,
            "use_grouped_topk": True,
            "num_expert_group": 8,
            "topk_group": 4,
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
            "e_score_correction_bias": bias(32),
            "router_logits_dtype": torch.float32,
        },
        ROUTES,
    ),
    "nemotron": (
        {
            "experts": 16,
            "top_k": 4,
            "activation": Activation("relu2_no_mul"),
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.5,
            "e_score_correction_bias": bias(16),
            "router_logits_dtype": torch.float32,
        },
        ROUTES,
    ),
    "gemma": ({"activation": Activation("gelu_tanh")}, ROUTES),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers(kind, kernels):
    arguments, kernel = KINDS[kind]
    check(**arguments)
    assert kernels.calls == [(kernel, 24)]


def llama4_routing(hidden_states, gating_output, topk, renormalize):
    scores, ids = gating_output.topk(topk)
    return scores.float().sigmoid(), ids.int()


def test_llama4_weighs_rows_before_the_experts(kernels):
    check(
        top_k=1,
        custom_routing_function=llama4_routing,
        apply_router_weight_on_input=True,
    )
    assert kernels.calls == [(ROUTED, 24)]


@pytest.mark.parametrize("ep_size", [2, 4])
def test_experts_of_other_ranks_contribute_nothing(ep_size, kernels):
    check(experts=16, top_k=4, tp_size=ep_size, engine={"enable_expert_parallel": True})
    assert kernels.calls == [(ROUTES, 24)]


def test_expert_of_zeros(kernels):
    """ModelOpt writes NaN scales and a second scale of 0; the kernel must get neither."""
    weights = random_weights(4, 256, 128, SILU)
    weights.w13[1, :128] = 0  # a gate without its up
    weights.w13_scale[1, :128].view(torch.uint8).fill_(0x7F)
    weights.w13_scale_2[1, 0] = 0
    for codes, scale, scale_2 in (
        (weights.w13, weights.w13_scale, weights.w13_scale_2),
        (weights.w2, weights.w2_scale, weights.w2_scale_2),
    ):
        codes[2] = 0
        scale[2].view(torch.uint8).fill_(0x7F)
        scale_2[2] = 0
    without = weights._replace(
        w13_scale=weights.w13_scale.float().nan_to_num(0).to(torch.float8_e4m3fn),
        w2_scale=weights.w2_scale.float().nan_to_num(0).to(torch.float8_e4m3fn),
    )
    hidden, _, _ = routed_rows(24, 256, 4, 2)
    logits = logits_for(24, 4)
    with moe_layer(weights) as (config, runner):
        actual = run(config, runner, hidden, logits)
        routed = runner.router.select_experts(hidden, logits)
        assert_same_layer(actual, expected(runner, without, SILU, hidden, *routed))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"swiglu_limit": 7.0}, "limit 7.0.*before or after the row scale"),
        ({"has_bias": True}, "no biases to the kernel"),
        ({"activation": Activation("gelu")}, "activation is gelu;"),
        ({"activation": Activation("swigluoai")}, "swigluoai.*row scale"),
        ({"experts": 64, "top_k": 40}, "40 experts per token, of at most 32"),
        ({"engine": {"dtype": "float16"}}, "output is bfloat16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_proof_is_refused(arguments, reason):
    with pytest.raises(UnsupportedError, match=f"flashinfer_trtllm cannot run here: .*{reason}"):
        check(backend="flashinfer_trtllm", **arguments)


MUTATIONS = ["gate and up", "permutation", "input scale", "row scales", "base scale", "strides"]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_caught(mutation, kernels, monkeypatch):
    """The tests above fail on each of these, so this one fails if they would not."""
    from flashinfer.fused_moe import core
    from vllm.model_executor.layers.fused_moe.experts import trtllm_nvfp4_moe
    from vllm.model_executor.layers.quantization.utils import flashinfer_fp4_moe, flashinfer_utils

    from vllm_nvfp4_pertoken.engine.flashinfer import ModelOptNvFp4FlashInferMoEMethod

    quantize = flashinfer_utils.quantize_nvfp4_per_token_input

    def rows(change):
        def changed(hidden):
            codes, blocks, row_scale = quantize(hidden)
            return codes, blocks, change(row_scale)

        monkeypatch.setattr(trtllm_nvfp4_moe, "quantize_nvfp4_per_token_input", changed)

    if mutation == "gate and up":
        monkeypatch.setattr(flashinfer_fp4_moe, "reorder_w1w3_to_w3w1", lambda w, s, dim=-2: (w, s))
    elif mutation == "permutation":

        def unchanged(cache, tensor, *args, **kwargs):
            return torch.arange(tensor.shape[0])

        monkeypatch.setattr(core, "_maybe_get_cached_w3_w1_permute_indices", unchanged)
        monkeypatch.setattr(core, "get_w2_permute_indices_with_cache", unchanged)
    elif mutation == "input scale":
        derive = ModelOptNvFp4FlashInferMoEMethod._derive

        def folded(self, layer, experts, up_scale):
            derive(self, layer, experts, up_scale)
            layer.w13_weight_scale_2.data.mul_(1.5)

        monkeypatch.setattr(ModelOptNvFp4FlashInferMoEMethod, "_derive", folded)
    elif mutation == "row scales":
        rows(torch.ones_like)
    elif mutation == "base scale":
        monkeypatch.setattr(flashinfer_utils, "NVFP4_PER_TOKEN_BASE_GLOBAL_SCALE", 1.0)
    else:
        rows(lambda scale: scale.repeat_interleave(2)[::2])
    with pytest.raises(AssertionError):
        check()
