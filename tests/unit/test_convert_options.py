"""`convert` with all its options and sources; what it refuses; and that kills cost nothing.

Bytes are compared with ModelOpt's own quantizer, given the amax that the projections share.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors import safe_open
from safetensors.torch import save_file
from test_convert import load, make_checkpoint
from typer.testing import CliRunner

from vllm_nvfp4_pertoken.checkpoints.convert import Options, convert_checkpoint, make_plan
from vllm_nvfp4_pertoken.checkpoints.convert import write as write_module
from vllm_nvfp4_pertoken.checkpoints.convert.check import measure_errors
from vllm_nvfp4_pertoken.checkpoints.convert.plan import Output
from vllm_nvfp4_pertoken.checkpoints.convert.write import ShardWriter
from vllm_nvfp4_pertoken.checkpoints.verify import verify_checkpoint
from vllm_nvfp4_pertoken.cli import app
from vllm_nvfp4_pertoken.errors import CheckpointError, PerTokenError, UnsupportedError

H, INTER, EXPERTS = 64, 32, 3


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


def write_checkpoint(path, tensors, config=None):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config or {}))


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def assert_modelopts(result, stem, weight, amax, names=("weight", "weight_scale_2")):
    """The three tensors of a module are what ModelOpt makes of this weight and amax."""
    packed, scale, scale_2 = NVFP4QTensor.quantize(
        weight.clone(), 16, weights_scaling_factor_2=amax.float() / 2688
    )
    expected = (packed._quantized_data, scale, scale_2)
    kinds = (names[0], "weight_scale", names[1])
    for kind, tensor in zip(kinds, expected, strict=True):
        actual = result[f"{stem}.{kind}"]
        if kind == "weight_global_scale":
            tensor = (1 / tensor).reshape(1)
        assert actual.dtype == tensor.dtype
        assert actual.shape == tensor.shape
        assert torch.equal(bits(actual), bits(tensor)), f"{stem}.{kind}"


def amax_of(*weights):
    return torch.stack([weight.abs().max() for weight in weights]).max()


ATTENTION = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]


def with_attention(tensors):
    """q, k and v of very different size, a shared expert, and what must never be quantized."""
    for seed, (name, scale) in enumerate(zip(ATTENTION, (1, 8, 0.1, 3), strict=True)):
        tensors[f"{name}.weight"] = random(H, H, seed=seed) * scale
    for name, rows, columns in (("gate", INTER, H), ("up", INTER, H), ("down", H, INTER)):
        tensors[f"model.layers.0.mlp.shared_expert.{name}_proj.weight"] = random(rows, columns)
    tensors["model.layers.0.mlp.shared_expert_gate.weight"] = random(16, H)
    tensors["lm_head.weight"] = random(100, H)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = random(H, H)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_all(tmp_path, shards, format):
    source = make_checkpoint(tmp_path / "src", shards=shards, edit=with_attention)
    options = Options(all_linears=True, format=format)
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", options)
    result = load(tmp_path / "dst")
    names = ("weight", "weight_scale_2")
    if format == "compressed-tensors":
        names = ("weight_packed", "weight_global_scale")
    groups = [ATTENTION[:3], ATTENTION[3:]]
    for stem in ("shared_expert", "experts.0", "experts.2"):
        both = [f"model.layers.0.mlp.{stem}.{p}_proj" for p in ("gate", "up")]
        groups += [both, [f"model.layers.0.mlp.{stem}.down_proj"]]
    for group in groups:
        weights = [source[f"{name}.weight"] for name in group]
        for name, weight in zip(group, weights, strict=True):
            assert_modelopts(result, name, weight, amax_of(*weights), names)
    for name in ("lm_head", "mtp.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate"):
        assert torch.equal(result[f"{name}.weight"], source[f"{name}.weight"])
    assert set(make_plan(tmp_path / "src", options).ignored) == {
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.1.mlp.gate",
        "mtp.layers.0.self_attn*",
    }


def test_compressed_tensors_reads_it(tmp_path):
    """The package's own config classes and decompressor, against our dequantization."""
    make_checkpoint(tmp_path / "src")
    convert_checkpoint(tmp_path / "src", tmp_path / "mo")
    convert_checkpoint(tmp_path / "src", tmp_path / "ct", Options(format="compressed-tensors"))
    section = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    scheme = config.config_groups["group_0"]
    assert config.format == "nvfp4-pack-quantized"
    assert config.quantization_status.value == "compressed"
    assert "re:model\\.layers\\.0\\.self_attn.*" in config.ignore
    assert not (tmp_path / "ct/hf_quant_config.json").exists()
    result, twin = load(tmp_path / "ct"), load(tmp_path / "mo")
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    stem = "model.layers.1.mlp.experts.2.up_proj"
    state = {
        kind: result[f"{stem}.{kind}"]
        for kind in ("weight_packed", "weight_scale", "weight_global_scale")
    }
    assert torch.equal(state["weight_packed"], twin[f"{stem}.weight"])
    weight = compressor.decompress(state, scheme)["weight"].float()
    source = load(tmp_path / "src")[f"{stem}.weight"].float()
    assert (weight - source).norm() < 0.12 * source.norm()


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_split(tmp_path, transposed):
    both, down = random(EXPERTS, 2 * INTER, H), random(EXPERTS, H, INTER)
    both[1] *= 16
    stored = [t.transpose(1, 2).contiguous() if transposed else t for t in (both, down)]
    container = "model.language_model.layers.0.mlp.experts"
    tensors = {f"{container}.gate_up_proj": stored[0], f"{container}.down_proj": stored[1]}
    write_checkpoint(tmp_path / "src", tensors, {"model_type": "qwen3_vl_moe"})
    convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    result = load(tmp_path / "dst")
    for expert in range(EXPERTS):
        stem = f"{container}.{expert}"
        gate, up = both[expert].chunk(2)
        assert_modelopts(result, f"{stem}.gate_proj", gate, amax_of(gate, up))
        assert_modelopts(result, f"{stem}.up_proj", up, amax_of(gate, up))
        assert_modelopts(result, f"{stem}.down_proj", down[expert], amax_of(down[expert]))
    assert len(result) == EXPERTS * 9
    assert verify_checkpoint(tmp_path / "dst").moe_layers == 1


