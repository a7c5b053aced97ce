"""Headers, index and JSON files as they come: what is wrong is named, and nothing else happens."""

import json
import os

import pytest
import torch
from cases import ALL_NVFP4, EXPERTS_ONLY, expert_tensor, make_case
from safetensors.torch import save_file

from vllm_nvfp4_pertoken.checkpoints.headers import read_headers, read_json
from vllm_nvfp4_pertoken.checkpoints.verify import find_wrong_tensors, verify_checkpoint
from vllm_nvfp4_pertoken.errors import CheckpointError

Q = "model.layers.1.self_attn.q_proj"


def wrong(path):
    _, problems = find_wrong_tensors(read_headers(path), read_json(path / "config.json"))
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("tensor", "replacement", "expected"),
    [
        pytest.param("weight", None, "weight is missing, expected U8 [256, 128]", id="no weight"),
        pytest.param(
            "weight_scale", None, "weight_scale is missing, expected F8_E4M3 [256, 16]", id="blocks"
        ),
        pytest.param("weight_scale_2", None, "weight_scale_2 is missing, expected F32 []", id="s2"),
        pytest.param(
            "weight_scale",
            torch.zeros(256, 8).to(torch.float8_e4m3fn),
            "weight_scale in model.safetensors is F8_E4M3 [256, 8], expected F8_E4M3 [256, 16]",
            id="group of 32",
        ),
        pytest.param(
            "weight",
            torch.zeros(256, 256, dtype=torch.bfloat16),
            "weight in model.safetensors is BF16 [256, 256], expected U8 [256, 256]",
            id="not packed",
        ),
        pytest.param(
            "weight_scale_2",
            torch.ones(256),
            "weight_scale_2 in model.safetensors is F32 [256], expected F32 []",
            id="a scale per row",
        ),
        pytest.param(
            "pre_quant_scale", torch.ones(256), "pre_quant_scale in model.safet", id="AWQ"
        ),
    ],
)
def test_dense_layers_are_checked(tmp_path, tensor, replacement, expected):
    def edit(tensors):
        tensors.pop(f"{Q}.{tensor}", None)
        if replacement is not None:
            tensors[f"{Q}.{tensor}"] = replacement

    path = make_case(ALL_NVFP4, tmp_path / "case", edit=edit)
    problems = wrong(path)
    assert problems[0].startswith(f"{Q}.{expected}")
    with pytest.raises(CheckpointError, match="not a complete NVFP4 checkpoint"):
        verify_checkpoint(path)


def test_other_packed_formats_are_not_taken_for_nvfp4(tmp_path):
    """MXFP4 and GPTQ have packed codes too; only NVFP4 has a second scale."""

    def edit(tensors):
        tensors["model.other.weight"] = torch.zeros(4, 8, dtype=torch.uint8)
        tensors["model.mxfp4.weight"] = torch.zeros(4, 16, dtype=torch.uint8)
        tensors["model.mxfp4.weight_scale"] = torch.zeros(4, 1, dtype=torch.uint8)

    assert wrong(make_case(ALL_NVFP4, tmp_path / "case", edit=edit)) == []


def test_rows_that_are_no_whole_blocks(tmp_path):
    def edit(tensors):
        tensors[f"{Q}.weight"] = torch.zeros(256, 4, dtype=torch.uint8)
        tensors[f"{Q}.weight_scale"] = torch.zeros(256, 0).to(torch.float8_e4m3fn)

    (problem,) = wrong(make_case(ALL_NVFP4, tmp_path / "case", edit=edit))
    assert "is U8 [256, 4], expected rows of a multiple of 8 bytes" in problem


def fused(path, **changes):
    """Llama 4's layout: 4 experts, hidden size 64, expert size 32."""
    stem = "model.layers.0.feed_forward.experts."
    shapes = {"gate_up_proj": (4, 32, 64), "down_proj": (4, 16, 64)}
    tensors = {}
    for projection, (count, packed, outputs) in shapes.items():
        tensors[projection] = torch.zeros(count, packed, outputs, dtype=torch.uint8)
        blocks = torch.zeros(count, packed // 8, outputs).to(torch.float8_e4m3fn)
        tensors[f"{projection}_weight_scale"] = blocks
        tensors[f"{projection}_weight_scale_2"] = torch.tensor(0.5)
        tensors[f"{projection}_input_scale"] = torch.tensor(0.5)
    for name, tensor in changes.items():
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    path.mkdir()
    whole = {f"{stem}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"text_config": {"num_local_experts": 4}}))
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"down_proj": None}, ["down_proj is missing, expected U8 [4, 16, 64]"]),
        (
            {"gate_up_proj_weight_scale": None},
            ["gate_up_proj_weight_scale is missing, expected F8_E4M3 [4, 4, 64]"],
        ),
        (
            {"down_proj_weight_scale_2": torch.ones(4)},
            ["down_proj_weight_scale_2 in model.safetensors is F32 [4], expected F32 []"],
        ),
        (
            {"down_proj": torch.zeros(4, 64, 16, dtype=torch.uint8)},
            ["down_proj in model.safetensors is U8 [4, 64, 16], expected U8 [4, 16, 64]"],
        ),
        (
            {"gate_up_proj": torch.zeros(3, 32, 64, dtype=torch.uint8)},
            ["gate_up_proj in model.safetensors is U8 [3, 32, 64], expected U8 [4, 32, 64]"],
        ),
    ],
)
def test_fused_experts_are_checked(tmp_path, changes, expected):
    path = fused(tmp_path / "case", **changes)
    stem = "model.layers.0.feed_forward.experts."
    assert wrong(path) == [f"{stem}{problem}" for problem in expected]


def test_absent_experts_are_named_once_whatever_their_number(tmp_path):
    def edit(tensors):
        for name in list(tensors):
            if ".layers.0.mlp.experts.3." in name or ".layers.0.mlp.experts.4." in name:
                del tensors[name]

    path = make_case(
        EXPERTS_ONLY,
        tmp_path / "case",
        edit=edit,
        config=lambda content: content.update(num_experts=10**30),
    )
    first, second = wrong(path)
    assert first.startswith(f"{expert_tensor(0, 3, 'down', 'weight')} is missing, with all else of")
    assert f"the experts 3 to 4, 8 to {10**30 - 1}, expected U8 [256, 64]" in first
    assert "layers.1.mlp.experts.8.down_proj.weight is missing" in second


# Files


@pytest.mark.parametrize(
    "name",
    [
        5,
        None,
        ["model.safetensors"],
        "",
        "a",
        "../x/model.safetensors",
        "/etc/model.safetensors",
        "model.safetensors\0.safetensors",
        "a\\b.safetensors",
        "\ud800.safetensors",
    ],
)
def test_an_index_names_files_beside_it(tmp_path, name):
    path = make_case(EXPERTS_ONLY, tmp_path / "case")
    index = {"weight_map": {"lm_head.weight": name}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"says that 'lm_head.weight' is in .*beside"):
        read_headers(path)


def test_names_that_no_file_system_has(tmp_path):
    path = make_case(EXPERTS_ONLY, tmp_path / "case")
    index = {"weight_map": {"a": "x" * 5000 + ".safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="File name too long"):
        read_headers(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    path = make_case(EXPERTS_ONLY, tmp_path / "case")
    os.mkfifo(path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors is no regular file"):
        read_headers(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[]", "holds a list"),
        (b"null", "holds a NoneType"),
    ],
)
def test_json_that_is_none(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        read_json(tmp_path / "config.json")


def test_a_directory_for_a_json_file(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_json(tmp_path / "config.json")
