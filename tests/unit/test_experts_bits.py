"""The compiled kernel gives the torch reference's bits, and no row depends on its batch."""

import pytest
import torch
from experts_inputs import ACTIVATIONS, random_weights, routed_rows

from vllm_nvfp4_pertoken.experts import cpu, reference
from vllm_nvfp4_pertoken.experts.reference import Activation

SHAPES = [(16, 16, 1, 1), (48, 80, 3, 2), (576, 96, 4, 4), (64, 704, 8, 8)]
SILU = Activation("silu")


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    different = (actual.view(torch.int16) != expected.view(torch.int16)).nonzero()
    assert not len(different), f"{len(different)} values differ, the first at {different[0]}"


def supported() -> list[str]:
    available, reason = cpu.available()
    assert available, reason  # the suite runs where a compiler is
    weights = random_weights(1, 16, 16, SILU)
    packed = cpu.pack(weights, SILU)
    found = []
    for isa in cpu.ISAS:
        try:
            cpu.moe_forward(*routed_rows(1, 16, 1, 1), packed, SILU, isa=isa)
        except RuntimeError as error:
            assert f"no {isa}" in str(error)  # noqa: PT017 (which ones are here is not known)
        else:
            found.append(isa)
    return found


@pytest.mark.parametrize("isa", supported())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 65])
def test_every_instruction_set_gives_the_reference(isa, shape, rows):
    hidden, inter, experts, top_k = shape
    weights = random_weights(experts, hidden, inter, SILU)
    inputs = routed_rows(rows, hidden, experts, top_k)
    expected = reference.moe_forward(*inputs, weights, SILU)
    assert expected.float().abs().sum() > 0
    same(cpu.moe_forward(*inputs, cpu.pack(weights, SILU), SILU, isa=isa), expected)


@pytest.mark.parametrize("isa", supported())
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_every_activation(isa, activation, bias):
    weights = random_weights(4, 64, 48, activation, bias=bias)
    inputs = routed_rows(21, 64, 4, 2)
    expected = reference.moe_forward(*inputs, weights, activation)
    packed = cpu.pack(weights, activation)
    same(cpu.moe_forward(*inputs, packed, activation, isa=isa), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    weights = random_weights(4, 64, 48, SILU)
    inputs = routed_rows(21, 64, 4, 2, dtype=dtype)
    expected = reference.moe_forward(*inputs, weights, SILU)
    assert expected.dtype == dtype
    same(cpu.moe_forward(*inputs, cpu.pack(weights, SILU), SILU), expected)


@pytest.mark.parametrize("forward", ["reference", "cpu"])
def test_rows_do_not_depend_on_their_batch(forward):
    weights = random_weights(4, 96, 64, SILU)
    x, topk_weights, ids = routed_rows(700, 96, 4, 2)
    if forward == "cpu":
        weights, run = cpu.pack(weights, SILU), cpu.moe_forward
    else:
        run = reference.moe_forward
    whole = run(x, topk_weights, ids, weights, SILU)
    for row in (0, 1, 333, 699):
        one = slice(row, row + 1)
        same(run(x[one], topk_weights[one], ids[one], weights, SILU), whole[one])
    order = torch.randperm(700, generator=torch.Generator().manual_seed(2))
    same(run(x[order], topk_weights[order], ids[order], weights, SILU), whole[order])


def test_threads_do_not_matter():
    weights = cpu.pack(random_weights(4, 96, 64, SILU), SILU)
    inputs = routed_rows(100, 96, 4, 2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = cpu.moe_forward(*inputs, weights, SILU)
        torch.set_num_threads(2)
        same(cpu.moe_forward(*inputs, weights, SILU), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, torch.inf, torch.nan])
def test_odd_rows_are_the_reference_and_touch_no_neighbour(value):
    weights = random_weights(4, 64, 48, SILU)
    x, topk_weights, ids = routed_rows(9, 64, 4, 2)
    clean = reference.moe_forward(x, topk_weights, ids, weights, SILU)
    x[4] = value
    x[4, 0] = 1.0 if value else 0.0
    expected = reference.moe_forward(x, topk_weights, ids, weights, SILU)
    actual = cpu.moe_forward(x, topk_weights, ids, cpu.pack(weights, SILU), SILU)
    same(actual.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    others = torch.arange(9) != 4
    same(expected[others], clean[others])


@pytest.mark.parametrize("forward", ["reference", "cpu"])
def test_experts_elsewhere_contribute_nothing_and_are_not_read(forward):
    weights = random_weights(4, 64, 48, SILU)
    x, topk_weights, ids = routed_rows(30, 64, 4, 2)
    local = weights._replace(**{k: v[:2] for k, v in weights._asdict().items() if v is not None})
    maps = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, 1]], dtype=torch.int32)
    if forward == "cpu":
        run, local = cpu.moe_forward, cpu.pack(local, SILU)
    else:
        run = reference.moe_forward
    part = run(x, topk_weights, ids, local, SILU, expert_map=maps[0].contiguous())
    padded = torch.where(ids < 2, ids, -1)
    same(run(x, topk_weights, padded, local, SILU), part)
    assert not part[(ids >= 2).all(1)].any()
    topk_weights[ids >= 2] = torch.nan
    same(run(x, topk_weights, ids, local, SILU, expert_map=maps[0].contiguous()), part)


