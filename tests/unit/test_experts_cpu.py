"""The CPU kernel's corners: the order of sums, odd rows, large batches, memory, installation.

What it computes in ordinary cases is in test_experts_bits.py.
"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from experts_inputs import random_weights, routed_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_inputs import matrices

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts import cpu, reference
from vllm_nvfp4_pertoken.experts.reference import Activation

REPOSITORY = Path(__file__).parents[2]
SILU = Activation("silu")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise, except that every NaN is the same."""
    bits = torch.int32 if expected.dtype == torch.float32 else torch.int16
    actual, expected = actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)
    different = (actual.view(bits) != expected.view(bits)).nonzero()
    assert not len(different), f"{len(different)} values differ, the first at {different[0]}"


@pytest.mark.parametrize("k", [16, 48, 64, 576])
def test_order_of_sums(k):
    """Blocks exactly, in fp64; then pairs of blocks, added up one after the other in fp32."""
    rng = torch.Generator().manual_seed(k)
    x = torch.randn(9, k, generator=rng) * 10 ** (4 * torch.rand(9, k, generator=rng))
    w = nvfp4.quantize_weight(torch.randn(32, k, generator=rng))
    values, _ = nvfp4.quantize_per_token_values(x)
    weight = nvfp4.dequantize(w.weight, w.weight_scale, 1.0)
    blocks = np.einsum(
        "mbi,nbi->bmn",
        values.double().unflatten(1, (-1, 16)).numpy(),
        weight.double().unflatten(1, (-1, 16)).numpy(),
    )
    single = blocks.astype(np.float32)
    assert (single == blocks).all(), "blocks are not exact"
    expected = np.zeros((9, 32), dtype=np.float32)
    for b in range(0, k // 16, 2):
        expected = expected + single[b : b + 2].sum(axis=0, dtype=np.float32)
    assert torch.equal(reference._accumulate(values, weight), torch.from_numpy(expected))


@pytest.mark.parametrize("isa", cpu.ISAS)
@pytest.mark.parametrize("rows", [3, 40])
def test_every_instruction_set_keeps_the_order_of_sums(isa, rows):
    """Sums of like blocks are mostly exact; here blocks differ, and fp32 shows every bit of FC2."""
    if cpu.ISAS.index(isa) > cpu._load()[1]:
        pytest.skip(f"no {isa} here")
    rng = torch.Generator().manual_seed(5)
    scales = [10 ** (3 * torch.rand(n, 37, generator=rng)) for n in (rows, 2 * 592, 592)]
    x, w13, w2 = (torch.randn(n.shape[0], 592, generator=rng) for n in scales)
    x, w13, w2 = (m * n.repeat_interleave(16, 1) for m, n in zip((x, w13, w2), scales, strict=True))
    w13 *= 10 ** (4 * torch.rand(2 * 592, 1, generator=rng))
    weights = random_weights(1, 592, 592, SILU)._replace(
        w13=nvfp4.quantize_weight(w13[None]).weight,
        w13_scale=nvfp4.quantize_weight(w13[None]).weight_scale,
        w2=nvfp4.quantize_weight(w2[None]).weight,
        w2_scale=nvfp4.quantize_weight(w2[None]).weight_scale,
    )
    routing = torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int32)
    expected = reference.moe_forward(x, *routing, weights, SILU)
    assert expected.isfinite().all()
    assert_same(cpu.moe_forward(x, *routing, cpu.pack(weights, SILU), SILU, isa=isa), expected)


@settings(max_examples=150, deadline=None)
@given(x=matrices(max_rows=20, max_columns=600), isa=st.sampled_from(cpu.ISAS))
def test_any_rows_are_quantized_as_the_format_says(x, isa):
    """Ties, zeros, subnormals, 1e-30 to 1e30, infinity and NaN, in every dtype."""
    if cpu.ISAS.index(isa) > cpu._load()[1]:
        return
    weights = random_weights(1, x.shape[1], 32, SILU)
    routing = torch.ones(x.shape[0], 1), torch.zeros(x.shape[0], 1, dtype=torch.int32)
    actual = cpu.moe_forward(x, *routing, cpu.pack(weights, SILU), SILU, isa=isa)
    assert_same(actual, reference.moe_forward(x, *routing, weights, SILU))


def test_float32():
    weights = random_weights(4, 64, 48, SILU)
    inputs = routed_rows(21, 64, 4, 2, dtype=torch.float32)
    expected = reference.moe_forward(*inputs, weights, SILU)
    assert_same(cpu.moe_forward(*inputs, cpu.pack(weights, SILU), SILU), expected)


