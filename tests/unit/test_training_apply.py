"""`training.apply` on Hugging Face models: what it replaces, leaves, refuses, and undoes."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from cases import assert_bitwise
from torch import nn

from vllm_nvfp4_pertoken import training
from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.experts.reference import Activation
from vllm_nvfp4_pertoken.training import operators

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}
TOKENS = torch.arange(24).view(2, 12)
EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(2)]
ATTENTION = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in ("q", "k", "v", "o")]


def qwen3_moe(**changes):
    config = transformers.Qwen3MoeConfig(
        **COMMON, intermediate_size=96, moe_intermediate_size=32, num_experts=4, **changes
    )
    return make(config)


def make(config, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).bfloat16()


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def same(actual, expected):
    assert_bitwise({"output": actual}, {"output": expected})


def inputs_of(module, model):
    """What a module is given in a forward pass of the model, and what it makes of it."""
    seen = []
    hook = module.register_forward_hook(lambda _, args, output: seen.append((*args, output)))
    with torch.no_grad():
        model(input_ids=TOKENS)
    hook.remove()
    return seen[0]


def test_fused_experts_compute_with_the_operator_and_learn():
    model = qwen3_moe()
    before = logits(model)
    applied = training.apply(model)
    assert list(applied.replaced) == EXPERTS
    assert set(applied.replaced.values()) == {"fused experts (silu, cpu)"}
    assert applied.left == dict.fromkeys(ATTENTION, "dense") | {"lm_head": "never quantized"}
    for name in EXPERTS:
        module = model.get_submodule(name)
        hidden, ids, weights, output = inputs_of(module, model)
        masters = module.gate_up_proj, module.down_proj
        with torch.no_grad():
            same(output, training.experts(hidden, weights, ids, *masters, Activation("silu")))
    assert not torch.equal(logits(model), before)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_remove_brings_everything_back():
    model = qwen3_moe()
    config, before = model.config, logits(model)
    implementation = config._experts_implementation
    with training.apply(model, dense=True) as applied:
        per_token = logits(model)
        assert not torch.equal(per_token, before)
        # Other models with this configuration, and the model's own, know nothing of it.
        assert config._experts_implementation == implementation
    same(logits(model), before)
    assert {type(m) for m in model.modules()} == {type(m) for m in qwen3_moe().modules()}
    assert all(not hasattr(m, "nvfp4_per_token") for m in model.modules())
    assert model.get_submodule(EXPERTS[0]).config is config
    applied.remove()
    training.apply(model, dense=True)
    same(logits(model), per_token)


def test_dense_linears_share_scales_as_the_server_fuses_them():
    model = qwen3_moe(mlp_only_layers=[1])
    applied = training.apply(model, dense=True)
    mlp = [f"model.layers.1.mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert set(applied.replaced) == {EXPERTS[0], *ATTENTION, *mlp}
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    for module, siblings in (
        (attention.q_proj, (attention.k_proj, attention.v_proj)),
        (attention.v_proj, (attention.k_proj, attention.q_proj)),
        (attention.o_proj, ()),
        (mlp.up_proj, (mlp.gate_proj,)),
        (mlp.down_proj, ()),
    ):
        x, output = inputs_of(module, model)
        with torch.no_grad():
            shared = [m.weight for m in siblings]
            same(output, training.linear(x, module.weight, shared_with=shared))
    assert isinstance(attention.q_proj, nn.Linear)
    assert list(model.state_dict()) == list(qwen3_moe(mlp_only_layers=[1]).state_dict())


def test_a_copy_has_its_own_weights_and_the_original_keeps_its():
    model = qwen3_moe()
    training.apply(model, dense=True)
    before = logits(model)
    twin = copy.deepcopy(model)
    same(logits(twin), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.3)
    same(logits(model), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    same(logits(model), logits(twin))
    same(logits(pickle.loads(pickle.dumps(model))), logits(twin))


def test_constant_weights_are_quantized_once_and_changes_are_seen(monkeypatch):
    model = qwen3_moe()
    applied = training.apply(model, dense=True)
    before = logits(model)
    calls = []
    for name in ("quantize_experts", "quantize_linear"):
        quantize = getattr(operators, name)
        monkeypatch.setattr(
            operators, name, lambda *a, _f=quantize, **k: calls.append(0) or _f(*a, **k)
        )
    with applied.constant_weights():
        same(logits(model), before)
        assert len(calls) == len(applied.replaced)
        same(logits(model), before)
        assert len(calls) == len(applied.replaced)
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj.mul_(2)
        changed = logits(model)
        assert len(calls) == len(applied.replaced) + 1
    assert not torch.equal(changed, before)
    same(logits(model), changed)
    assert len(calls) == 2 * len(applied.replaced) + 1


def test_families():
    """Attention and routing differ; experts are fused in all, without a gate in the last."""
    mixtral = transformers.MixtralConfig(**COMMON, intermediate_size=32, num_local_experts=4)
    deepseek = transformers.DeepseekV3Config(
        **{k: v for k, v in COMMON.items() if k not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=32, intermediate_size=96, moe_intermediate_size=32,
        n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    for config, count in ((mixtral, 2), (deepseek, 1)):
        model = make(config)
        before = logits(model)
        applied = training.apply(model)
        assert set(applied.replaced.values()) == {"fused experts (silu, cpu)"}
        assert len(applied.replaced) == count
        assert not torch.equal(logits(model), before)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()


class Expert(nn.Module):
    """As models of transformers 4 have them."""

    def __init__(self, names=("gate_proj", "up_proj", "down_proj"), function=F.silu, bias=False):
        super().__init__()
        self.names, self.function = names, function
        for name in names[:-1]:
            setattr(self, name, nn.Linear(64, 32, bias=bias))
        setattr(self, names[-1], nn.Linear(32, 64, bias=bias))

    def forward(self, x):
        *first, last = [getattr(self, name) for name in self.names]
        inner = self.function(first[0](x))
        return last(inner if len(first) == 1 else inner * first[1](x))


class Listed(nn.Module):
    def __init__(self, **expert):
        super().__init__()
        self.gate = nn.Linear(64, 3, bias=False)
        self.experts = nn.ModuleList(Expert(**expert) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


@pytest.mark.parametrize(
    ("expert", "activation"),
    [
        ({}, "silu"),
        ({"names": ("w1", "w3", "w2"), "function": F.gelu}, "gelu"),
        ({"names": ("up_proj", "down_proj"), "function": lambda x: F.relu(x) ** 2}, "relu2_no_mul"),
    ],
)
def test_experts_in_a_list(expert, activation):
    torch.manual_seed(1)
    block = Listed(**expert).bfloat16()
    x = torch.randn(9, 64).bfloat16()
    before = block(x)
    applied = training.apply(block, dense=True)
    what = f"experts in a list, summed by the model ({activation}, cpu)"
    assert applied.replaced == {"experts": what}
    assert applied.left == {"gate": "never quantized"}
    one = block.experts[1]
    *first, last = [getattr(one, name).weight for name in one.names]
    ones, zeros = torch.ones(9, 1), torch.zeros(9, 1, dtype=torch.int32)
    expected = training.experts(
        x, ones, zeros, torch.cat(first)[None], last[None], Activation(activation)
    )
    same(one(x), expected)
    same(one(x.view(3, 3, 64)).view(9, 64), expected)
    with applied.constant_weights():
        same(one(x), expected)
    twin = copy.deepcopy(block)
    same(twin(x), block(x))
    block(x).float().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in block.parameters())
    applied.remove()
    same(block(x), before)
    assert {type(e) for e in block.experts} == {Expert}


def test_excluded_layers_stay():
    model = qwen3_moe()
    applied = training.apply(model, dense=True, exclude=["model.layers.0.*", "*.o_proj"])
    assert set(applied.replaced) == {EXPERTS[1], *ATTENTION[4:7]}
    assert applied.left[EXPERTS[0]] == applied.left[ATTENTION[7]] == "excluded"


def test_the_report_says_what_and_why():
    text = str(training.apply(qwen3_moe()))
    assert text.splitlines() == [
        "per-token NVFP4: 2 x fused experts (silu, cpu): model.layers.0.mlp.experts … "
        "model.layers.1.mlp.experts",
        "left as it is: 8 x dense: model.layers.0.self_attn.q_proj … "
        "model.layers.1.self_attn.o_proj",
        "left as it is: 1 x never quantized: lm_head",
    ]


def refused(model, match, **options):
    types = [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedError, match=match):
        training.apply(model, **options)
    assert [type(m) for m in model.modules()] == types


def test_what_cannot_be_the_servers_is_refused_by_name_and_nothing_is_changed():
    refused(qwen3_moe(hidden_act="tanh"), r"layers\.1\.mlp\.experts has an activation")
    refused(Listed(function=torch.tanh), r"^experts has an activation \(Expert\.forward\)")
    refused(Listed(bias=True), "^experts has experts with biases")
    gpt_oss = transformers.GptOssConfig(**COMMON, intermediate_size=32, num_local_experts=4)
    refused(make(gpt_oss), r"layers\.0\.mlp\.experts is of a family .* Way out: name them in excl")
    odd = transformers.LlamaConfig(**COMMON | {"hidden_size": 72}, intermediate_size=32)
    refused(make(odd), r"q_proj has 72 inputs, not a multiple of 16", dense=True)
    refused(make(odd), "LlamaForCausalLM has nothing to replace")
    model = qwen3_moe()
    training.apply(model)
    refused(model, r"experts computes per-token already; call remove\(\)")
    small = transformers.MixtralConfig(**COMMON, intermediate_size=24, num_local_experts=4)
    refused(make(small), r"experts has sizes \[24, 48, 64\], not all multiples of 16")


def test_the_registered_name_alone_is_refused():
    model = qwen3_moe()
    training.apply(model).remove()
    model.set_experts_implementation("nvfp4_per_token")
    with pytest.raises(UnsupportedError, match=r"not prepared by training\.apply"):
        logits(model)


def test_the_example_of_the_documentation(tmp_path, capsys):
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    qwen3_moe().save_pretrained(tmp_path)
    names = {"batches": [TOKENS]}
    exec(code.replace("Qwen/Qwen3-30B-A3B", str(tmp_path)), names)
    assert "per-token NVFP4: 2 x fused experts" in capsys.readouterr().out
    before = qwen3_moe().state_dict()
    after = names["model"].state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)
