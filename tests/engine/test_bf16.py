"""BF16 and FP16 checkpoints: quantized while loading, with the bits of the converted checkpoint."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    EXPERTS,
    EXPERTS_ONLY,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    Tensors,
    assert_bitwise,
    bits,
    expert_tensor,
    make_case,
)
from harness import answers, engine, loaded_model, moe_layers, snapshot

from vllm_nvfp4_pertoken.checkpoints.convert import Options, convert_checkpoint
from vllm_nvfp4_pertoken.errors import CheckpointError, PerTokenError, UnsupportedError


def random_experts(tensors: Tensors) -> None:
    """An edit: experts in BF16, of magnitudes that make every weight_scale_2 another one."""
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection in ("gate", "up", "down"):
                shape = (HIDDEN, INTERMEDIATE) if projection == "down" else (INTERMEDIATE, HIDDEN)
                scale = 2.0 ** float(torch.randint(-6, 2, (), generator=generator))
                weight = torch.randn(*shape, generator=generator) * scale
                tensors[expert_tensor(layer, expert, projection, "weight")] = weight.bfloat16()


def make_bf16(path: Path, *edits: Any) -> Path:
    """The model of `EXPERTS_ONLY`, unquantized."""

    def edit(tensors: Tensors) -> None:
        for each in (random_experts, *edits):
            each(tensors)

    case = make_case(
        EXPERTS_ONLY, path, edit=edit, config=lambda content: content.pop("quantization_config")
    )
    (case / "hf_quant_config.json").unlink()
    return case


def options(**section: Any) -> dict[str, Any]:
    return {"additional_config": {"nvfp4_per_token": section}}


def load(path: Path, **arguments: Any) -> Tensors:
    with loaded_model(path, **arguments) as (config, model):
        return snapshot(config, model)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> Path:
    return make_bf16(tmp_path_factory.mktemp("bf16") / "case")


def to_fp16(tensors: Tensors) -> None:
    tensors.update({name: tensor.half() for name, tensor in tensors.items()})


def zero_experts(tensors: Tensors) -> None:
    """One expert is all zero, of another only the gate."""
    for projection in ("gate", "up", "down"):
        tensors[expert_tensor(0, 2, projection, "weight")].zero_()
    tensors[expert_tensor(0, 3, "gate", "weight")].zero_()


@pytest.mark.parametrize(
    ("edits", "section", "convert"),
    [
        pytest.param((), {}, Options(), id="experts"),
        pytest.param((), {"bf16": "all"}, Options(all_linears=True), id="all"),
        pytest.param((to_fp16,), {"bf16": "all"}, Options(all_linears=True), id="fp16"),
        pytest.param((zero_experts,), {}, Options(), id="zeros"),
        pytest.param(
            (),
            {"bf16": "all", "exclude": ["model.layers.0.mlp.experts", "*.o_proj"]},
            Options(all_linears=True, exclude=("model.layers.0.mlp.experts", "*.o_proj")),
            id="exclude",
        ),
    ],
)
def test_bits_of_the_converted_checkpoint(edits, section, convert, tmp_path):
    source = make_bf16(tmp_path / "source", *edits)
    converted = convert_checkpoint(source, tmp_path / "converted", convert)
    expected = load(converted)
    packed = [name for name, tensor in expected.items() if tensor.dtype == torch.uint8]
    layers = LAYERS - sum("experts" in name for name in convert.exclude)
    dense = 2 * LAYERS if convert.all_linears and not convert.exclude else 0
    if convert.exclude:
        dense = LAYERS  # qkv
    assert len(packed) == 2 * layers + dense, packed
    assert_bitwise(load(source, **options(**section)), expected)


def test_start_up_line_says_it(bf16, said):
    load(bf16)
    (line,) = (line for line in said if "MoE layers" in line)
    assert "2 MoE layers with per-token activation scales on the cpu experts" in line
    assert "weights quantized while loading; 0 dense NVFP4 layers" in line


def test_one_expert_at_a_time_waits(bf16, monkeypatch):
    """Beside the packed weights no more is held than one expert's gate and up."""
    from vllm_nvfp4_pertoken.engine import loading

    held, loaders = [], []
    init, quantize = loading.ExpertLoading.__init__, loading.quantize_together

    def watch(weights, name):
        waiting = [group for loader in loaders for group in loader._waiting.values()]
        for group in (weights, *waiting):
            held.append(sum(weight.nbytes for weight in group.values()))
        return quantize(weights, name)

    def note(self, *args):
        init(self, *args)
        loaders.append(self)

    monkeypatch.setattr(loading.ExpertLoading, "__init__", note)
    monkeypatch.setattr(loading, "quantize_together", watch)
    load(bf16)
    assert len(loaders) == LAYERS
    gate_and_up = 2 * 2 * HIDDEN * INTERMEDIATE
    # Nothing waits when one is complete: the files have one expert after the other.
    assert set(held) == {gate_and_up // 2, gate_and_up}
    assert len(held) == 2 * EXPERTS * LAYERS


@pytest.mark.parametrize(
    ("edit", "section", "text"),
    [
        pytest.param(
            lambda ts: ts.pop(expert_tensor(1, 6, "up", "weight")),
            {},
            r"layers\.1\.mlp\.experts\.6\.up_proj\.weight is missing",
            id="expert's projection",
        ),
        pytest.param(
            lambda ts: [ts.pop(expert_tensor(1, 6, p, "weight")) for p in ("gate", "up", "down")],
            {},
            r"3 expert tensors were not .*experts\.6\.gate_proj\.weight, .*6\.up_proj\.weight, ",
            id="expert",
        ),
        pytest.param(
            lambda ts: ts.pop("model.layers.1.self_attn.k_proj.weight"),
            {"bf16": "all"},
            r"layers\.1\.self_attn\.k_proj\.weight did not come, though .*q_proj\.weight, .*v_proj",
            id="dense",
        ),
        pytest.param(
            lambda ts: ts[expert_tensor(1, 6, "up", "weight")].view(-1)[5].fill_(float("nan")),
            {},
            r"experts\.6\.up_proj\.weight has nan at row 0, column 5",
            id="nan",
        ),
        pytest.param(
            lambda ts: ts.update(
                {name: ts[name][:100] for name in [expert_tensor(1, 6, "gate", "weight")]}
            ),
            {},
            r"experts\.6\.gate_proj\.weight is torch\.bfloat16 \[100, 256\]\. Expected: "
            r"\[128, 256\], to be quantized",
            id="shape",
        ),
        pytest.param(
            lambda ts: ts.update(
                {n: t.to(torch.float8_e4m3fn) for n, t in ts.items() if ".experts." in n}
            ),
            {},
            r"gate_proj\.weight|down_proj\.weight in .* is F8_E4M3, and .* has no quantization",
            id="fp8 without a config",
        ),
    ],
)
def test_bad_tensors_are_named(edit, section, text, tmp_path):
    with pytest.raises(PerTokenError, match=text):
        load(make_bf16(tmp_path / "case", edit), **options(**section))


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"exclude": ["model.layers.7"]}, r"'model\.layers\.7' matches no module that would be"),
        ({"exclude": ["*.gate_proj"]}, r"gate_proj, but not .*(up|down)_proj"),
        ({"exclude": ["*.experts.*"]}, r"leave nothing to quantize"),
        ({"linear": "static"}, r"'linear' is 'static', and the checkpoint is unquantized"),
    ],
)
def test_options_that_cannot_be_met_are_refused(section, text, bf16):
    with pytest.raises(UnsupportedError, match=text):
        load(bf16, **options(**section))


