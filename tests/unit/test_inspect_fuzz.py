"""500 damaged checkpoints: each gives a right answer or an error in words.

Config, index and headers are changed at random, in their structure and in their bytes, with values
that readers trip over. Each is then inspected from the command line, and checked and planned for
conversion as the engine and `convert` do. Never a traceback, never much time or memory; and what is
said to serve has all its tensors, as the safetensors library reads them.
"""

import contextlib
import copy
import json
import random
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_nvfp4_pertoken.checkpoints.convert import Options, make_plan
from vllm_nvfp4_pertoken.checkpoints.verify import verify_checkpoint
from vllm_nvfp4_pertoken.cli import app
from vllm_nvfp4_pertoken.errors import PerTokenError

CASES = 500
SECONDS = 5.0  # for one case, on a busy machine; a hang takes longer
MEGABYTES = 300  # more than before the first, in all
EXPERTS = 2


def deep(depth, leaf=None):
    value = leaf
    for _ in range(depth):
        value = [value] if depth % 2 else {"quantized_layers": value}
    return value


NASTY = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, float("nan")),
    *(
        float("inf"),
        "",
        " ",
        "\0",
        "\ud800",
        "\x1b[2J",
        "[bold]",
        "a" * 10_000,
        "é",
        "*",
        "[",
        "[!",
    ),
    *("re:", "re:(", "re:.*", "re:[", "Linear", "NVFP4", "nvfp4", "FP8", "FP8_PB_WO", "bogus"),
    *("MIXED_PRECISION", "W4A16_NVFP4", "compressed-tensors", "modelopt", "fp8", "mxfp4", "NONE"),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": []}}, [1, "a", {}], {"quant_algo": 3}),
    *(deep(3), deep(40), "@deep@", {"quant_algo": "FP8", "group_size": "16"}),
    *([2**62] * 4, [-1], [0, 0], [8, -8], [0], [1.5], ["16"], [10**30]),
    *(
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "x.safetensors",
        "model.safetensors",
    ),
)
KEYS = (
    *(
        "quantization_config",
        "text_config",
        "compression_config",
        "num_experts",
        "n_routed_experts",
    ),
    *("num_hidden_layers", "model_type", "quant_method", "quant_algo", "group_size", "ignore"),
    *("exclude_modules", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo", "producer"),
    *("quantized_layers", "quantization", "format", "targets", "weights", "input_activations"),
    *("weight_map", "metadata", "weight_block_size", "transform_config", "", "\0", "\ud800"),
)
DTYPES = ("U8", "I8", "BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "BOOL", "F4", "C64", "X")
# Deeper than the library that writes JSON goes; to be put in afterwards.
DEEP = (b'"@deep@"', b"[" * 900 + b"]" * 900)


def matrix(tensors, module, rows, columns, compressed):
    """A random NVFP4 matrix; two names are compressed-tensors' own."""
    weight, second = ("weight_packed", "weight_global_scale") if compressed else ("weight",) * 2
    second = second if compressed else "weight_scale_2"
    tensors[f"{module}.{weight}"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    tensors[f"{module}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
    tensors[f"{module}.{second}"] = torch.tensor(0.5)


def nvfp4_tensors(compressed=False):
    tensors = {"model.embed_tokens.weight": torch.zeros(8, 32).bfloat16()}
    for expert in range(EXPERTS):
        stem = f"model.layers.0.mlp.experts.{expert}"
        for name in ("gate", "up", "down"):
            matrix(tensors, f"{stem}.{name}_proj", 32, 32, compressed)
            tensors[f"{stem}.{name}_proj.input_scale"] = torch.tensor(0.5)
    for name in "qkvo":
        matrix(tensors, f"model.layers.0.self_attn.{name}_proj", 32, 32, compressed)
    return tensors


def fused_tensors():
    tensors = {}
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        stem = f"model.layers.0.feed_forward.experts.{name}"
        tensors[stem] = torch.zeros(EXPERTS, 16, rows, dtype=torch.uint8)
        tensors[f"{stem}_weight_scale"] = torch.ones(EXPERTS, 2, rows).to(torch.float8_e4m3fn)
        tensors[f"{stem}_weight_scale_2"] = torch.tensor(0.5)
    return tensors


def bf16_tensors():
    tensors = {"lm_head.weight": torch.zeros(8, 32).bfloat16()}
    for expert in range(EXPERTS):
        for name in ("gate", "up", "down"):
            stem = f"model.layers.0.mlp.experts.{expert}.{name}_proj"
            tensors[f"{stem}.weight"] = torch.ones(32, 32).bfloat16()
    return tensors


NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "model.layers.0.mlp.gate*"],
    "config_groups": {"group_0": {"weights": NVFP4, "input_activations": NVFP4}},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn": {"quant_algo": "NVFP4", "group_size": 16},
    },
}
LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**NVFP4, "strategy": "tensor_group", "symmetric": True, "dynamic": False},
            "input_activations": {**NVFP4, "strategy": "tensor_group", "dynamic": "local"},
        }
    },
}
LEGACY = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIZES = {"num_experts": EXPERTS, "num_hidden_layers": 1, "model_type": "qwen3_moe"}


