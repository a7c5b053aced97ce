"""What `inspect` says of checkpoints: right ones, damaged ones, odd ones, and of what is none.

Counts and ranges are compared with what safetensors alone reads.
"""

import json
import math
import shutil

import pytest
import torch
from cases import (
    ALL_NVFP4,
    COMPRESSED,
    EXPERTS,
    EXPERTS_ONLY,
    LAYERS,
    NO_CALIBRATION,
    expert_tensor,
    make_case,
    read_tensors,
)
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_nvfp4_pertoken.checkpoints.headers import read_headers
from vllm_nvfp4_pertoken.checkpoints.inspect import inspect_checkpoint
from vllm_nvfp4_pertoken.cli import app

W13, W2 = "routed experts w13", "routed experts w2"
ATTENTION = "model.layers.1.self_attn"


def run(path, *options):
    return CliRunner().invoke(app, ["inspect", str(path), *options])


def as_json(path, *options, status=None):
    result = run(path, "--json", *options)
    content = json.loads(result.stdout)
    assert result.exit_code == (status if status is not None else not content["serves"])
    return content


def row_of(content, kind):
    (row,) = [row for row in content["layers"] if row["kind"] == kind]
    return row


def problems_of(content, *severities):
    return {
        problem["code"]: problem
        for problem in content["problems"]
        if not severities or problem["severity"] in severities
    }


def edited(tmp_path, edit=None, source=ALL_NVFP4, **changes):
    return make_case(source, tmp_path / "case", edit=edit, **changes)


def put(**tensors):
    """An edit: set tensors; None takes one away."""

    def edit(all_tensors):
        for name, tensor in tensors.items():
            all_tensors.pop(name, None)
            if tensor is not None:
                all_tensors[name] = tensor

    return edit


# Right ones