def test_fused_experts_that_stay_fused(tmp_path):
    """Llama 4: packed along the second last dimension, one scale for all experts."""
    container = "model.layers.0.feed_forward.experts"
    tensors = {
        f"{container}.gate_up_proj": random(EXPERTS, H, 2 * INTER),
        f"{container}.down_proj": random(EXPERTS, INTER, H),
    }
    write_checkpoint(tmp_path / "src", tensors, {"model_type": "llama4_text"})
    plan = make_plan(tmp_path / "src", Options())
    convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    result = load(tmp_path / "dst")
    for name, tensor in tensors.items():
        packed, scale, scale_2 = NVFP4QTensor.quantize(tensor.transpose(1, 2).contiguous(), 16)
        assert torch.equal(result[name], packed._quantized_data.transpose(1, 2))
        assert torch.equal(
            result[f"{name}_weight_scale"].view(torch.uint8),
            scale.transpose(1, 2).contiguous().view(torch.uint8),
        )
        assert result[f"{name}_weight_scale_2"] == scale_2
    assert max(e.relative for e in measure_errors(plan, tmp_path / "dst")) < 0.12


def test_fp8_blocks(tmp_path):
    """DeepSeek's FP8: the values it stands for, rounded to BF16, and no FP8 left."""
    shape, block = (160, 144), 64
    tensors, values = {}, {}
    for i, name in enumerate(
        [f"model.layers.0.mlp.experts.0.{p}_proj" for p in ("gate", "up", "down")]
        + ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.0.up_proj"]
    ):
        weight = random(*shape, seed=i).to(torch.float8_e4m3fn)
        scale = torch.rand(3, 3, generator=torch.Generator().manual_seed(i)) + 0.1
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = weight, scale
        full = scale.repeat_interleave(block, 0)[:160].repeat_interleave(block, 1)[:, :144]
        values[name] = (weight.float() * full).bfloat16()
    config = {
        "num_hidden_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]},
    }
    write_checkpoint(tmp_path / "src", tensors, config)
    convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    result = load(tmp_path / "dst")
    *experts, attention, draft = values
    shared = amax_of(values[experts[0]], values[experts[1]])
    for name, amax in zip(experts, (shared, shared, amax_of(values[experts[2]])), strict=True):
        assert_modelopts(result, name, values[name], amax)
    for name in (attention, draft):  # a layer beyond num_hidden_layers is a draft's
        assert torch.equal(result[f"{name}.weight"], values[name])
    assert not any("scale_inv" in name for name in result)
    config = json.loads((tmp_path / "dst/config.json").read_text())["quantization_config"]
    assert config["ignore"] == [
        "lm_head",
        "model.layers.0.self_attn*",
        "model.layers.1.mlp.experts*",
    ]