def base(section, **others):
    section = {} if section is None else {"quantization_config": section}
    return {"config.json": {**SIZES, **section}, **others}


# Tensors, and the JSON files beside them; with an index in two files.
BASES = {
    "modelopt": (nvfp4_tensors(), base(MODELOPT)),
    "both": (nvfp4_tensors(), base(MODELOPT, **{"hf_quant_config.json": LEGACY})),
    "legacy": (nvfp4_tensors(), base(None, **{"hf_quant_config.json": LEGACY})),
    "mixed": (nvfp4_tensors(), base(MIXED)),
    "compressed": (nvfp4_tensors(compressed=True), base(LLM_COMPRESSOR)),
    "fused": (fused_tensors(), base(MODELOPT)),
    "bf16": (bf16_tensors(), base(None)),
    "sharded": (nvfp4_tensors(), base(MODELOPT, **{"model.safetensors.index.json": {}})),
}


def write(path: Path, name: str) -> tuple[dict, dict[str, bytes]]:
    """A sound checkpoint; its JSON content, and the bytes of its files."""
    tensors, contents = copy.deepcopy(BASES[name])
    path.mkdir()
    if "model.safetensors.index.json" in contents:
        names = sorted(tensors)
        weight_map = {tensor: SHARDS[i % 2] for i, tensor in enumerate(names)}
        contents["model.safetensors.index.json"] = {"metadata": {}, "weight_map": weight_map}
        for i, file in enumerate(SHARDS):
            save_file({tensor: tensors[tensor] for tensor in names[i::2]}, path / file)
    else:
        save_file(tensors, path / "model.safetensors")
    for file, content in contents.items():
        (path / file).write_text(json.dumps(content))
    return contents, {file.name: file.read_bytes() for file in path.iterdir()}


# Changes


def places_in(value, path=()):
    """The path of every value inside of this one, itself among them."""
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(item, (*path, key))


def change_value(rng: random.Random, value, path=None):
    """A JSON value with something in it replaced, removed, added, renamed or exchanged."""
    if path is None:
        path = rng.choice(list(places_in(value)))
    if path and (len(path) > 1 or rng.random() < 0.7):
        copied = copy.copy(value)
        copied[path[0]] = change_value(rng, value[path[0]], path[1:])
        return copied
    if isinstance(value, dict) and rng.random() < 0.9:
        key = path[0] if path else rng.choice([*value, ""])
        match rng.randrange(4):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(KEYS): rng.choice(NASTY)}
            case 2:
                return {**value, rng.choice([*value, "", ""]): value.get(key)}
            case _:
                renamed = f"{key}{rng.choice(('x', chr(0), '.', '.weight', '.0'))}"
                return {(renamed if k == key else k): v for k, v in value.items()}
    if isinstance(value, list) and rng.random() < 0.7:
        return [*value, rng.choice(NASTY)]
    return rng.choice(NASTY)