@pytest.mark.parametrize("path", [ALL_NVFP4, NO_CALIBRATION, COMPRESSED], ids=lambda p: p.name)
def test_counts_sizes_and_ranges(path):
    content = as_json(path)
    tensors = read_tensors(path)
    assert content["serves"]
    assert problems_of(content, "error", "warning") == {}
    assert content["tensors"] == len(tensors)
    assert content["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert content["bytes"] == content["other_bytes"] + sum(r["bytes"] for r in content["layers"])

    for kind, words, weights, layers in (
        ("qkv", ("q_proj", "k_proj", "v_proj"), 3 * LAYERS, LAYERS),
        ("o_proj", ("o_proj",), LAYERS, LAYERS),
        (W13, ("gate_proj", "up_proj"), 2 * EXPERTS * LAYERS, LAYERS),
        (W2, ("down_proj",), EXPERTS * LAYERS, LAYERS),
    ):
        row = row_of(content, kind)
        mine = {name: t for name, t in tensors.items() if any(f".{w}." in name for w in words)}
        assert (row["weights"], row["layers"]) == (weights, layers)
        assert (row["format"], row["served"]) == ("NVFP4", "per-token")
        assert row["bytes"] == sum(tensor.nbytes for tensor in mine.values())
        for field, modelopts, inverse in (
            ("weight_scale_2", ".weight_scale_2", ".weight_global_scale"),
            ("input_scale", ".input_scale", ".input_global_scale"),
        ):
            values = [float(t) for name, t in mine.items() if name.endswith(modelopts)]
            values += [1 / float(t) for name, t in mine.items() if name.endswith(inverse)]
            found = row[field]["range"] if field == "input_scale" else row[field]
            if field == "input_scale":
                assert row[field]["present"] == len(values)
                assert row[field]["missing"] == weights - len(values)
            if values:
                expected = {"smallest": min(values), "largest": max(values)}
                assert found == pytest.approx(expected, rel=1e-6)
            else:
                assert found == {"smallest": None, "largest": None}
    assert row_of(content, "qkv")["shapes"] == [
        {"shape": [128, 256], "weights": 2 * LAYERS},
        {"shape": [256, 256], "weights": LAYERS},
    ]
    assert row_of(content, W2)["shapes"] == [{"shape": [256, 128], "weights": EXPERTS * LAYERS}]
    assert row_of(content, "lm_head")["served"] == "BF16, as stored"


def test_tables(tmp_path):
    path = edited(tmp_path, put(**{expert_tensor(0, 3, "up", "input_scale"): None}))
    result = run(path)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "Will serve with --quantization nvfp4_per_token." in lines
    assert "qkv NVFP4 128 x 256, 256 x 256 6 2 layers 147.5 kB per-token" in lines
    assert any(line.startswith("routed experts w13 3.18e-05 to") for line in lines)
    first_note = next(i for i, line in enumerate(lines) if line.startswith("Note: 1 of 56"))
    assert first_note < next(i for i, line in enumerate(lines) if line.startswith("layers"))


def test_schema_is_what_the_documentation_says():
    """Its keys are promised: adding one is fine, taking one away is not."""
    content = as_json(ALL_NVFP4)
    assert list(content) == [
        *("schema", "checkpoint", "serves", "quantization", "files", "tensors", "bytes"),
        *("other_bytes", "problems", "layers"),
    ]
    assert content["schema"] == 1
    assert content["quantization"] == {
        "source": "quantization_config in config.json",
        "producer": "modelopt 0.47.0",
        "method": "modelopt",
        "algorithm": "NVFP4",
        "kv_cache": None,
    }
    assert set(content["layers"][0]) == {
        *("kind", "format", "served", "weights", "layers", "shapes", "bytes", "weight_scale_2"),
        *("input_scale", "unequal_weight_scale_2", "unequal_input_scale"),
    }
    assert set(content["layers"][0]["input_scale"]) == {
        *("present", "missing", "unusable", "zero", "one", "untouched", "range"),
    }
    path = NO_CALIBRATION
    (problem,) = as_json(path)["problems"]
    assert list(problem) == [
        *("severity", "code", "message", "count", "tensor", "file", "found", "expected", "way_out"),
    ]


# Damage


def test_first_wrong_tensor(tmp_path):
    name = expert_tensor(0, 2, "up", "weight_scale")
    other = expert_tensor(1, 0, "down", "weight_scale_2")
    edit = put(**{name: torch.zeros(128, 8).to(torch.float8_e4m3fn), other: None})
    content = as_json(edited(tmp_path, edit), status=1)
    problem = problems_of(content)["wrong-tensor"]
    assert (problem["severity"], problem["count"]) == ("error", 2)
    assert (problem["tensor"], problem["file"]) == (name, "model.safetensors")
    assert problem["found"] == "F8_E4M3 [128, 8]"
    assert problem["expected"] == "F8_E4M3 [128, 16]"
    result = run(tmp_path / "case")
    assert result.exit_code == 1
    first = next(line for line in result.stdout.splitlines() if line.startswith("Error"))
    assert f"{name} in {tmp_path}/case/model.safetensors is F8_E4M3 [128, 8]" in first


E4M3 = {"nan": 0x7F, "minus nan": 0xFF, "negative": 0x81}


@pytest.mark.parametrize("damage", E4M3)
@pytest.mark.parametrize("module", [f"{ATTENTION}.o_proj", expert_tensor(0, 7, "gate", "")[:-1]])
def test_damaged_block_scales(tmp_path, damage, module):
    def edit(tensors):
        tensors[f"{module}.weight_scale"].view(torch.uint8)[-1, -1] = E4M3[damage]

    path = edited(tmp_path, edit)
    problem = problems_of(as_json(path, status=1), "error")["bad-block-scales"]
    assert (problem["tensor"], problem["count"]) == (f"{module}.weight_scale", 1)
    assert as_json(path, "--no-blocks")["serves"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("module", [f"{ATTENTION}.o_proj", expert_tensor(0, 7, "gate", "")[:-1]])
def test_damaged_second_scales(tmp_path, value, module):
    path = edited(tmp_path, put(**{f"{module}.weight_scale_2": torch.tensor(value)}))
    problem = problems_of(as_json(path, status=1), "error")["bad-weight-scale-2"]
    assert problem["tensor"] == f"{module}.weight_scale_2"


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_damaged_global_scales(tmp_path, value):
    """compressed-tensors' are inverses: zero has none."""
    name = expert_tensor(1, 2, "down", "weight_global_scale")
    path = edited(tmp_path, put(**{name: torch.tensor([value])}), source=COMPRESSED)
    problem = problems_of(as_json(path, status=1), "error")["bad-weight-scale-2"]
    assert problem["tensor"] == name


def test_a_matrix_of_zeros_with_nan_block_scales_is_fine(tmp_path):
    """As ModelOpt writes it; it is served as zeros."""

    def edit(tensors):
        stem = expert_tensor(0, 3, "down", "weight")
        tensors[f"{stem}_scale"].view(torch.uint8).fill_(0xFF)
        tensors[f"{stem}_scale_2"].zero_()

    content = as_json(edited(tmp_path, edit))
    assert content["serves"]
    assert problems_of(content)["zero-weights"]["count"] == 1


def test_zero_block_scales_are_pointed_at(tmp_path):
    name = f"{ATTENTION}.v_proj.weight_scale"

    def edit(tensors):
        tensors[name].view(torch.uint8)[3, 3] = 0x80

    content = as_json(edited(tmp_path, edit))
    assert problems_of(content, "warning")["zero-block-scales"]["tensor"] == name


# Activation scales, and scales that differ


@pytest.mark.parametrize(
    ("value", "field", "code"),
    [
        (math.nan, "unusable", "input-scale-unusable"),
        (math.inf, "unusable", "input-scale-unusable"),
        (-0.5, "unusable", "input-scale-unusable"),
        (0.0, "zero", "input-scale-zero"),
        (1.0, "one", "input-scale-one"),
        (None, "missing", "input-scale-missing"),
    ],
)
def test_suspicious_input_scales(tmp_path, value, field, code):
    name = expert_tensor(1, 4, "up", "input_scale")
    tensor = None if value is None else torch.tensor(value)
    content = as_json(edited(tmp_path, put(**{name: tensor})))
    assert content["serves"]  # per-token serving reads none of them
    scales = row_of(content, W13)["input_scale"]
    counts = {key: scales[key] for key in ("missing", "unusable", "zero", "one", "untouched")}
    assert counts == {**dict.fromkeys(counts, 0), field: 1}
    assert scales["present"] == 2 * EXPERTS * LAYERS - (value is None)
    assert problems_of(content)[code]["severity"] == "note"
    assert row_of(content, W2)["input_scale"]["missing"] == 0


@pytest.mark.parametrize("how", ["missing", "default", "copied"])
def test_experts_that_calibration_never_reached(tmp_path, how):
    cold = (1, 5)

    def edit(tensors):
        for projection in ("gate", "up", "down"):
            names = [expert_tensor(1, e, projection, "input_scale") for e in range(EXPERTS)]
            for expert, name in enumerate(names):  # the export has one scale for all
                tensors[name] *= 1 + expert
            largest = max(float(tensors[name]) for name in names)
            values = {"missing": None, "default": 0.5 / 2688, "copied": largest}
            for expert in cold:
                value = values[how]
                put(**{names[expert]: value and torch.tensor(value)})(tensors)

    content = as_json(edited(tmp_path, edit, source=EXPERTS_ONLY))
    expected = len(cold) + (how == "copied")  # and the one that is copied
    for kind in (W13, W2):
        assert row_of(content, kind)["input_scale"]["untouched"] == expected
    problem = problems_of(content)["input-scale-untouched"]
    assert problem["count"] == expected
    assert "model.layers.1.mlp.experts.1," in problem["message"]


def test_one_scale_for_all_experts_is_no_copy(tmp_path):
    """As exports of fused experts have it."""

    def edit(tensors):
        for name in tensors:
            if ".experts." in name and name.endswith("input_scale"):
                tensors[name] = torch.tensor(0.25)

    content = as_json(edited(tmp_path, edit, source=EXPERTS_ONLY))
    assert row_of(content, W2)["input_scale"]["untouched"] == 0


def test_parts_with_different_scales(tmp_path):
    def edit(tensors):
        tensors[expert_tensor(0, 1, "gate", "weight_scale_2")] *= 3
        tensors[expert_tensor(1, 6, "up", "weight_scale_2")] *= 10
        tensors[expert_tensor(1, 6, "down", "weight_scale_2")] *= 10  # a part of nothing
        tensors[f"{ATTENTION}.k_proj.weight_scale_2"] /= 2
        tensors[f"{ATTENTION}.v_proj.input_scale"] /= 2

    content = as_json(edited(tmp_path, edit))
    unequal = {
        row["kind"]: (row["unequal_weight_scale_2"], row["unequal_input_scale"])
        for row in content["layers"]
    }
    assert unequal == {"qkv": (1, 1), "o_proj": (0, 0), W13: (2, 0), W2: (0, 0)} | {
        "routers": (0, 0),
        "lm_head": (0, 0),
    }
    problem = problems_of(content)["unequal-weight-scale-2"]
    assert problem["count"] == 3
    assert "by up to 10 times (model.layers.1.mlp.experts.6)" in problem["message"]


# What becomes of layers


def quantization(**changes):
    return lambda content: content["quantization_config"].update(changes)


def test_drafts_are_shown_apart(tmp_path):
    def edit(tensors):
        tensors["mtp.fc.weight"] = torch.zeros(256, 512).bfloat16()
        tensors["model.layers.2.self_attn.q_proj.weight"] = torch.zeros(256, 256).bfloat16()
        tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.zeros(128, 256).bfloat16()

    row = row_of(as_json(edited(tmp_path, edit)), "drafts")
    assert (row["weights"], row["served"], row["format"]) == (3, "as a draft only", "BF16")


def test_tensors_win_over_configs(tmp_path):
    def edit(tensors):
        tensors["lm_head.weight"] = torch.zeros(512, 128, dtype=torch.uint8)
        tensors["lm_head.weight_scale"] = torch.ones(512, 16).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale_2"] = torch.tensor(0.1)
        for part in "qkv":
            for kind in ("weight_scale", "weight_scale_2", "input_scale"):
                del tensors[f"{ATTENTION}.{part}_proj.{kind}"]
            rows = {"q": 256}.get(part, 128)
            tensors[f"{ATTENTION}.{part}_proj.weight"] = torch.zeros(rows, 256).bfloat16()

    content = as_json(edited(tmp_path, edit))
    assert row_of(content, "lm_head")["served"] == "per-token"
    qkv = {row["served"]: row["layers"] for row in content["layers"] if row["kind"] == "qkv"}
    assert qkv == {"per-token": 1, "BF16, as stored": 1}
    problem = problems_of(content, "warning")["config-contradicts-tensors"]
    assert problem["count"] == 2
    assert "lm_head (NVFP4)" in problem["message"]
    assert f"{ATTENTION}.qkv_proj (BF16)" in problem["message"]


def test_mixed_checkpoint(tmp_path):
    """FP8 attention beside NVFP4 experts, as the map says; then a layer against the map."""
    linears = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(LAYERS) for p in "qkvo"]

    def edit(tensors):
        for module in linears:
            rows = tensors.pop(f"{module}.weight").shape[0]
            del tensors[f"{module}.weight_scale_2"]
            tensors[f"{module}.weight"] = torch.zeros(rows, 256).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = torch.tensor(1.0)

    layers = {module: {"quant_algo": "FP8"} for module in linears}
    layers |= {f"model.layers.{n}.mlp.experts": {"quant_algo": "NVFP4"} for n in range(LAYERS)}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    path = edited(tmp_path, edit, config=quantization(**mixed))
    (path / "hf_quant_config.json").unlink()
    content = as_json(path)
    assert content["serves"]
    assert row_of(content, "qkv")["served"] == "FP8, as stored"
    assert row_of(content, "qkv")["input_scale"]["present"] == 6
    assert row_of(content, W13)["served"] == "per-token"

    layers[f"{ATTENTION}.o_proj"] = {"quant_algo": "NVFP4"}
    shutil.rmtree(path)
    path = edited(tmp_path, edit, config=quantization(**mixed))
    content = as_json(path, status=1)
    message = problems_of(content, "error")["format"]["message"]
    assert message.startswith(f"{ATTENTION}.o_proj is stored in FP8, and the checkpoint's config")


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "quantization-config", "pre_quant_scale"),
        ({"quant_method": "fp8"}, "quantization-config", "has quant_method 'fp8'"),
        ({"config_groups": {"g": {"weights": {"group_size": 32}}}}, "quantization-config", "= 32"),
        ({"ignore": ["model.layers.*.mlp.experts*", "lm_head"]}, None, ""),
    ],
)
def test_configs(tmp_path, changes, code, words):
    content = as_json(edited(tmp_path, config=quantization(**changes)))
    errors = problems_of(content, "error")
    assert list(errors) == ([code] if code else [])
    if code:
        assert words in errors[code]["message"]
        assert {row["served"] for row in content["layers"]} == {"refused"}