@pytest.mark.parametrize("hidden", [576, 592])
def test_one_row_of_two_thousand(hidden):
    """Alone it goes through dot products, in a large batch through tiles and several segments."""
    weights = cpu.pack(random_weights(2, hidden, 704, SILU), SILU)
    x, topk_weights, ids = routed_rows(2000, hidden, 2, 2)
    whole = cpu.moe_forward(x, topk_weights, ids, weights, SILU)
    for row in (0, 999, 1999):
        one = slice(row, row + 1)
        alone = cpu.moe_forward(x[one], topk_weights[one], ids[one], weights, SILU)
        assert_same(alone, whole[one])


def test_every_slot_to_one_expert():
    weights = random_weights(4, 64, 48, SILU)
    x, topk_weights, ids = routed_rows(50, 64, 4, 3)
    ids = torch.full_like(ids, 2)
    expected = reference.moe_forward(x, topk_weights, ids, weights, SILU)
    assert_same(cpu.moe_forward(x, topk_weights, ids, cpu.pack(weights, SILU), SILU), expected)


def test_memory_is_bounded_and_chunks_do_not_matter(monkeypatch):
    weights = cpu.pack(random_weights(4, 64, 48, SILU), SILU)
    inputs = routed_rows(1000, 64, 4, 2)
    whole = cpu.moe_forward(*inputs, weights, SILU)
    monkeypatch.setattr(cpu, "_SCRATCH_LIMIT", 1 << 18)
    monkeypatch.setattr(cpu, "_scratch", threading.local())
    assert_same(cpu.moe_forward(*inputs, weights, SILU), whole)
    # The limit is for what grows with the tokens; each thread has room for decoded weights besides.
    assert cpu._scratch.buffer.numel() < (1 << 18) + (1 << 17) * torch.get_num_threads()


def test_reference_chunks_and_tiles_do_not_matter(monkeypatch):
    weights = random_weights(4, 64, 48, SILU)
    inputs = routed_rows(100, 64, 4, 2)
    whole = reference.moe_forward(*inputs, weights, SILU)
    monkeypatch.setattr(reference, "_TOKEN_CHUNK", 7)
    monkeypatch.setattr(reference, "_ROW_TILE", 3)
    assert_same(reference.moe_forward(*inputs, weights, SILU), whole)


def test_calls_from_several_threads():
    weights = cpu.pack(random_weights(4, 64, 48, SILU), SILU)
    batches = [routed_rows(rows, 64, 4, 2, seed=rows) for rows in (3, 40, 200)]
    expected = [cpu.moe_forward(*batch, weights, SILU) for batch in batches]
    results: list[list[torch.Tensor]] = [[] for _ in batches]

    def call(i: int) -> None:
        results[i] += [cpu.moe_forward(*batches[i], weights, SILU) for _ in range(10)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(results, expected, strict=True):
        assert len(got) == 10
        for result in got:
            assert_same(result, want)


def test_packing_in_place_keeps_the_storage():
    weights = random_weights(3, 48, 80, SILU)
    packed = cpu.pack(weights, SILU)
    pointers = [t.data_ptr() for t in weights[:6]]
    in_place = cpu.pack(weights, SILU, out=weights)
    assert [t.data_ptr() for t in in_place[:6]] == pointers
    for a, b in zip(in_place[:6], packed[:6], strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_a_library_of_another_version_is_refused(monkeypatch):
    class Grown(cpu._Args):
        _fields_ = (("more", cpu.ctypes.c_int64),)

    cpu._load.cache_clear()
    try:
        monkeypatch.setattr(cpu, "_Args", Grown)
        available, reason = cpu.available()
        assert not available
        assert "another version, reinstall" in reason
    finally:
        monkeypatch.undo()
        cpu._load.cache_clear()
    assert cpu.available()[0]


def test_installs_without_a_compiler(tmp_path):
    shutil.copytree(
        REPOSITORY / "vllm_nvfp4_pertoken",
        tmp_path / "vllm_nvfp4_pertoken",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    result = subprocess.run(
        [sys.executable, "-c", build],
        cwd=tmp_path,
        env=os.environ | {"CC": "/nonexistent/cc"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "_cpu_kernel" in result.stderr + result.stdout  # the warning names what was left out
    assert list(tmp_path.glob("*.whl"))