def change_bytes(rng: random.Random, data: bytes, limit: int) -> bytes:
    """Some of the first bytes changed, cut off, or repeated."""
    limit = max(1, min(limit, len(data)))
    place = rng.randrange(limit)
    match rng.randrange(5):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + data[place + rng.randrange(1, 9) :]
        case 2:
            return data[:place] + bytes(rng.choices(range(256), k=4)) + data[place:]
        case 3:
            return data[:place] + data[max(0, place - 20) :]
        case _:
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(limit)] = rng.choice(b'\0\x7f\x80\xff"{}[],:0129-\\')
            return bytes(changed)


ENTRY_CHANGES = ("dtype", "shape", "data_offsets")


def change_header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with a changed header: its length, its text, an entry or a name."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = rng.choice([key for key in header if key != "__metadata__"])
    match rng.randrange(9):
        case 0:
            wrong = rng.choice((0, 1, length - 1, length + 1, 2**20, 2**31, 2**63, 2**64 - 1))
            return wrong.to_bytes(8, "little") + data[8:]
        case 1:
            return data[:8] + change_bytes(rng, data[8:], length)
        case 2:
            return data[: rng.randrange(len(data))] if rng.random() < 0.8 else data + b"\0"
        case 3:
            header[name]["dtype"] = rng.choice(DTYPES)
        case 4:
            header[name]["shape"] = rng.choice(
                ([], [0], [2**62, 2**62], [2**40, 0], [1, *header[name]["shape"]], [32, 32, 32])
            )
        case 5:
            begin, end = header[name]["data_offsets"]
            header[name]["data_offsets"] = rng.choice(
                ([0, end], [-1, end], [end, begin], [begin, end + 1], [begin, 2**64], [begin])
            )
        case 6:
            expert = rng.choice(("9", "99999", "9" * 20, "9" * 5000, "-1", "٣"))
            renamed = name.replace("experts.0", f"experts.{expert}")
            if renamed == name:
                renamed = rng.choice(("", "\0", "x" * 5000, "a\nb\x1b[2J", f"{name}.", ".weight"))
            header[renamed] = header.pop(name)
        case 7:
            header[name] = change_value(rng, header[name])
        case _:
            header = change_value(rng, header)
    try:
        text = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode()
    except UnicodeEncodeError:
        text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def damage(rng: random.Random, path: Path) -> str:
    """Write a checkpoint, change one of its files, and say which."""
    kind = rng.choice(list(BASES))
    contents, files = write(path, kind)
    file = rng.choice([*files, *contents])  # JSON files twice as often
    if file.endswith(".safetensors"):
        data = change_header(rng, files[file])
    elif rng.random() < 0.2:
        data = change_bytes(rng, files[file], len(files[file]))
    else:
        content = contents[file]
        for _ in range(rng.randrange(1, 4)):
            content = change_value(rng, content)
        data = json.dumps(content).encode().replace(*DEEP)
    (path / file).write_bytes(data)
    return f"{kind}, {file}"


# What must hold

FLOATS = ("BF16", "F16", "F32")  # as good as each other for a weight that is yet to be quantized


def headers_of(path: Path) -> dict[str, tuple[str, list[int]]]:
    """As the library reads them, in all files."""
    headers = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                piece = opened.get_slice(name)
                headers[name] = (piece.get_dtype(), list(piece.get_shape()))
    return headers


def needed(headers):
    """Tensors without which an NVFP4 matrix is none."""
    ends = ("weight", "weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale")
    return {
        name: ("a float" if dtype in FLOATS else dtype, shape if shape != [1] else [])
        for name, (dtype, shape) in headers.items()
        if "_proj" in name and name.endswith((*ends, "_proj"))
    }