def test_both_configs_disagree(tmp_path):
    def legacy(content):
        content["quantization"]["kv_cache_quant_algo"] = "FP8"

    content = as_json(edited(tmp_path, hf_quant_config=legacy))
    assert content["serves"]
    assert "config.json wins" in problems_of(content, "warning")["configs-disagree"]["message"]


def test_legacy_config_alone(tmp_path):
    path = edited(tmp_path, config=lambda content: content.pop("quantization_config"))
    content = as_json(path)
    assert content["serves"]
    assert content["quantization"]["source"] == "hf_quant_config.json"


def test_weights_only(tmp_path):
    section = {"quant_algo": "W4A16_NVFP4", "config_groups": {}}
    path = edited(tmp_path, source=NO_CALIBRATION, config=quantization(**section))
    content = as_json(path)
    assert "weights-only" in problems_of(content, "note")


# Other checkpoints, and what is none


def other(tmp_path, tensors, config, name="model.safetensors"):
    path = tmp_path / "other"
    path.mkdir()
    save_file(tensors, path / name)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_bf16_is_quantized_while_loading(tmp_path):
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.0.{projection}_proj.weight": torch.zeros(16, 16).bfloat16()
        for projection in ("gate", "up", "down")
    }
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(16, 16).bfloat16()
    path = other(tmp_path, tensors, {})
    content = as_json(path)
    assert content["serves"]
    assert problems_of(content, "note")["not-quantized"]["message"].endswith("does it once")
    assert row_of(content, W13)["format"] == "BF16"
    assert row_of(content, W2)["served"] == "quantized while loading, per-token"
    assert row_of(content, "o_proj")["served"] == "BF16, as stored"
    assert content["quantization"]["algorithm"] is None