@pytest.mark.parametrize("section", [{"bf16": "all"}, {"exclude": ["*.o_proj"]}])
def test_options_of_unquantized_checkpoints_are_refused_for_others(section):
    with pytest.raises(UnsupportedError, match=r"'bf16' and 'exclude' .* quantized already"):
        load(EXPERTS_ONLY, **options(**section))


def test_options_of_vllm_for_online_quantization_are_refused(bf16):
    text = r"--quantization-config has .*Instead|--quantization-config has .*options bf16 and"
    with pytest.raises(UnsupportedError, match=text):
        load(bf16, quantization_config={"ignore": ["lm_head"]})


def test_model_without_experts_is_refused(tmp_path):
    def without(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    with pytest.raises(UnsupportedError, match="has no tensors of single experts"):
        load(make_bf16(tmp_path / "case", without))


def test_reload_from_another_path_is_a_fresh_load(bf16, tmp_path):
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    def other(tensors: Tensors) -> None:
        tensors.update({n: t.roll(1, 0) * 1.25 for n, t in tensors.items() if ".layers." in n})

    b = make_bf16(tmp_path / "b", other)
    expected = load(b, **options(bf16="all"))
    with loaded_model(bf16, **options(bf16="all")) as (config, model):
        before = snapshot(config, model)
        assert sum(not torch.equal(before[name], expected[name]) for name in before) > 20
        reload_weights(config, model, None, str(b), True)
        assert_bitwise(snapshot(config, model), expected)
        bad = make_bf16(tmp_path / "bad", lambda ts: ts.pop(expert_tensor(1, 6, "up", "weight")))
        with pytest.raises(CheckpointError, match=r"6\.up_proj\.weight is missing.*keeps its old"):
            reload_weights(config, model, None, str(bad), True)
        assert_bitwise(snapshot(config, model), expected)


def _layer_bits(worker: Any) -> list[dict[str, bytes]]:
    return [
        {name: bits(parameter).numpy().tobytes() for name, parameter in layer.named_parameters()}
        for layer in moe_layers(worker.model_runner.model)
    ]


@pytest.mark.timeout(600)
def test_two_ranks(bf16, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    converted = convert_checkpoint(bf16, tmp_path / "converted", Options(all_linears=True))
    seen = []
    for path, section in ((bf16, {"bf16": "all"}), (converted, {})):
        log = tmp_path / "log"
        with engine(path, log, tensor_parallel_size=2, **options(**section)) as llm:
            seen.append((answers(llm), llm.collective_rpc(_layer_bits)))
    assert seen[0] == seen[1]
    assert re.search(r"quantized while loading; 4 dense NVFP4 layers", log.read_text())