def check(path: Path, sound: dict[str, tuple[str, list[int]]]) -> str:
    """Inspect as a user would, and hold the answer against the files."""
    results = [CliRunner().invoke(app, ["inspect", str(path), *more]) for more in ([], ["--json"])]
    for result in results:
        assert result.exception is None or isinstance(result.exception, SystemExit), "traceback"
        assert result.exit_code in (0, 1, 2)
        assert "\x1b" not in result.output
        assert "Traceback" not in result.output
    text, as_json = results
    assert text.exit_code == as_json.exit_code
    content = json.loads(as_json.stdout)
    assert content["serves"] == (text.exit_code == 0)
    if text.exit_code == 2:
        assert text.stderr.startswith("Error: ")
        assert content["error"]["message"]
        return "unreadable"
    headers = headers_of(path)
    assert content["tensors"] == len(headers)
    assert all(kind["weights"] > 0 for kind in content["layers"])
    if not content["serves"]:
        assert any(problem["severity"] == "error" for problem in content["problems"])
        return "refused"
    assert needed(headers).items() >= needed(sound).items()
    return "serves"


def check_others(path: Path) -> None:
    """What the engine and `convert` do with files before they read any weight."""
    for work in (verify_checkpoint, lambda path: make_plan(path, Options(all_linears=True))):
        with contextlib.suppress(PerTokenError):
            work(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    headers = {}
    for name in BASES:
        path = tmp_path_factory.mktemp("sound") / name
        write(path, name)
        headers[name] = headers_of(path)
        assert check(path, headers[name]) == "serves", name
    return headers


def test_damaged_checkpoints(tmp_path, sound):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {"serves": 0, "refused": 0, "unreadable": 0}
    for seed in range(CASES):
        rng = random.Random(seed)
        path = tmp_path / str(seed)
        what = damage(rng, path)
        started = time.monotonic()
        try:
            outcomes[check(path, sound[what.partition(",")[0]])] += 1
            check_others(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what}, in {path}") from error
        assert time.monotonic() - started < SECONDS, f"seed {seed}: {what}, in {path}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES
    # The changes are of all sorts: many are harmless, many are not.
    assert min(outcomes.values()) > CASES / 20, outcomes


def section(**changes):
    return lambda config: config["quantization_config"].update(changes)


def group(**changes):
    return lambda config: config["quantization_config"]["config_groups"]["group_0"].update(changes)


@pytest.mark.parametrize(
    ("kind", "change", "outcome"),
    [
        ("compressed", section(ignore=["re:("]), "refused"),
        ("compressed", section(ignore=["re:", "", "*"]), "serves"),
        ("compressed", section(ignore=[["lm_head"]]), "refused"),
        ("compressed", section(kv_cache_scheme=[1]), "refused"),
        ("compressed", section(kv_cache_scheme={}), "refused"),
        ("compressed", section(quant_method=["compressed-tensors"]), "refused"),
        ("compressed", section(config_groups={"FP8": ["Linear"]}), "refused"),
        ("compressed", group(targets=["re:[a"]), "refused"),
        ("compressed", group(targets="Linear"), "refused"),
        ("compressed", group(weights=None), "refused"),
        ("modelopt", section(ignore=["[!", "***", "\0", "\ud800"]), "serves"),
        ("modelopt", section(ignore="lm_head"), "refused"),
        ("modelopt", section(quant_algo={"NVFP4": 1}), "refused"),
        ("modelopt", section(kv_cache_scheme={"type": "float", "num_bits": []}), "refused"),
        ("modelopt", section(producer=[]), "serves"),
        ("modelopt", lambda config: config.update(num_hidden_layers=-1), "refused"),
        ("modelopt", lambda config: config.update(num_experts=10**30), "refused"),
        ("modelopt", lambda config: config.update(quantization_config=[1]), "refused"),
        ("mixed", section(quantized_layers=[["a"]]), "refused"),
        ("mixed", section(quantized_layers=deep(40)), "refused"),
        ("bf16", lambda config: config.update(text_config=[1]), "serves"),
        ("bf16", lambda config: config.update(model_type=["llama4"]), "serves"),
    ],
)
def test_known_dangers_in_configs(tmp_path, sound, kind, change, outcome):
    path = tmp_path / "case"
    contents, _ = write(path, kind)
    change(contents["config.json"])
    (path / "config.json").write_text(json.dumps(contents["config.json"]))
    assert check(path, sound[kind]) == outcome
    check_others(path)
