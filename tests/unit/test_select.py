"""The choice of experts is a table."""

from typing import Any

import pytest

from vllm_nvfp4_pertoken.errors import UnsupportedError
from vllm_nvfp4_pertoken.experts.select import (
    ACCEPTED_BACKENDS,
    FOUR_OVER_SIX,
    MINIMUM_FLASHINFER,
    Facts,
    Layer,
    choose,
)

NOT_COMPILED = "the kernel was not compiled when the package was installed"
QWEN3 = Layer()  # 128 experts, top 8, hidden 2048, intermediate 768, silu, softmax
DEEPSEEK = Layer(7168, 2048, num_experts=256, routing="DeepSeekV3", router_dtype="float32")
MIXTRAL = Layer(4096, 14336, top_k=2, num_experts=8, routing="Renormalize")
NEMOTRON = Layer(2688, 1856, "relu2_no_mul", top_k=6, routing="DeepSeekV3")
LLAMA4 = Layer(5120, 8192, top_k=1, num_experts=16, routing="Llama4", router_weight_on_input=True)
CLAMPED = Layer(6144, 1536, limit=7.0)
GPT_OSS = Layer(
    2880, 2880, "swigluoai", has_bias=True, top_k=4, num_experts=32, routing="Renormalize"
)
GPT_OSS_NO_BIAS = Layer(2880, 2880, "swigluoai", top_k=4, num_experts=32, routing="Renormalize")