def test_matrices_larger_than_a_chunk(tmp_path, monkeypatch):
    """The bytes do not depend on how a matrix is cut."""
    from vllm_nvfp4_pertoken.checkpoints.convert import plan, quantize, read

    make_checkpoint(tmp_path / "src", edit=with_attention)
    convert_checkpoint(tmp_path / "src", tmp_path / "whole", Options(all_linears=True))
    for module in (read, quantize, plan):
        monkeypatch.setattr(module, "CHUNK_BYTES", 3 * H * 2)
    convert_checkpoint(tmp_path / "src", tmp_path / "cut", Options(all_linears=True))
    assert files(tmp_path / "whole") == files(tmp_path / "cut")


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_exclude(tmp_path):
    make_checkpoint(tmp_path / "src", edit=with_attention)

    def quantized(*patterns, all_linears=True):
        plan = make_plan(tmp_path / "src", Options(all_linears, patterns))
        return {member.module for task in plan.tasks for member in task.members}

    everything = quantized()
    assert quantized("*.self_attn.*") == {n for n in everything if "self_attn" not in n}
    assert quantized("model.layers.1") == {n for n in everything if ".layers.1." not in n}
    assert quantized("model.layers.0.mlp.experts", all_linears=False) == {
        n for n in quantized(all_linears=False) if ".layers.1." in n
    }
    for pattern, words in (
        ("*.k_proj", ("k_proj", "but not", "q_proj", "served as one layer")),
        ("*.experts.1.*", ("experts.1.", "but not", "experts.0.")),
        ("self_atn", ("'self_atn' matches no module", "modules such as model.layers.0")),
    ):
        with pytest.raises(UnsupportedError) as error:
            quantized(pattern)
        assert all(word in str(error.value) for word in words), str(error.value)
    with pytest.raises(UnsupportedError, match="leave nothing"):
        quantized("*")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("m.experts.down_proj"), ("gate_up_proj", "is alone", "lacks down_proj")),
        (
            lambda t: t.update({"m.experts.down_proj": random(EXPERTS, H, 16)}),
            ("[3, 64, 64]", "down_proj [3, 64, 16]", "[E, 2I, H] and [E, H, I]"),
        ),
        (
            lambda t: t.update({"m.fc.weight": random(4, 4).to(torch.float8_e4m3fn)}),
            ("m.fc.weight in", "F8_E4M3 [4, 4]", "weight_block_size"),
        ),
    ],
)
def test_refused_sources(tmp_path, edit, words):
    tensors = {
        "m.experts.gate_up_proj": random(EXPERTS, 2 * INTER, H),
        "m.experts.down_proj": random(EXPERTS, H, INTER),
    }
    edit(tensors)
    write_checkpoint(tmp_path / "src", tensors)
    with pytest.raises(PerTokenError) as error:
        convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_full_disk(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "src")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(write_module.shutil, "disk_usage", lambda path: usage._replace(free=20_000))
    with pytest.raises(CheckpointError, match=r"0\.00 GB free, and .* are to be written"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_where_the_result_may_be(tmp_path):
    make_checkpoint(tmp_path / "src")
    for dst in (tmp_path / "src", tmp_path / "src/dst", tmp_path):
        with pytest.raises(CheckpointError, match="inside of the other"):
            convert_checkpoint(tmp_path / "src", dst, force=True)
    (tmp_path / "precious").mkdir()
    with pytest.raises(CheckpointError, match=r"no directory with a config\.json"):
        convert_checkpoint(tmp_path / "src", tmp_path / "precious", force=True)
    convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    first = files(tmp_path / "dst")
    with pytest.raises(CheckpointError, match="--force"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "dst/stale").touch()
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", force=True)
    assert files(tmp_path / "dst") == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "precious", "src"]


