"""The Triton kernels: on a GPU if there is one, else in Triton's interpreter.

Stage by stage, each on the operands that it had, because FP4 turns a difference in the last bit
into a step of the grid: rows bitwise, GEMMs against fp64 within the bound of fp32 sums, the top-k
sum bitwise.
"""

import pytest
import torch
from experts_inputs import ACTIVATIONS, random_weights, routed_rows
from nvfp4_inputs import KINDS, matrix
from test_experts_fp64 import activate

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts import reference
from vllm_nvfp4_pertoken.experts import triton as experts_triton
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights
from vllm_nvfp4_pertoken.experts.triton_configs import (
    BATCH_INVARIANT,
    Config,
    config_for,
)

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SILU = Activation("silu")
SMALL = Config(8, 32, 64, 2, 2)
# Every kind of instruction: below 16 rows mma, then wgmma (on Hopper) with one and two groups.
CONFIGS = (SMALL, Config(16, 64, 128, 4, 3), Config(32, 128, 64, 8, 2, True))
if GPU:
    CONFIGS += (
        Config(8, 64, 256, 4, 3),
        Config(64, 128, 128, 8, 3),
        Config(128, 128, 64, 8, 3, True),
    )


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Asked for at every call; `conftest.py` has asked for it at Triton's first import."""
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def to_device(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(None if t is None else t.to(DEVICE) for t in weights))


