"""The trainer's operators: the server's bits, and the gradients of the unquantized layer."""

import pytest
import torch
import torch.nn.functional as F
from cases import assert_bitwise
from experts_inputs import ACTIVATIONS, routed_rows
from torch.utils.checkpoint import checkpoint

from vllm_nvfp4_pertoken import nvfp4, training
from vllm_nvfp4_pertoken.experts import cpu, ops, reference, triton
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights

SILU = Activation("silu")
BACKENDS = ["reference", "cpu"]
HIDDEN, INTER, EXPERTS, TOP_K = 64, 48, 4, 2
NAMES = ("hidden_states", "topk_weights", "w13", "w2", "w13_bias", "w2_bias")


def masters(activation=SILU, *, dtype=torch.float32, bias=False, seed=0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    rows = INTER * (2 if activation.is_gated else 1)

    def random(*shape):
        return torch.randn(*shape, generator=rng) / shape[-1] ** 0.5

    weights = {"w13": random(EXPERTS, rows, HIDDEN), "w2": random(EXPERTS, HIDDEN, INTER)}
    if bias:
        weights |= {"w13_bias": random(EXPERTS, rows), "w2_bias": random(EXPERTS, HIDDEN)}
    return {name: weight.to(dtype) for name, weight in weights.items()}


def server_weights(weights: dict[str, torch.Tensor], activation: Activation) -> ExpertWeights:
    """What a server has: one expert after the other, from BF16, gate and up with one scale."""
    weights = {name: weight.detach().bfloat16() for name, weight in weights.items()}
    halves = 2 if activation.is_gated else 1
    parts = []
    for w13, w2 in zip(weights["w13"], weights["w2"], strict=True):
        scale_2 = (w13.abs().max().float() / torch.tensor(2688.0)).reshape(())
        first = nvfp4.quantize_weight(w13, scale_2)
        second = nvfp4.quantize_weight(w2)
        parts.append((*first[:2], scale_2.repeat(halves), *second))
    return ExpertWeights(
        *map(torch.stack, zip(*parts, strict=True)), weights.get("w13_bias"), weights.get("w2_bias")
    )


def served(inputs, weights, activation) -> torch.Tensor:
    return reference.moe_forward(*inputs, server_weights(weights, activation), activation)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_bitwise({"output": actual}, {"output": expected})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_forward_is_the_servers_before_and_after_an_update(activation, bias, backend):
    weights = masters(activation, bias=bias)
    inputs = routed_rows(21, HIDDEN, EXPERTS, TOP_K)
    first = training.experts(*inputs, **weights, activation=activation, backend=backend)
    same(first, served(inputs, weights, activation))
    assert first.float().abs().sum() > 0
    for weight in weights.values():
        weight.mul_(1.7).add_(0.01)
    second = training.experts(*inputs, **weights, activation=activation, backend=backend)
    same(second, served(inputs, weights, activation))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("activation", [SILU, Activation("relu2_no_mul")], ids=str)
def test_forward_on_triton_is_the_servers(activation, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: w.to(device) for name, w in masters(activation).items()}
    inputs = [t.to(device) for t in routed_rows(9, HIDDEN, EXPERTS, TOP_K)]
    packed = triton.pack(server_weights(weights, activation), activation)
    expected = triton.moe_forward(*inputs, packed, activation)
    same(training.experts(*inputs, **weights, activation=activation, backend="triton"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_of_hidden_states(dtype):
    weights = masters()
    inputs = routed_rows(21, HIDDEN, EXPERTS, TOP_K, dtype=dtype)
    output = training.experts(*inputs, **weights, activation=SILU)
    assert output.dtype == dtype
    same(output, served(inputs, weights, SILU))


def test_masters_are_rounded_to_the_checkpoints_dtype_first():
    weights = masters()
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    inputs = routed_rows(21, HIDDEN, EXPERTS, TOP_K)
    expected = training.experts(*inputs, **rounded, activation=SILU)
    same(training.experts(*inputs, **weights, activation=SILU), expected)
    finer = training.experts(*inputs, **weights, activation=SILU, dtype=torch.float32)
    assert not torch.equal(finer, expected)


def unquantized(hidden_states, topk_weights, topk_ids, w13, w2, w13_bias, w2_bias, activation):
    """The layer without quantization: every token and slot on its own, in the inputs' dtype."""
    out = []
    for row, weigh, ids in zip(hidden_states, topk_weights, topk_ids.tolist(), strict=True):
        total = torch.zeros_like(row)
        for weight, e in zip(weigh, ids, strict=True):
            if e < 0:
                continue
            fc1 = w13[e] @ row + (0 if w13_bias is None else w13_bias[e])
            gate, up = fc1, None
            if activation.is_gated:
                gate, up = (
                    (fc1[::2], fc1[1::2]) if activation.is_interleaved else fc1.tensor_split(2)
                )
                if activation.limit is not None:
                    gate = torch.where(gate > activation.limit, activation.limit, gate)
                    up = up.clip(-activation.limit, activation.limit)
            name = activation.name.removesuffix("_no_mul")
            inner = {
                "relu2": lambda x: F.relu(x) ** 2,
                "gelu": F.gelu,
                "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            }.get(name, lambda x: x / (1 + torch.exp(-activation.alpha * x)))(gate)
            inner = inner if up is None else inner * (up + activation.beta)
            total = total + weight * (w2[e] @ inner + (0 if w2_bias is None else w2_bias[e]))
        out.append(total)
    return torch.stack(out)


def case(activation, bias, dtype=torch.float32, rows=13):
    """Inputs by name, an upstream gradient. Rows of magnitude 1, so that clamps matter."""
    rng = torch.Generator().manual_seed(5)
    _, topk_weights, topk_ids = routed_rows(rows, HIDDEN, EXPERTS, TOP_K)
    values = {
        "hidden_states": torch.randn(rows, HIDDEN, generator=rng).bfloat16().to(dtype),
        "topk_weights": topk_weights,
        **dict.fromkeys(("w13_bias", "w2_bias")),
        **masters(activation, bias=bias, dtype=dtype),
    }
    return values, topk_ids, torch.randn(rows, HIDDEN, generator=rng)


def leaves(values, dtype=None, names=NAMES):
    """Copies that want a gradient where named."""
    return {
        name: None
        if value is None
        else value.detach().to(dtype or value.dtype, copy=True).requires_grad_(name in names)
        for name, value in values.items()
    }


def gradients(values, topk_ids, upstream, activation, **options):
    output = training.experts(**values, topk_ids=topk_ids, activation=activation, **options)
    output.backward(upstream.to(output.dtype))
    return {name: value.grad for name, value in values.items() if value is not None}


def expected_gradients(values, topk_ids, upstream, activation):
    """By autograd through the unquantized layer, in fp64."""
    exact = leaves(values, torch.float64)
    output = unquantized(**exact, topk_ids=topk_ids, activation=activation)
    output.backward(upstream.double())
    return {name: value.grad for name, value in exact.items() if value is not None}


def assert_close(actual, expected, relative):
    """Within ``relative`` of the largest gradient of each tensor."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name].double() - want).abs().max()
        assert error <= relative * want.abs().max(), f"{name}: {error} of {want.abs().max()}"
        assert want.abs().max() > 0, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_gradients_are_the_unquantized_layers(activation, bias, backend):
    values, ids, upstream = case(activation, bias)
    actual = gradients(leaves(values), ids, upstream, activation, backend=backend)
    # fp32 sums of at most 96 products, thrice: 3 * 96 * 2**-24 = 2e-5 of the sum of magnitudes,
    # which is about sqrt(96) times the sum.
    assert_close(actual, expected_gradients(values, ids, upstream, activation), 2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name):
    activation = Activation("swigluoai_uninterleave", alpha=1.3, beta=0.5, limit=0.7)
    values, ids, upstream = case(activation, bias=True)
    actual = gradients(leaves(values), ids, upstream, activation)[name].double()
    exact = {key: value.double() for key, value in values.items()}
    rng = torch.Generator().manual_seed(3)

    def loss(step):
        moved = exact | {name: exact[name] + step * direction}
        with torch.no_grad():
            out = unquantized(**moved, topk_ids=ids, activation=activation)
            return (out * upstream.double()).sum()

    for _ in range(5):
        direction = torch.randn(exact[name].shape, generator=rng, dtype=torch.float64)
        direction /= direction.norm()
        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        # The clamp has kinks: a step of 1e-5 may cross one, which then counts half.
        assert abs((actual * direction).sum() - slope) <= 1e-3 * actual.norm()


def test_bf16_masters_and_hidden_states_get_gradients_of_their_dtype():
    values, ids, upstream = case(SILU, bias=True, dtype=torch.bfloat16)
    upstream = upstream.bfloat16()
    actual = gradients(leaves(values), ids, upstream, SILU)
    for name, grad in actual.items():
        assert grad.dtype == values[name].dtype, name
    # Computed in fp32 and rounded once, to 8 bits.
    assert_close(actual, expected_gradients(values, ids, upstream, SILU), 2**-8)
    coarse = gradients(leaves(values), ids, upstream, SILU, backward_dtype=torch.bfloat16)
    assert_close(coarse, expected_gradients(values, ids, upstream, SILU), 0.05)
    assert not torch.equal(coarse["w2"], actual["w2"])


def test_zero_rows_and_padding_and_experts_without_rows():
    values, ids, upstream = case(SILU, bias=False)
    values["hidden_states"][4] = 0
    ids = torch.where(ids == 2, -1, ids)
    ids[7] = -1
    inputs = leaves(values)
    output = training.experts(**inputs, topk_ids=ids, activation=SILU)
    assert not output[4].any()
    assert not output[7].any()
    output.backward(upstream)
    actual = {name: value.grad for name, value in inputs.items() if value is not None}
    assert_close(actual, expected_gradients(values, ids, upstream, SILU), 2e-4)
    assert not actual["w13"][2].any()
    assert not actual["w2"][2].any()
    assert not actual["topk_weights"][ids < 0].any()


def test_no_rows():
    values, ids, upstream = case(SILU, bias=True, rows=0)
    for name, grad in gradients(leaves(values), ids, upstream, SILU).items():
        assert grad.shape == values[name].shape
        assert not grad.any()


@pytest.mark.parametrize("wanted", [*NAMES, "all but weights"])
def test_only_what_wants_a_gradient_gets_one(wanted):
    values, ids, upstream = case(SILU, bias=True)
    names = NAMES[:2] if wanted == "all but weights" else (wanted,)
    actual = gradients(leaves(values, names=names), ids, upstream, SILU)
    everything = gradients(leaves(values), ids, upstream, SILU)
    for name, grad in actual.items():
        assert (grad is not None) == (name in names)
        if grad is not None:
            same(grad, everything[name])


def test_no_grad_keeps_nothing():
    values, ids, _ = case(SILU, bias=True)
    with torch.no_grad():
        output = training.experts(**leaves(values), topk_ids=ids, activation=SILU)
    assert not output.requires_grad
    same(output, training.experts(**values, topk_ids=ids, activation=SILU))


def test_gradient_checkpointing_changes_nothing():
    values, ids, upstream = case(SILU, bias=True)
    plain = gradients(leaves(values), ids, upstream, SILU)
    inputs = leaves(values)
    output = checkpoint(
        lambda: training.experts(**inputs, topk_ids=ids, activation=SILU), use_reentrant=False
    )
    output.backward(upstream)
    assert_bitwise({name: value.grad for name, value in inputs.items()}, plain)


def test_weights_that_change_before_backward_are_noticed():
    values, ids, upstream = case(SILU, bias=False)
    inputs = leaves(values)
    output = training.experts(**inputs, topk_ids=ids, activation=SILU)
    with torch.no_grad():
        inputs["w2"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward(upstream)


def test_second_derivatives_are_refused():
    values, ids, _ = case(SILU, bias=False)
    inputs = leaves(values)
    output = training.experts(**inputs, topk_ids=ids, activation=SILU)
    upstream = torch.ones_like(output).requires_grad_()
    (grad,) = torch.autograd.grad(output, inputs["w2"], upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_autocast_casts_hidden_states_and_nothing_else():
    values, ids, upstream = case(SILU, bias=True)
    half = {**values, "hidden_states": values["hidden_states"].bfloat16()}
    expected = gradients(leaves(half), ids, upstream.bfloat16(), SILU)
    inputs = leaves(values)
    with torch.autocast("cpu", torch.bfloat16):
        output = training.experts(**inputs, topk_ids=ids, activation=SILU)
        same(output, training.experts(**half, topk_ids=ids, activation=SILU))
        output.backward(upstream.bfloat16())
    for name, value in inputs.items():
        same(value.grad, expected[name].to(value.dtype))


def test_quantized_once_for_several_calls():
    weights = masters(bias=True)
    inputs = routed_rows(21, HIDDEN, EXPERTS, TOP_K)
    quantized = training.quantize_experts(**weights, activation=SILU)
    expected = cpu.pack(server_weights(weights, SILU), SILU)
    assert_bitwise(quantized._asdict(), expected._asdict())
    output = training.experts(*inputs, **weights, activation=SILU, quantized=quantized)
    same(output, served(inputs, weights, SILU))


def test_what_cannot_be_quantized_is_named():
    weights = masters()
    inputs = routed_rows(3, HIDDEN, EXPERTS, TOP_K)
    with pytest.raises(ValueError, match=r"w13 \(4, 95, 64\) and w2 \(4, 64, 48\) do not fit"):
        training.experts(*inputs, weights["w13"][:, 1:], weights["w2"], SILU)
    with pytest.raises(ValueError, match=r"\[E, I, H\] and \[E, H, I\] for relu2_no_mul"):
        training.experts(*inputs, **weights, activation=Activation("relu2_no_mul"))
    weights["w2"][1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"1 NaN or infinite values, the first at \(1, 2, 3\)"):
        training.experts(*inputs, **weights, activation=SILU)


# ------------------------------------------------------------------------------- dense


def rows_of(count, k, dtype=torch.bfloat16):
    rng = torch.Generator().manual_seed(count)
    return torch.randn(count, k, generator=rng).to(dtype)


def parts_of(sizes, k):
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(size, k, generator=rng) * 3.0**i for i, size in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(64, 32, 16), (24, 8, 8)], ids=str)
def test_linears_are_the_servers_fused_one(sizes):
    """q, k and v: one by one in the trainer, one layer with one scale in the server."""
    parts, x = parts_of(sizes, 80), rows_of(11, 80)
    half = [part.bfloat16() for part in parts]
    largest = max(part.abs().max() for part in half).float()
    scale_2 = torch.div(largest, torch.tensor(2688.0))
    whole = nvfp4.quantize_weight(torch.cat(half), scale_2)
    scales = scale_2.repeat(3)
    expected = ops.linear(x, *whole[:2], scales, list(sizes), None, "reference")
    actual = [
        training.linear(x, part, shared_with=[p for p in parts if p is not part]) for part in parts
    ]
    same(torch.cat(actual, dim=1), expected)
    alone = training.linear(x, parts[0])
    assert not torch.equal(alone, actual[0])


def test_dense_gradients_and_shapes():
    (weight,), bias = parts_of((32,), 64), rows_of(1, 32, torch.float32)[0]
    x = rows_of(12, 64, torch.float32).view(3, 4, 64)
    upstream = rows_of(12, 32, torch.float32).view(3, 4, 32)
    values = {"x": x, "weight": weight, "bias": bias}
    inputs = leaves(values, names=values)
    output = training.linear(**inputs)
    assert output.shape == (3, 4, 32)
    output.backward(upstream)
    exact = leaves(values, torch.float64, names=values)
    F.linear(*exact.values()).backward(upstream.double())
    actual = {name: value.grad for name, value in inputs.items()}
    # The bias is rounded to the checkpoint's dtype, and so is its gradient on the way back.
    assert_close(actual, {name: value.grad for name, value in exact.items()}, 2**-8)
    only_x = leaves(values, names=("x",))
    training.linear(**only_x).backward(upstream)
    assert only_x["weight"].grad is None
    same(only_x["x"].grad, inputs["x"].grad)


def test_dense_edges():
    (weight,) = parts_of((32,), 64)
    assert training.linear(rows_of(0, 64), weight).shape == (0, 32)
    assert not training.linear(torch.zeros(2, 64, dtype=torch.bfloat16), weight).any()
    assert not training.linear(rows_of(2, 64), torch.zeros(32, 64)).any()
    sibling = weight.clone()
    sibling[3, 5] = torch.inf
    with pytest.raises(ValueError, match=r"1 NaN or infinite values, the first at \(3, 5\)"):
        training.linear(rows_of(2, 64), weight, shared_with=[sibling])