KILLED = """
import os, random, signal, sys
from pathlib import Path
import torch
from vllm_nvfp4_pertoken.checkpoints.convert import convert_checkpoint

src, target, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
NAMES = ("pwrite", "replace", "rename", "fsync", "unlink", "ftruncate", "preadv", "mkdir")

def child(number, points):
    '''Convert, and be killed before the call with this number; None: count the calls.'''
    calls = 0
    def counted(call):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapper
    for name in NAMES:
        setattr(os, name, counted(getattr(os, name)))
    convert_checkpoint(src, points, threads=1)
    return calls

def fork(number, path):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(write, str(child(number, path)).encode())
        os._exit(0)
    os.close(write)
    status = os.waitpid(pid, 0)[1]
    return status, os.read(read, 100)

torch.set_num_threads(1)
status, calls = fork(None, target / "whole")
assert status == 0
calls = int(calls)
points = [1, calls, calls - 1] + random.Random(5).sample(range(2, calls - 1), count - 3)
for point in points:
    path = target / f"killed-{point}"
    status, _ = fork(point, path)
    assert os.WTERMSIG(status) == signal.SIGKILL, (point, status)
    # Whole or not there.
    assert not path.exists() or (path / "config.json").is_file(), point
    status, again = fork(None, path)
    assert status == 0, point
    print(point, calls, int(again), path.name)
"""


def test_killed_at_any_moment(tmp_path):
    make_checkpoint(tmp_path / "src", shards=4)
    target = tmp_path / "out"
    target.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "src", target, "12"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = files(target / "whole")
    results = [line.split() for line in done.stdout.splitlines()]
    assert len(results) == 12
    for _, _, _, name in results:
        assert files(target / name) == expected, name
    assert len(list(target.iterdir())) == 13  # nothing is left over
    # Resumed, not repeated: a kill near the end leaves little to do.
    late = [int(again) for point, calls, again, _ in results if int(point) > 0.9 * int(calls)]
    assert late
    assert max(late) < int(results[0][1]) / 2


def test_unfinished_work_of_another_kind(tmp_path):
    make_checkpoint(tmp_path / "src")
    work = tmp_path / ".dst.partial"
    work.mkdir()
    (work / write_module.STATE_NAME).write_text("{}")
    (work / "model-00001-of-00002.safetensors").write_text("other bytes")
    with pytest.raises(CheckpointError, match="other options"):
        convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert work.exists()
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", force=True)
    verify_checkpoint(tmp_path / "dst")
    assert not work.exists()


def test_shards_are_aligned_safetensors(tmp_path):
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.tensor(1.5),
        "c": torch.arange(4, dtype=torch.int64),
        "d": torch.zeros(0, 4).bfloat16(),
    }
    kinds = {"a": "U8", "b": "F32", "c": "I64", "d": "BF16"}
    outputs = [Output(name, kinds[name], tuple(t.shape)) for name, t in tensors.items()]
    writer = ShardWriter(tmp_path / "x.safetensors", outputs)
    for name, tensor in reversed(tensors.items()):
        writer.write(name, 0, tensor)
    writer.finish()
    writer.close()
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        for name, tensor in tensors.items():
            assert torch.equal(opened.get_tensor(name), tensor)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_command_line(tmp_path):
    make_checkpoint(tmp_path / "src", edit=with_attention)
    src, dst = tmp_path / "src", tmp_path / "dst"
    result = run("convert", src, dst, "--all", "--exclude", "model.layers.1", "--verify")
    assert result.exit_code == 0, result.output
    for text in ("modules to NVFP4", "MB/s", "Worst of", f"vllm serve {dst}"):
        assert text in result.output
    result = run("convert", src, dst)
    assert result.exit_code == 1
    assert f"Error: {dst} exists." in result.output
    assert "--force" in result.output
    result = run("convert", Path("/nowhere"), tmp_path / "other")
    assert result.exit_code == 1
    assert "/nowhere is not a directory" in result.output
    help_text = run("convert", "--help").output
    for text in ("--experts-only", "without calibration", "goes", "vllm serve"):
        assert text in help_text