def natural(values: torch.Tensor, k: int) -> torch.Tensor:
    """The order of k that the kernels take, undone."""
    return values.unflatten(1, (-1, 4, 16)).transpose(2, 3).flatten(1)[:, :k]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise, except that every NaN is the same."""
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    actual, expected = (t.nan_to_num(nan=7.0).view(bits) for t in (actual, expected))
    different = (actual != expected).nonzero()
    assert not len(different), f"{len(different)} values differ, the first at {different[0]}"


# ------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("k", [16, 64, 720, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_quantized_as_the_format_says(kind, k, exact):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for decade in (-4, 0, 3):
            check_rows(matrix(kind, 5, k, dtype, seed=k, decade=decade), exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_special_rows(dtype, exact):
    x = torch.randn(14, 64).to(dtype)
    info = torch.finfo(dtype)
    specials = (0.0, -0.0, info.max, -info.max, info.smallest_normal, torch.inf, -torch.inf)
    for row, value in enumerate((*specials, torch.nan)):
        x[row, 3] = value
    x[8] = 0.0
    x[9] = torch.nan
    x[10, 16:32] = torch.nan
    x[11] = torch.inf
    x[12] = info.smallest_normal * info.eps  # subnormal
    x[13] *= 1e-30
    check_rows(x, exact)


def check_rows(x: torch.Tensor, exact: bool) -> None:
    x = x.to(DEVICE)
    values, row_scale = experts_triton.quantize_rows(x, exact=exact)
    expected, expected_scale = nvfp4.quantize_per_token_values(x, exact=exact)
    assert_same(row_scale, expected_scale)
    assert_same(natural(values.float(), x.shape[1]), expected)
    assert not values[:, x.shape[1] :].any() or x.shape[1] % 64


def test_padding_is_zero():
    values, _ = experts_triton.quantize_rows(torch.full((3, 80), 5.0, device=DEVICE).bfloat16())
    assert values.shape == (3, 128)
    padding = torch.ones(3, 128, device=DEVICE)
    padding[:, :64] = 0
    padding.unflatten(1, (2, 4, 16))[:, 1, :, :4] = 0
    assert not (values * padding).any()
    assert (values[:, :64] != 0).all()


# ------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name)
def test_packing_can_be_undone(activation):
    weights = random_weights(3, 96, 80, activation, bias=True)
    for expert in range(3):  # every scale that there is, subnormals too
        weights.w13_scale[expert].view(torch.uint8).flatten()[:126] = torch.arange(
            1, 127, dtype=torch.uint8
        )
    weights = to_device(weights)
    packed = experts_triton.pack(weights, activation)
    restored = experts_triton.unpack(packed, activation)
    for a, b in zip(restored[:6], weights[:6], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    pointers = [t.data_ptr() for t in weights[:6]]
    in_place = experts_triton.pack(weights, activation, out=weights)
    assert [t.data_ptr() for t in in_place[:6]] == pointers
    for a, b in zip(in_place[:6], packed[:6], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_blocks_of_scale_zero_are_zero():
    weights = random_weights(2, 64, 32, SILU)
    weights.w13_scale.view(torch.uint8)[:, :, 1] = 0
    weights.w2_scale.view(torch.uint8)[:] = 0
    weights = to_device(weights)
    restored = experts_triton.unpack(experts_triton.pack(weights, SILU), SILU)
    for w in ("w13", "w2"):
        expected = reference.weight_values(getattr(weights, w), getattr(weights, f"{w}_scale"))
        actual = reference.weight_values(getattr(restored, w), getattr(restored, f"{w}_scale"))
        assert torch.equal(actual, expected)


# ------------------------------------------------------------------------------- the layer


def check_layer(inputs, weights, activation, configs, expert_map=None, weigh=True) -> torch.Tensor:
    """Each stage on the operands that it had; returns the output."""
    x, topk_weights, ids = (t.to(DEVICE) for t in inputs)
    weights = to_device(weights)
    packed = experts_triton.pack(weights, activation)
    expert_map = None if expert_map is None else expert_map.to(DEVICE)
    experts = weights.w13.shape[0]
    local = ids.long()
    if expert_map is not None:
        local = torch.where(local < 0, -1, expert_map.long()[local.clamp(min=0)])
    local = local.flatten()
    pdl = experts_triton._pdl(x)
    route = experts_triton._sort(ids, expert_map, experts, configs, pdl)
    if route.entries is None:
        slots = torch.arange(local.numel(), device=DEVICE)
    else:
        slots = local.masked_fill(local < 0, experts).argsort(stable=True)
        slots = slots[: int((local >= 0).sum())]
        assert torch.equal(route.entries[: len(slots)].long(), slots)
        check_tables(route, local, experts, configs)
    inner = experts_triton._first(x, packed, activation, route, configs[0])
    values, row_scale = nvfp4.quantize_per_token_values(x)
    expanded = experts_triton._second(inner, packed, activation, route, configs[1])
    values2, row_scale2 = nvfp4.quantize_per_token_values(inner)
    for expert in local[local >= 0].unique().tolist():
        slot = (local[slots] == expert).nonzero().flatten()
        entry = slots[slot]
        token = entry // ids.shape[1]
        one = [None if t is None else t[expert] for t in weights]
        column = reference._column_scale(one[2], one[0].shape[0], activation)
        fc1, bound = gemm64(values[token], row_scale[token], one[0], one[1], column, one[6])
        assert_near(inner[slot], *through(activation, fc1, bound))
        fc2, bound = gemm64(values2[slot], row_scale2[slot], one[3], one[4], one[5], one[7])
        assert_near(expanded[entry], fc2, bound)
    total = torch.zeros(x.shape, dtype=torch.float32, device=DEVICE)
    live = (local >= 0).view(ids.shape)
    expanded3 = expanded.view(*ids.shape, -1)
    for k in range(ids.shape[1]):
        part = expanded3[:, k].float() * (topk_weights[:, k, None] if weigh else 1.0)
        total += torch.where(live[:, k, None], part, 0.0)
    out = experts_triton.moe_forward(
        x, topk_weights, ids, packed, activation, expert_map=expert_map, configs=configs,
        apply_router_weight_on_input=not weigh,
    )  # fmt: skip
    assert_same(out, total.to(x.dtype))
    return out


def check_tables(route, local, experts, configs) -> None:
    """Every row of every expert is in exactly one block."""
    count = local[local >= 0].bincount(minlength=experts)
    first = count.cumsum(0) - count
    for table, blocks, config in zip(route.tables, route.blocks, configs, strict=True):
        table = table[: blocks * 3].view(-1, 3).tolist()
        expected = [
            [e, start, int(first[e] + count[e])]
            for e in range(experts)
            for start in range(int(first[e]), int(first[e] + count[e]), config.bm)
        ]
        assert table[: len(expected)] == expected
        assert all(row[0] == -1 for row in table[len(expected) :])


def gemm64(values, row_scale, codes, block_scale, scale_2, bias):
    """fp64 [R, N], and how far fp32 sums in any order may be from it."""
    weight = reference.weight_values(codes, block_scale).double()
    scale = row_scale.double()[:, None] * scale_2.double()
    exact = values.double() @ weight.T * scale
    # Twice the bound of `testing.matmul_bound`: tensor cores may truncate where it rounds.
    size = values.double().abs() @ weight.abs().T * scale.abs()
    bound = size * values.shape[1] * 2.0**-23 + exact.abs() * 2.0**-22
    if bias is not None:
        exact = exact + bias.double()
        bound = bound + exact.abs() * 2.0**-23
    return exact, bound


def through(activation, fc1, bound):
    """The activation's result, and its bound by what it does to the corners of the interval."""
    result = activate(fc1, activation)
    spread = torch.zeros_like(result)
    half = torch.ones(fc1.shape[1], device=fc1.device)
    if activation.is_interleaved:
        half[1::2] = -1.0
    elif activation.is_gated:
        half[fc1.shape[1] // 2 :] = -1.0
    for sign in (half, -half, half.abs(), -half.abs()):
        spread = torch.maximum(spread, (activate(fc1 + sign * bound, activation) - result).abs())
    # The activation is computed in fp32, with functions within 1e-6 (reference.py); 2x for the
    # curvature between the corners.
    return result, 2 * spread + result.abs() * 4e-6 + 1e-7 * bound.amax()


def assert_near(actual, expected, bound) -> None:
    info = torch.finfo(actual.dtype)
    limit = bound + expected.abs() * (info.eps / 2 + 1e-7) + info.smallest_normal
    overflow = expected.abs() > info.max  # float16
    error = (actual.double() - expected).abs()
    bad = ~(error <= limit * 1.001) & ~overflow
    assert not bad.any(), (
        f"{int(bad.sum())} of {bad.numel()}, worst {(error / limit).max():.3g} times the bound"
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.name}-{a.limit}")
def test_activations(activation):
    for bias in (False, True):
        weights = random_weights(4, 64, 48, activation, bias=bias)
        check_layer(routed_rows(6, 64, 4, 2), weights, activation, (SMALL, SMALL))


@pytest.mark.parametrize("first", CONFIGS, ids=str)
@pytest.mark.parametrize("second", CONFIGS[:2], ids=str)
def test_configurations(first, second):
    weights = random_weights(3, 144, 80, SILU)
    for rows in (1, 20):
        check_layer(routed_rows(rows, 144, 3, 2), weights, SILU, (first, second))


@pytest.mark.parametrize(("hidden", "inter"), [(16, 16), (64, 32), (80, 112), (336, 16), (48, 208)])
def test_odd_sizes(hidden, inter):
    for activation in (SILU, Activation("relu2_no_mul")):
        weights = random_weights(2, hidden, inter, activation, bias=True)
        inputs = routed_rows(6, hidden, 2, 1, dtype=torch.float16)
        check_layer((inputs[0].clamp(-8, 8), *inputs[1:]), weights, activation, CONFIGS[:2])


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("skew", ["even", "one", "half"])
def test_routing(top_k, skew):
    weights = random_weights(9, 64, 32, SILU)
    x, topk_weights, ids = routed_rows(150 if GPU else 30, 64, 9, top_k)
    if skew == "one":
        ids = torch.full_like(ids, 4)
    elif skew == "half":
        ids[::2] = ids[::2].clamp(max=2)
    ids[3, 0] = -1
    check_layer((x, topk_weights, ids), weights, SILU, (Config(16, 64, 64, 4, 2), SMALL))


def test_many_chunks_are_scanned(monkeypatch):
    if not GPU:
        monkeypatch.setattr(experts_triton, "_CHUNK", 32)
        monkeypatch.setattr(experts_triton, "_UNSCANNED", 2)
    rows = experts_triton._CHUNK * (experts_triton._UNSCANNED + 2) // 2 + 3
    weights = random_weights(5, 16, 16, SILU)
    check_layer(routed_rows(rows, 16, 5, 2), weights, SILU, (Config(32, 32, 64, 4, 2),) * 2)


def test_unsorted_rows():
    """So few rows that each is a block of its own, with experts that live elsewhere."""
    weights = random_weights(16, 64, 32, SILU)
    x, topk_weights, ids = routed_rows(2, 64, 24, 2)
    expert_map = torch.full((24,), -1, dtype=torch.int32)
    expert_map[torch.randperm(24)[:16]] = torch.arange(16, dtype=torch.int32)
    ids[0] = torch.tensor([-1, int((expert_map >= 0).nonzero()[0])])
    ids[1] = torch.tensor([int((expert_map < 0).nonzero()[0]), int((expert_map == 15).nonzero())])
    check_layer((x, topk_weights, ids), weights, SILU, (SMALL, SMALL), expert_map)


@pytest.mark.parametrize("rows", [3, 40])
def test_experts_elsewhere(rows):
    weights = random_weights(4, 64, 32, SILU)
    x, topk_weights, ids = routed_rows(rows, 64, 8, 3)
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1, -1, 3], dtype=torch.int32)
    topk_weights[~(expert_map >= 0)[ids.long()]] = torch.nan
    out = check_layer((x, topk_weights, ids), weights, SILU, (SMALL, SMALL), expert_map)
    assert out.isfinite().all()