def machine(name: str, moe_backend: str = "auto", **changes: Any) -> Facts:
    """A machine by its short name, with the FlashInfer that vLLM 0.33 pins on NVIDIA GPUs."""
    if not name.startswith("sm"):
        return Facts(moe_backend, name, **changes)
    number = int(name[2:])
    capability = (number // 10, number % 10)
    return Facts(moe_backend, "cuda", capability, **{"flashinfer": "0.7.2.post1", **changes})


# machine, --moe-backend, layer, what is chosen, does the kernel route, words of the warning
TABLE: list[tuple[str, str, Layer, str, bool, str | None]] = [
    ("sm80", "auto", QWEN3, "triton", False, None),
    ("sm86", "auto", QWEN3, "triton", False, None),
    ("sm89", "auto", MIXTRAL, "triton", False, None),
    ("sm90", "auto", QWEN3, "triton", False, None),
    ("sm90", "auto", DEEPSEEK, "triton", False, None),
    ("sm90", "auto", GPT_OSS, "triton", False, None),
    ("sm90", "triton", QWEN3, "triton", False, None),
    ("sm90", "emulation", QWEN3, "reference", False, None),
    ("sm75", "auto", QWEN3, "reference", False, "slow"),
    ("sm75", "emulation", QWEN3, "reference", False, None),
    ("sm100", "auto", QWEN3, "flashinfer_trtllm", True, None),
    ("sm100", "auto", DEEPSEEK, "flashinfer_trtllm", True, None),
    ("sm100", "auto", MIXTRAL, "flashinfer_trtllm", True, None),
    ("sm100", "auto", NEMOTRON, "flashinfer_trtllm", True, None),
    ("sm100", "auto", LLAMA4, "flashinfer_trtllm", False, None),
    ("sm100", "auto", CLAMPED, "flashinfer_cutedsl", False, None),
    ("sm100", "auto", GPT_OSS, "triton", False, "quarter of the FP4 rate"),
    ("sm100", "auto", GPT_OSS_NO_BIAS, "flashinfer_cutedsl", False, None),
    ("sm100", "auto", Layer(dtype="float16"), "triton", False, "bfloat16"),
    ("sm100", "auto", Layer(activation="gelu_tanh"), "flashinfer_trtllm", True, None),
    ("sm100", "auto", Layer(activation="gelu"), "triton", False, "activation is gelu"),
    ("sm100", "auto", Layer(top_k=40, num_experts=64), "flashinfer_cutedsl", False, None),
    ("sm100", "auto", Layer(routing="Custom"), "flashinfer_trtllm", False, None),
    ("sm100", "auto", Layer(routing="Default"), "flashinfer_trtllm", False, None),
    ("sm100", "auto", Layer(router_dtype="float16"), "flashinfer_trtllm", False, None),
    ("sm100", "auto", Layer(has_hash_routing=True), "flashinfer_trtllm", False, None),
    ("sm100", "auto", Layer(ep_size=4), "flashinfer_trtllm", True, None),
    ("sm100", "auto", Layer(ep_size=4, eplb=True), "flashinfer_trtllm", False, None),
    ("sm100", "auto", Layer(ep_size=4, all2all="deepep_v2"), "flashinfer_trtllm", False, None),
    ("sm100", "auto", Layer(alpha=1.0, beta=0.0), "flashinfer_trtllm", True, None),
    ("sm100", "auto", Layer(intermediate=96), "flashinfer_trtllm", True, None),
    ("sm100", "auto", Layer(alpha=1.5), "triton", False, "alpha 1.5"),
    ("sm100", "flashinfer_trtllm", QWEN3, "flashinfer_trtllm", True, None),
    ("sm100", "flashinfer_cutedsl", QWEN3, "flashinfer_cutedsl", False, None),
    ("sm100", "flashinfer_cutedsl", DEEPSEEK, "flashinfer_cutedsl", False, None),
    ("sm100", "flashinfer_cutedsl", NEMOTRON, "flashinfer_cutedsl", False, None),
    ("sm100", "triton", QWEN3, "triton", False, None),
    ("sm100", "emulation", QWEN3, "reference", False, None),
    ("sm103", "auto", QWEN3, "flashinfer_trtllm", True, None),
    ("sm103", "auto", CLAMPED, "flashinfer_cutedsl", False, None),
    ("sm103", "auto", LLAMA4, "flashinfer_trtllm", False, None),
    ("sm103", "flashinfer_cutedsl", MIXTRAL, "flashinfer_cutedsl", False, None),
    ("sm110", "auto", QWEN3, "triton", False, None),
    ("sm120", "auto", QWEN3, "triton", False, None),
    ("sm120", "auto", CLAMPED, "triton", False, None),
    ("sm121", "auto", QWEN3, "triton", False, None),
    ("cpu", "auto", QWEN3, "cpu", False, None),
    ("cpu", "auto", GPT_OSS, "cpu", False, None),
    ("cpu", "emulation", QWEN3, "reference", False, None),
    ("rocm", "auto", QWEN3, "reference", False, "slow"),
    ("rocm", "emulation", QWEN3, "reference", False, None),
    ("xpu", "auto", QWEN3, "reference", False, "slow"),
]


@pytest.mark.parametrize(("name", "moe_backend", "layer", "chosen", "routes", "warning"), TABLE)
def test_table(
    name: str, moe_backend: str, layer: Layer, chosen: str, routes: bool, warning: str | None
) -> None:
    choice = choose(machine(name, moe_backend), layer)
    assert choice.name == chosen
    assert choice.routes == routes
    assert choice.reason
    assert chosen not in choice.rejected
    if warning is None:
        assert choice.warning is None
    else:
        assert choice.warning is not None
        assert warning in choice.warning


@pytest.mark.parametrize(
    ("name", "moe_backend", "layer", "reasons"),
    [
        ("sm90", "flashinfer_trtllm", QWEN3, ["10.0 or 10.3", "has 9.0"]),
        ("sm90", "flashinfer_cutedsl", QWEN3, ["10.0 or 10.3", "has 9.0"]),
        ("sm110", "flashinfer_trtllm", QWEN3, ["has 11.0"]),
        ("sm120", "flashinfer_trtllm", QWEN3, ["has 12.0"]),
        ("sm121", "flashinfer_cutedsl", GPT_OSS, ["has 12.1", "biases"]),
        ("sm100", "flashinfer_trtllm", CLAMPED, ["limit 7.0", "before or after the row scale"]),
        ("sm100", "flashinfer_trtllm", GPT_OSS, ["swigluoai", "row scale", "biases"]),
        ("sm103", "flashinfer_trtllm", Layer(top_k=40), ["at most 32"]),
        ("sm103", "flashinfer_cutedsl", Layer(activation="gelu_tanh"), ["activation", "relu2"]),
        ("sm100", "flashinfer_cutedsl", Layer(beta=1.0), ["only a limit", "beta 1.0"]),
        ("cpu", "flashinfer_trtllm", CLAMPED, ["platform is cpu", "not installed", "limit"]),
        ("rocm", "flashinfer_cutedsl", QWEN3, ["platform is rocm", "pip install"]),
        ("cpu", "triton", QWEN3, ["platform is cpu"]),
        ("rocm", "triton", QWEN3, ["platform is rocm"]),
        ("sm75", "triton", QWEN3, ["8.0 or newer", "has 7.5"]),
    ],
)
def test_what_was_asked_for_or_every_reason(
    name: str, moe_backend: str, layer: Layer, reasons: list[str]
) -> None:
    with pytest.raises(UnsupportedError, match=f"--moe-backend {moe_backend} cannot run") as error:
        choose(machine(name, moe_backend), layer)
    for reason in reasons:
        assert reason in str(error.value)


def test_every_fault_of_a_flashinfer_backend_is_named_at_once() -> None:
    facts = Facts("flashinfer_trtllm", "rocm", vllm="0.31.2", flashinfer="0.6.17")
    layer = Layer(dtype="float16", has_bias=True, limit=7.0, top_k=40)
    with pytest.raises(UnsupportedError) as error:
        choose(facts, layer)
    for reason in ("rocm", "0.31.2", "0.6.17", "float16", "biases", "limit 7.0", "at most 32"):
        assert reason in str(error.value)


@pytest.mark.parametrize("moe_backend", ["auto", "flashinfer_trtllm", "flashinfer_cutedsl"])
@pytest.mark.parametrize("name", ["sm100", "sm103"])
@pytest.mark.parametrize(
    ("version", "found"),
    [
        (None, "not installed"),
        ("0.6.18", "older than"),
        ("0.7.0", "older than"),
        ("main", "cannot be read"),
    ],
)
def test_a_missing_flashinfer_is_an_error_where_it_is_needed(
    moe_backend: str, name: str, version: str | None, found: str
) -> None:
    with pytest.raises(UnsupportedError) as error:
        choose(machine(name, moe_backend, flashinfer=version), QWEN3)
    assert found in str(error.value)
    assert f"pip install 'flashinfer-python>={MINIMUM_FLASHINFER}'" in str(error.value)


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm120"])
def test_elsewhere_flashinfer_is_not_asked_for(name: str) -> None:
    choice = choose(machine(name, flashinfer=None), QWEN3)
    assert (choice.name, choice.warning) == ("triton", None)


@pytest.mark.parametrize("version", ["0.7.0.post1", "0.7.2.post1", "0.7.4"])
def test_tested_versions_of_flashinfer_need_no_warning(version: str) -> None:
    assert choose(machine("sm100", flashinfer=version), QWEN3).warning is None


@pytest.mark.parametrize("version", ["0.7.1", "0.7.5", "1.0"])
def test_other_versions_of_flashinfer_get_one(version: str) -> None:
    choice = choose(machine("sm100", flashinfer=version), QWEN3)
    assert choice.name == "flashinfer_trtllm"
    assert choice.warning is not None
    assert version in choice.warning


def test_what_a_machine_lacks_is_a_reason() -> None:
    unavailable = {"flashinfer_trtllm": "no cubins"}
    choice = choose(machine("sm100", unavailable=unavailable), QWEN3)
    assert (choice.name, choice.rejected) == ("flashinfer_cutedsl", unavailable)
    unavailable = {"triton": "triton cannot be imported"}
    choice = choose(machine("sm90", unavailable=unavailable), QWEN3)
    assert choice.name == "reference"
    assert choice.warning is not None
    assert "triton was not possible: triton cannot be imported" in choice.warning
    assert "flashinfer" not in choice.warning  # not made for this GPU, so nobody misses it
    assert "10.0 or 10.3" in choice.rejected["flashinfer_trtllm"]
    choice = choose(machine("cpu", unavailable={"cpu": NOT_COMPILED}), QWEN3)
    assert choice.name == "reference"
    assert choice.warning is not None
    assert f"cpu was not possible: {NOT_COMPILED}" in choice.warning


def test_the_interpreter_of_triton_is_for_those_who_ask() -> None:
    interpreted = {"triton_interpreted": True, "unavailable": {"cpu": NOT_COMPILED}}
    assert choose(machine("cpu", "triton", **interpreted), QWEN3).name == "triton"
    assert choose(machine("cpu", "auto", **interpreted), QWEN3).name == "reference"


@pytest.mark.parametrize("moe_backend", ["marlin", "cutlass", "flashinfer_cutlass", ""])
@pytest.mark.parametrize("name", ["cpu", "sm90", "sm100"])
def test_other_backends_are_refused(moe_backend: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"--moe-backend {moe_backend} cannot.*auto.*emul"):
        choose(machine(name, moe_backend), QWEN3)


@pytest.mark.parametrize("moe_backend", ["auto", "emulation", "flashinfer_trtllm"])
def test_deployments_that_would_mix_scales_are_refused(moe_backend: str) -> None:
    with pytest.raises(UnsupportedError, match=r"batched activation format.*all2all-backend"):
        choose(machine("sm100", moe_backend), Layer(batched=True))
    with pytest.raises(UnsupportedError, match=r"one_sided sizes its buffers.*all2all-backend"):
        choose(machine("sm100", moe_backend), Layer(all2all="flashinfer_nvlink_one_sided"))


@pytest.mark.parametrize("moe_backend", ACCEPTED_BACKENDS)
@pytest.mark.parametrize("name", ["cpu", "sm90", "sm100"])
def test_the_4over6_recipe_is_refused_on_every_backend(moe_backend: str, name: str) -> None:
    """Whether a backend would mix it with the standard recipe or ignore it."""
    environment = {FOUR_OVER_SIX: "1", f"{FOUR_OVER_SIX}_E4M3_USE_256": "1"}
    found = r"4over6.*\(FLASHINFER_NVFP4_4OVER6=1, FLASHINFER_NVFP4_4OVER6_E4M3_USE_256=1\)"
    with pytest.raises(UnsupportedError, match=f"{found}.*unset FLASHINFER_NVFP4_4OVER6"):
        choose(machine(name, moe_backend, environment=environment), QWEN3)


@pytest.mark.parametrize("value", ["0", "", "true"])
def test_what_flashinfer_takes_for_off_is_off(value: str) -> None:
    environment = {FOUR_OVER_SIX: value, f"{FOUR_OVER_SIX}_E4M3_USE_256": "1"}
    assert choose(machine("sm100", environment=environment), QWEN3).name == "flashinfer_trtllm"
