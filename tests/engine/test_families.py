"""Model families, converted and served by the real engine, beside transformers with our numbers.

W4A4 amplifies rounding: a sum that rounds differently moves codes, and the engine's BF16 layers add
in another order than transformers'. So distributions are held to what rounding alone does to the
very same forward: how far they move (median divergence, times 1.5) when one value of eight in the
embedding moves by a unit in the last place.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from families import (
    divergence,
    engine_logprobs,
    load,
    logprobs,
    make_model,
    make_prompts,
    quantized,
    rounded_differently,
)

from vllm_nvfp4_pertoken.checkpoints.convert import Options, convert_checkpoint

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def process():
    """One process that serves all the models after each other; importing vLLM is the slow part."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("family", "all_linears", "ranks"),
    [
        ("qwen3_moe", False, 1),
        ("qwen3_moe", True, 1),
        ("mixtral", True, 1),
        ("qwen3_next", True, 1),
        ("deepseek_v2", False, 1),
        ("deepseek_v3", True, 1),
        ("glm4_moe", True, 1),
    ],
)
def test_served_as_transformers_computes(family, all_linears, ranks, process, tmp_path):
    source = make_model(family, tmp_path / "source")
    path = tmp_path / "converted"
    convert_checkpoint(source, path, Options(all_linears=all_linears))
    log = tmp_path / "log"
    try:
        sequences, served = process.submit(
            engine_logprobs, str(path), ranks, str(log), make_prompts()
        ).result()
    except Exception as error:
        raise AssertionError(log.read_text()[-3000:]) from error

    model = quantized(source, path, ranks)
    expected = logprobs(model, sequences)
    model.get_input_embeddings().register_forward_hook(rounded_differently)
    noise = divergence(expected, logprobs(model, sequences)).median()
    actual = divergence(expected, served).median()
    print(f"{family}: {actual:.2e}, noise {noise:.2e}")
    assert actual <= 1.5 * noise
    # What that tells apart: other numbers, and other weights.
    unquantized = divergence(expected, logprobs(load(source), sequences)).median()
    swapped = quantized(source, path, ranks, swap=True)
    other = divergence(expected, logprobs(swapped, sequences)).median()
    print(f"unquantized {unquantized:.2e}, gate and up swapped {other:.2e}")
    assert min(unquantized, other) > 1.5 * noise