@pytest.mark.parametrize("forward", ["reference", "cpu"])
def test_unrouted_experts_are_not_read(forward):
    weights = random_weights(4, 64, 48, SILU)
    x, topk_weights, ids = routed_rows(30, 64, 3, 2)
    clean = reference.moe_forward(x, topk_weights, ids, weights, SILU)
    weights.w13_scale_2[3] = torch.nan
    weights.w2_scale.view(torch.uint8)[3] = 0x7F
    if forward == "cpu":
        same(cpu.moe_forward(x, topk_weights, ids, cpu.pack(weights, SILU), SILU), clean)
    else:
        same(reference.moe_forward(x, topk_weights, ids, weights, SILU), clean)


def test_router_weight_on_input():
    weights = random_weights(4, 64, 48, SILU)
    x, topk_weights, ids = routed_rows(9, 64, 4, 1)
    ones = reference.moe_forward(x, torch.ones_like(topk_weights), ids, weights, SILU)
    packed = cpu.pack(weights, SILU)
    for run, w in ((reference.moe_forward, weights), (cpu.moe_forward, packed)):
        same(run(x, topk_weights, ids, w, SILU, apply_router_weight_on_input=True), ones)
        with pytest.raises(ValueError, match="top_k 1"):
            run(*routed_rows(9, 64, 4, 2), w, SILU, apply_router_weight_on_input=True)


def test_no_rows():
    weights = random_weights(4, 64, 48, SILU)
    inputs = routed_rows(0, 64, 4, 2)
    assert reference.moe_forward(*inputs, weights, SILU).shape == (0, 64)
    assert cpu.moe_forward(*inputs, cpu.pack(weights, SILU), SILU).shape == (0, 64)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_keeps_size_and_comes_back(activation, shape):
    hidden, inter, experts, _ = shape
    weights = random_weights(experts, hidden, inter, activation)
    packed = cpu.pack(weights, activation)
    for name, tensor in weights._asdict().items():
        if tensor is not None:
            assert getattr(packed, name).shape == tensor.shape
            assert getattr(packed, name).dtype == tensor.dtype
    back = cpu.unpack(packed, activation)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        a, b = getattr(back, name), getattr(weights, name)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_wrong_arguments_do_not_reach_the_kernel():
    weights = cpu.pack(random_weights(4, 64, 48, SILU), SILU)
    x, topk_weights, ids = routed_rows(3, 64, 4, 2)
    with pytest.raises(ValueError, match=r"w2 must be a contiguous.*uint8"):
        cpu.moe_forward(x, topk_weights, ids, weights._replace(w2=weights.w2[:, :32]), SILU)
    with pytest.raises(ValueError, match="out of range"):
        cpu.moe_forward(x, topk_weights, ids + 3, weights, SILU)
    with pytest.raises(TypeError, match="hidden_states"):
        cpu.moe_forward(x.double(), topk_weights, ids, weights, SILU)
