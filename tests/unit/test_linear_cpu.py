"""Dense layers on the compiled CPU kernel: the bits of the torch reference."""

import pytest
import torch
from torch.library import opcheck

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts import cpu, ops
from vllm_nvfp4_pertoken.experts.linear import linear_forward
from vllm_nvfp4_pertoken.experts.reference import gemm, weight_values

available, reason = cpu.available()
pytestmark = pytest.mark.skipif(not available, reason=reason)
ISAS = [name for name in cpu.ISAS if cpu.ISAS.index(name) <= cpu._load()[1]]


def layer(parts: list[int], k: int, seed: int = 0):
    """A dense layer whose parts have second scales of their own."""
    rng = torch.Generator().manual_seed(seed)
    weight = nvfp4.quantize_weight(torch.randn(sum(parts), k, generator=rng))
    scale_2 = weight.weight_scale_2 * (0.1 + torch.rand(len(parts), generator=rng))
    return weight.weight, weight.weight_scale, scale_2


def rows_of(count: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    rng = torch.Generator().manual_seed(count)
    magnitude = 10 ** (6 * torch.rand(count, 1, generator=rng) - 3)
    return (torch.randn(count, k, generator=rng) * magnitude).to(dtype)


def packed(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale = weight.clone(), scale.clone()
    cpu.pack_linear(weight, scale)
    return weight, scale


def assert_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize(
    ("parts", "k"), [([16], 16), ([64, 16, 32], 48), ([256, 128, 128], 256), ([176], 80)]
)
def test_bits_of_the_reference(parts, k, rows, isa):
    weight, scale, scale_2 = layer(parts, k)
    x = rows_of(rows, k, torch.bfloat16)
    expected = linear_forward(x, weight, scale, scale_2, parts)
    assert expected.abs().sum() > 0
    actual = cpu.linear_forward(x, *packed(weight, scale), scale_2, parts, isa=isa)
    assert_bits(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype):
    weight, scale, scale_2 = layer([32, 48], 64)
    x = rows_of(20, 64, dtype).clamp(-100, 100)
    expected = linear_forward(x, weight, scale, scale_2, [32, 48])
    assert_bits(cpu.linear_forward(x, *packed(weight, scale), scale_2, [32, 48]), expected)


def test_parts_keep_their_own_scales():
    """The second part's scale is another by a power of two, which is exact."""
    weight, scale, _ = layer([32, 32], 64)
    x = rows_of(9, 64, torch.float32)
    one = cpu.linear_forward(x, *packed(weight, scale), torch.tensor([1.0, 1.0]), [32, 32])
    two = cpu.linear_forward(x, *packed(weight, scale), torch.tensor([1.0, 4.0]), [32, 32])
    assert_bits(two[:, :32], one[:, :32])
    assert_bits(two[:, 32:], one[:, 32:] * 4)


def test_chunks_change_nothing(monkeypatch):
    weight, scale, scale_2 = layer([48], 64)
    x = rows_of(200, 64, torch.bfloat16)
    whole = cpu.linear_forward(x, *packed(weight, scale), scale_2, [48])
    monkeypatch.setattr(cpu, "_SCRATCH_LIMIT", 1)
    assert_bits(cpu.linear_forward(x, *packed(weight, scale), scale_2, [48]), whole)


def test_no_rows():
    weight, scale, scale_2 = layer([16], 32)
    empty = torch.empty(0, 32, dtype=torch.bfloat16)
    assert cpu.linear_forward(empty, *packed(weight, scale), scale_2, [16]).shape == (0, 16)


def test_parts_that_are_no_whole_strips_are_refused():
    weight, scale, scale_2 = layer([24, 24], 32)
    assert not cpu.can_pack_linear([24, 24])
    with pytest.raises(ValueError, match=r"parts \[24, 24\] and 32 columns must be multiples"):
        cpu.linear_forward(rows_of(1, 32, torch.bfloat16), weight, scale, scale_2, [24, 24])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_operator(backend):
    """Fake implementation and torch.compile: one opaque call without graph breaks."""
    weight, scale, scale_2 = layer([32, 16], 64)
    x = rows_of(5, 64, torch.bfloat16)
    if backend == "cpu":
        weight, scale = packed(weight, scale)
    arguments = (x, weight, scale, scale_2, [32, 16], None, backend)
    opcheck(ops.linear, arguments, test_utils=("test_faketensor",))
    compiled = torch.compile(lambda *args: ops.linear(*args) + 1, fullgraph=True, backend="eager")
    assert_bits(compiled(*arguments), ops.linear(*arguments) + 1)


def test_the_reference_is_one_gemm_per_part():
    weight, scale, scale_2 = layer([32, 16], 64)
    x = rows_of(5, 64, torch.bfloat16)
    values, row_scale = nvfp4.quantize_per_token_values(x)
    column_scale = scale_2.repeat_interleave(torch.tensor([32, 16]))
    expected = gemm(values, row_scale, weight_values(weight, scale), column_scale, None)
    assert_bits(linear_forward(x, weight, scale, scale_2, [32, 16]), expected.bfloat16())
