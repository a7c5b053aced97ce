"""BF16 experts to NVFP4: the same bytes as the format module, and nothing half-written."""

import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_nvfp4_pertoken.checkpoints import convert as convert_module
from vllm_nvfp4_pertoken.checkpoints.convert import convert_experts, sizes
from vllm_nvfp4_pertoken.checkpoints.convert.quantize import Quantizer
from vllm_nvfp4_pertoken.checkpoints.drift import drift_experts
from vllm_nvfp4_pertoken.checkpoints.quant_config import parse_quant_config
from vllm_nvfp4_pertoken.checkpoints.verify import verify_checkpoint
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import dequantize, quantize_weight

QWEN = ("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 64, 32, 3, 2


def expert_name(names, layer, expert, projection):
    return f"model.layers.{layer}.{names[0]}.experts.{expert}.{projection}.weight"


def make_checkpoint(path, names=QWEN, *, shards=2, edit=lambda tensors: None):
    """A tiny BF16 model; tensors are dealt out to the shards, so gate and up part company."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        scale = 2.0 ** float(torch.randint(-6, 2, (), generator=generator))
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    tensors = {
        "model.embed_tokens.weight": random(100, HIDDEN),
        "model.norm.weight": random(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = random(HIDDEN)
        for projection in ("q_proj", "o_proj"):
            tensors[f"{prefix}.self_attn.{projection}.weight"] = random(HIDDEN, HIDDEN)
        tensors[f"{prefix}.self_attn.q_norm.weight"] = random(16)
        tensors[f"{prefix}.{names[0]}.gate.weight"] = random(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for projection in names[1:]:
                shape = (INTERMEDIATE, HIDDEN) if projection != names[3] else (HIDDEN, INTERMEDIATE)
                tensors[expert_name(names, layer, expert, projection)] = random(*shape)
    edit(tensors)
    path.mkdir()
    weight_map = {}
    for shard in range(shards):
        part = dict(list(tensors.items())[shard::shards])
        file = (
            f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            if shards > 1
            else "model.safetensors"
        )
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(
        json.dumps({"architectures": ["X"], "num_experts": EXPERTS, "torch_dtype": "bfloat16"})
    )
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"old weights")
    return tensors


def load(path):
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("names", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_weights(tmp_path, names, shards):
    source = make_checkpoint(tmp_path / "src", names, shards=shards)
    convert_experts(tmp_path / "src", tmp_path / "dst")
    result = load(tmp_path / "dst")
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            gate, up, down = (
                source.pop(expert_name(names, layer, expert, name)) for name in names[1:]
            )
            shared = torch.maximum(gate.abs().max(), up.abs().max()).float() / 2688
            for name, weight, scale_2 in zip(
                names[1:], (gate, up, down), (shared, shared, None), strict=True
            ):
                stem = expert_name(names, layer, expert, name).removesuffix(".weight")
                expected = quantize_weight(weight, scale_2)
                for kind in ("weight", "weight_scale", "weight_scale_2"):
                    actual = result.pop(f"{stem}.{kind}")
                    assert actual.dtype == getattr(expected, kind).dtype
                    assert torch.equal(
                        actual.view(torch.uint8) if actual.ndim else actual,
                        getattr(expected, kind).view(torch.uint8)
                        if actual.ndim
                        else getattr(expected, kind),
                    ), f"{stem}.{kind}"
                values = dequantize(*expected)
                assert (values - weight.float()).abs().max() <= weight.abs().max().float() / 6
    # All else is untouched.
    assert result.keys() == source.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in source.items())


def test_files(tmp_path):
    make_checkpoint(tmp_path / "src")
    seen = []
    convert_experts(tmp_path / "src", tmp_path / "dst", progress=lambda *args: seen.append(args))
    dst = tmp_path / "dst"
    assert {file.name for file in dst.iterdir()} == {
        "config.json",
        "hf_quant_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    config = json.loads((dst / "config.json").read_text())
    assert config["architectures"] == ["X"]
    quantization = config["quantization_config"]
    # As ModelOpt 0.47 exports a Qwen3-MoE of two layers with only its experts quantized.
    expected_ignore = [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.self_attn*",
        "model.layers.1.mlp.gate",
        "model.layers.1.self_attn*",
    ]
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert quantization.pop("producer")["name"] == "vllm-nvfp4-pertoken"
    assert quantization == {
        "config_groups": {
            "group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
        },
        "ignore": expected_ignore,
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    }
    legacy = json.loads((dst / "hf_quant_config.json").read_text())
    assert legacy["quantization"]["exclude_modules"] == expected_ignore
    parse_quant_config(config["quantization_config"] | {"ignore": expected_ignore}, source="test")
    parse_quant_config(legacy, source="test")
    summary = verify_checkpoint(dst)
    assert (summary.moe_layers, summary.dense_layers) == (LAYERS, 0)
    assert summary.expert_bytes == sizes(dst).experts
    total = LAYERS * EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2
    assert sizes(tmp_path / "src").experts == total
    everything = sizes(tmp_path / "src").total
    assert seen[-1] == (everything, everything)
    assert seen == sorted(seen)


def test_an_expert_of_zeros(tmp_path):
    name = expert_name(QWEN, 0, 1, "gate_proj")
    zeros = [name, name.replace("gate", "up"), name.replace("gate", "down")]
    make_checkpoint(tmp_path / "src", edit=lambda t: [t[n].zero_() for n in zeros])
    convert_experts(tmp_path / "src", tmp_path / "dst")
    result = load(tmp_path / "dst")
    stem = name.removesuffix(".weight")
    values = dequantize(
        *(result[f"{stem}.{kind}"] for kind in ("weight", "weight_scale", "weight_scale_2"))
    )
    assert not values.any()
    verify_checkpoint(tmp_path / "dst")


def refused(tmp_path, kind, *texts):
    """The conversion fails with these words and leaves nothing behind."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(kind) as error:
        convert_experts(tmp_path / "src", tmp_path / "dst")
    for text in texts:
        assert text in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def test_missing_projection(tmp_path):
    name = expert_name(QWEN, 1, 2, "up_proj")
    make_checkpoint(tmp_path / "src", edit=lambda t: t.pop(name))
    refused(tmp_path, CheckpointError, f"{name} is missing")


def test_wrong_shape(tmp_path):
    name = expert_name(QWEN, 1, 2, "up_proj")
    make_checkpoint(
        tmp_path / "src", edit=lambda t: t.update({name: torch.zeros(4, 24).bfloat16()})
    )
    refused(tmp_path, UnsupportedError, name, "BF16 [4, 24]", "a multiple of 16")


def test_values_that_are_not_finite(tmp_path):
    name = expert_name(QWEN, 1, 0, "down_proj")
    make_checkpoint(tmp_path / "src", edit=lambda t: t[name].view(-1)[5:6].fill_(torch.nan))
    refused(tmp_path, CheckpointError, name, "finite")


def test_quantized_already(tmp_path):
    make_checkpoint(tmp_path / "src")
    convert_experts(tmp_path / "src", tmp_path / "once")
    (tmp_path / "src").rename(tmp_path / "bf16")
    (tmp_path / "once").rename(tmp_path / "src")
    refused(tmp_path, UnsupportedError, "quantized already", "'modelopt'")


def test_no_experts(tmp_path):
    make_checkpoint(
        tmp_path / "src", edit=lambda t: [t.pop(n) for n in list(t) if ".experts." in n]
    )
    refused(tmp_path, UnsupportedError, "no tensors of single experts", "mlp.experts.0.gate_proj")


def test_truncated_shard(tmp_path):
    make_checkpoint(tmp_path / "src")
    file = tmp_path / "src" / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(tmp_path, CheckpointError, str(file), "truncated")


def test_existing_destination_is_kept(tmp_path):
    make_checkpoint(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "mine").write_text("keep")
    refused(tmp_path, CheckpointError, f"{tmp_path / 'dst'} exists")
    assert (tmp_path / "dst" / "mine").read_text() == "keep"


def test_interrupted(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "src")

    def interrupt(*args):
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    monkeypatch.setattr(convert_module, "copied_files", interrupt)
    monkeypatch.setattr(convert_module, "check_space", lambda *args: None)
    refused(tmp_path, KeyboardInterrupt)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", [CheckpointError, KeyboardInterrupt])
def test_a_failure_ends_the_other_threads_first(tmp_path, monkeypatch, kind):
    make_checkpoint(tmp_path / "src", shards=1)
    busy = threading.Event()
    ended = []

    def run(self, task, write):
        if task.kind == "quantize" and not busy.is_set():
            busy.set()
            time.sleep(0.3)
            ended.append(task)
        elif task.kind == "copy" and busy.is_set():
            raise kind("the reason")

    monkeypatch.setattr(Quantizer, "run", run)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    refused(tmp_path, kind, "the reason")
    assert len(ended) == 1


def test_drift_moves_only_scales(tmp_path):
    make_checkpoint(tmp_path / "src", MIXTRAL)
    convert_experts(tmp_path / "src", tmp_path / "a")
    drift_experts(tmp_path / "a", tmp_path / "b")
    before, after = load(tmp_path / "a"), load(tmp_path / "b")
    assert before.keys() == after.keys()
    factors = set()
    for name, old in before.items():
        new = after[name]
        if name.endswith((".w3.weight_scale_2", ".w2.weight_scale_2")):
            factor = float((new / old).log2())
            assert factor == int(factor)
            assert abs(factor) >= 8
            factors.add(factor)
            if ".w3." in name:
                down = name.replace(".w3.", ".w2.")
                assert torch.equal(new * after[down], old * before[down])
        else:
            assert torch.equal(
                old.view(torch.uint8) if old.ndim else old,
                new.view(torch.uint8) if new.ndim else new,
            )
    assert max(factors) > 0 > min(factors)