def test_router_weights_on_the_input():
    weights = random_weights(4, 64, 32, SILU)
    check_layer(routed_rows(7, 64, 4, 1), weights, SILU, (SMALL, SMALL), weigh=False)


@pytest.mark.parametrize("decade", [-30, -6, 6, 30])
def test_magnitudes(decade):
    weights = random_weights(2, 64, 32, SILU)
    x, topk_weights, ids = routed_rows(7, 64, 2, 2)
    x = (x.double() * 10.0**decade).clamp(-1e37, 1e37).bfloat16()
    x[3] = 0
    scale = 10.0 ** -max(decade, 0)
    weights = weights._replace(w13_scale_2=weights.w13_scale_2 * scale)
    check_layer((x, topk_weights, ids), weights, SILU, (SMALL, SMALL))


def test_as_the_reference():
    """The whole layer, as a user sees it: mean error far below one step of FP4."""
    weights = random_weights(4, 128, 64, SILU)
    inputs = routed_rows(33, 128, 4, 2)
    expected = reference.moe_forward(*inputs, weights, SILU).float()
    packed = experts_triton.pack(to_device(weights), SILU)
    actual = experts_triton.moe_forward(*(t.to(DEVICE) for t in inputs), packed, SILU)
    error = (actual.float().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.mean() < 0.01
    assert error.max() < 0.1  # a code can move by a step


def test_no_rows():
    weights = experts_triton.pack(to_device(random_weights(4, 64, 32, SILU)), SILU)
    x, topk_weights, ids = (t.to(DEVICE) for t in routed_rows(0, 64, 4, 2))
    assert experts_triton.moe_forward(x, topk_weights, ids, weights, SILU).shape == (0, 64)


def test_a_row_does_not_depend_on_its_batch():
    weights = experts_triton.pack(to_device(random_weights(4, 128, 96, SILU)), SILU)
    x, topk_weights, ids = (t.to(DEVICE) for t in routed_rows(30, 128, 4, 2))
    configs = (BATCH_INVARIANT, BATCH_INVARIANT)
    whole = experts_triton.moe_forward(x, topk_weights, ids, weights, SILU, configs=configs)
    again = experts_triton.moe_forward(x, topk_weights, ids, weights, SILU, configs=configs)
    assert_same(again, whole)
    for rows in (slice(0, 1), slice(14, 15), slice(7, 21)):
        part = experts_triton.moe_forward(
            x[rows], topk_weights[rows], ids[rows], weights, SILU, configs=configs
        )
        assert_same(part, whole[rows])


def test_bad_inputs_are_refused():
    weights = experts_triton.pack(to_device(random_weights(4, 64, 32, SILU)), SILU)
    x, topk_weights, ids = (t.to(DEVICE) for t in routed_rows(3, 64, 4, 2))
    forward = experts_triton.moe_forward
    with pytest.raises(TypeError, match=r"bfloat16 or float16, got torch.float32"):
        forward(x.float(), topk_weights, ids, weights, SILU)
    with pytest.raises(ValueError, match=r"must both be \[3, top_k\]"):
        forward(x, topk_weights[:2], ids, weights, SILU)
    with pytest.raises(ValueError, match="need top_k 1, got 2"):
        forward(x, topk_weights, ids, weights, SILU, apply_router_weight_on_input=True)
    with pytest.raises(ValueError, match=r"w2 must be a contiguous torch.uint8 tensor"):
        forward(x, topk_weights, ids, weights._replace(w2=weights.w2[:, :32]), SILU)


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2), (256, 8), (3, 1)])
def test_warm_up_launches_every_kernel(experts, top_k):
    """What `moe_forward` and `_sort` decide by, for every number of tokens."""
    weights = random_weights(1, 64, 32, SILU)
    weights = ExpertWeights(
        *(None if t is None else t.expand(experts, *t.shape[1:]) for t in weights)
    )

    def kinds(tokens):
        entries = tokens * top_k
        sizes = experts_triton._gemm_sizes(weights)
        configs = [config_for(torch.device("cpu"), entries / experts, n, k) for n, k in sizes]
        chunks = -(-entries // experts_triton._CHUNK)
        unsorted = entries * 4 <= experts
        return (*configs, unsorted, not unsorted and chunks > experts_triton._UNSCANNED)

    warm = {kinds(tokens) for tokens in experts_triton.batch_sizes(weights, top_k)}
    assert {kinds(tokens) for tokens in range(1, max(3000, 120 * experts))} == warm


def test_configurations_are_sane():
    for n in (16, 64, 2048):
        for share in (0.01, 1, 3, 10, 30, 90, 500, 1e6):
            config = config_for(torch.device("cpu"), share, n, 64)
            assert config.bk % 64 == 0
            assert config.bn % 16 == 0


@pytest.mark.skipif(not GPU, reason="the interpreter compiles nothing")
def test_nothing_is_compiled_after_the_warm_up():
    from vllm_nvfp4_pertoken.experts import triton_kernels

    weights = experts_triton.pack(to_device(random_weights(16, 128, 64, SILU)), SILU)
    experts_triton.warm_up(weights, SILU, 4, torch.bfloat16)

    def compiled():
        kernels = [
            getattr(triton_kernels, k) for k in triton_kernels.__all__ if k.endswith("kernel")
        ]
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    before = compiled()
    for rows in (1, 2, 3, 15, 17, 100, 511, 700, 3000):
        inputs = (t.to(DEVICE) for t in routed_rows(rows, 128, 16, 4))
        experts_triton.moe_forward(*inputs, weights, SILU)
    assert compiled() == before


@pytest.mark.skipif(not GPU, reason="CUDA graphs")
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_cuda_graph(rows):
    weights = experts_triton.pack(to_device(random_weights(16, 128, 64, SILU)), SILU)
    x, topk_weights, ids = (t.to(DEVICE) for t in routed_rows(rows, 128, 16, 4))
    experts_triton.moe_forward(x, topk_weights, ids, weights, SILU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_triton.moe_forward(x, topk_weights, ids, weights, SILU)
    for seed in (5, 6):
        other = routed_rows(rows, 128, 16, 4, seed=seed)
        for static, new in zip((x, topk_weights, ids), other, strict=True):
            static.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert_same(out, experts_triton.moe_forward(x, topk_weights, ids, weights, SILU))