def test_bf16_fused(tmp_path):
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.gate_up_proj": torch.zeros(4, 64, 32).bfloat16(),
        f"{experts}.down_proj": torch.zeros(4, 32, 32).bfloat16(),
    }
    content = as_json(other(tmp_path, tensors, {}))
    assert row_of(content, W13)["served"] == "quantized while loading, per-token"
    assert row_of(content, W13)["shapes"] == [{"shape": [4, 64, 32], "weights": 1}]


def test_bf16_that_cannot_be_quantized(tmp_path):
    """Without experts; and with quantized ones that no config tells of."""
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.zeros(16, 16).bfloat16()}
    content = as_json(other(tmp_path, tensors, {}), status=1)
    assert list(problems_of(content, "error")) == ["not-quantized"]

    path = edited(tmp_path, config=lambda content: content.pop("quantization_config"))
    (path / "hf_quant_config.json").unlink()
    content = as_json(path, status=1)
    assert "has no quantization config" in problems_of(content)["not-quantized"]["message"]
    assert {row["served"] for row in content["layers"]} == {"refused"}


def test_fp8(tmp_path):
    module = "model.layers.0.mlp.experts.0.up_proj"
    tensors = {
        f"{module}.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_inv": torch.ones(1, 1),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    content = as_json(other(tmp_path, tensors, config), status=1)
    assert list(problems_of(content)) == ["quantization-config"]
    assert row_of(content, W13)["format"] == "FP8"


def test_dense_model(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    content = as_json(edited(tmp_path, edit), status=1)
    assert list(problems_of(content, "error")) == ["no-nvfp4-experts"]


def sharded(tmp_path, shards=3):
    """A checkpoint in several files with an index."""
    path = tmp_path / "sharded"
    shutil.copytree(ALL_NVFP4, path)
    tensors = sorted(read_tensors(path).items())
    (path / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(tensors[shard::shards])
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_shards(tmp_path):
    content, whole = as_json(sharded(tmp_path)), as_json(ALL_NVFP4)
    assert content["files"] == 3
    for key in ("layers", "problems", "bytes", "other_bytes", "tensors"):
        assert content[key] == whole[key]


def missing_shard(tmp_path):
    path = sharded(tmp_path)
    (path / "model-00002-of-00003.safetensors").unlink()
    return path


def truncated(tmp_path):
    path = edited(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return path


def without_config(tmp_path):
    path = edited(tmp_path)
    (path / "config.json").unlink()
    return path


def without_tensors(tmp_path):
    path = edited(tmp_path)
    (path / "model.safetensors").unlink()
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing_shard, "model-00002-of-00003.safetensors is named by model.safetensors.index"),
        (truncated, "model.safetensors (1667911 bytes) cannot be read"),
        (without_config, "config.json does not exist"),
        (without_tensors, "holds no *.safetensors files"),
        (lambda tmp_path: edited(tmp_path) / "model.safetensors", "model.safetensors is a file"),
        (lambda _: "nvidia/Qwen3-30B-A3B-NVFP4", "Qwen3-30B-A3B-NVFP4 is not a directory"),
    ],
)
def test_unreadable(tmp_path, make, message):
    path = make(tmp_path)
    result = run(path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    content = as_json(path, status=2)
    assert content["serves"] is False
    assert message in content["error"]["message"]


def test_names_that_terminals_would_act_on(tmp_path):
    """Markup and escape sequences in names are shown, not obeyed."""
    name = "model.[bold]\x1b[31mred.mlp.experts.0.up_proj"
    tensors = {f"{name}.weight": torch.zeros(16, 8, dtype=torch.uint8)}
    path = other(tmp_path, tensors, {})
    result = run(path)
    assert result.exit_code == 1
    assert "model.[bold]\\x1b[31mred" in result.stdout
    assert "\x1b[31m" not in result.stdout


def test_progress_and_weights():
    seen = []
    report = inspect_checkpoint(ALL_NVFP4, progress=lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1]
    names = {header.name for weight in report.weights for header in weight.tensors.values()}
    assert {name for name in read_headers(ALL_NVFP4) if "_proj." in name} <= names
