"""Two ranks on the CPU: tensor parallel, which halves every expert, and expert parallel."""

import pytest
import torch
from cases import (
    EXPERTS,
    EXPERTS_ONLY,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    bits,
    expert_weights,
    make_case,
    other_weights,
    read_tensors,
)
from harness import answers, engine, moe_inputs, moe_layers, reload

from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights, moe_forward
from vllm_nvfp4_pertoken.testing import assert_rows_close

HALF = EXPERTS // 2
PARTS = ExpertWeights._fields[:6]


def shape_and_bytes(tensor: torch.Tensor) -> list:
    """A tensor for the engine's RPC, which would turn it into lists."""
    return [list(tensor.shape), bits(tensor).numpy().tobytes()]


def experts_of(worker) -> list:
    """Runs on a rank: each MoE layer's weights, back in checkpoint layout, and its expert map."""
    from vllm_nvfp4_pertoken.experts import cpu

    layers = []
    for layer in moe_layers(worker.model_runner.model):
        packed = ExpertWeights(
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_weight_scale_2,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_weight_scale_2,
        )
        assert layer.quant_method.experts.backend == "cpu"
        weights = cpu.unpack(packed, Activation("silu"))
        expert_map = layer.expert_map
        layers.append(
            [
                {part: shape_and_bytes(getattr(weights, part)) for part in PARTS},
                None if expert_map is None else expert_map.tolist(),
            ]
        )
    return layers


def half_of_each(weights: ExpertWeights, rank: int) -> ExpertWeights:
    """A tensor-parallel rank's share: half of the rows of gate and up, half of down's columns."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        shards = tensor.view(EXPERTS, 2, INTERMEDIATE, -1)
        half = INTERMEDIATE // 2
        return shards[:, :, rank * half : (rank + 1) * half].reshape(EXPERTS, INTERMEDIATE, -1)

    return weights._replace(
        w13=rows(weights.w13),
        w13_scale=rows(weights.w13_scale.view(torch.uint8)).view(torch.float8_e4m3fn),
        w2=weights.w2.chunk(2, dim=2)[rank],
        w2_scale=weights.w2_scale.chunk(2, dim=2)[rank],
    )


def half_of_the_experts(weights: ExpertWeights, rank: int) -> ExpertWeights:
    """An expert-parallel rank's share: the first or the last experts, whole."""
    mine = slice(rank * HALF, (rank + 1) * HALF)
    return ExpertWeights(*(None if part is None else part[mine] for part in weights))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
def test_two_ranks(expert_parallel, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    other = make_case(EXPERTS_ONLY, tmp_path / "other", edit=other_weights)
    share = half_of_the_experts if expert_parallel else half_of_each

    def assert_ranks_have(path) -> None:
        tensors = read_tensors(path)
        ranks = llm.collective_rpc(experts_of)
        assert len(ranks) == 2
        for rank, layers in enumerate(ranks):
            assert len(layers) == LAYERS
            for index, (actual, expert_map) in enumerate(layers):
                expected = share(expert_weights(tensors, index), rank)
                for part in PARTS:
                    assert actual[part] == shape_and_bytes(getattr(expected, part)), part
                if expert_parallel:
                    own = list(range(HALF))
                    elsewhere = [-1] * HALF
                    assert expert_map == (elsewhere + own if rank else own + elsewhere)

    log = tmp_path / "log"
    with engine(
        EXPERTS_ONLY, log, tensor_parallel_size=2, enable_expert_parallel=expert_parallel
    ) as llm:
        assert_ranks_have(EXPERTS_ONLY)
        before = answers(llm)
        assert answers(llm) == before
        reload(llm, other)
        assert_ranks_have(other)
        swapped = answers(llm)
        assert all(new != old for (_, new), (_, old) in zip(swapped, before, strict=True))
        reload(llm, EXPERTS_ONLY)
        assert answers(llm) == before
        # Last, because vLLM (issue 49972) reads the reply of one failed rank only, and takes the
        # other's for the reply to its next call.
        with pytest.raises(Exception, match=r"/nowhere is not a directory.*Nothing was changed"):
            reload(llm, "/nowhere")
        assert answers(llm) == before
    lines = [line for line in log.read_text().splitlines() if "nvfp4_per_token: " in line]
    assert lines
    assert all("2 MoE layers with per-token activation scales" in line for line in lines)


def test_halves_of_the_experts_add_up_to_the_whole():
    weights = expert_weights(read_tensors(EXPERTS_ONLY), 0)
    hidden, topk_weights, ids = moe_inputs(rows=32)
    # Some rows whose experts are all on one rank.
    ids[:4] = torch.tensor([[0, 3], [1, 2], [5, 4], [7, 6]])
    silu = Activation("silu")
    whole = moe_forward(hidden, topk_weights, ids, weights, silu)
    halves = []
    for rank in (0, 1):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[rank * HALF : (rank + 1) * HALF] = torch.arange(HALF, dtype=torch.int32)
        halves.append(
            moe_forward(
                hidden,
                topk_weights,
                ids,
                half_of_the_experts(weights, rank),
                silu,
                expert_map=expert_map,
            )
        )
    first, second = halves
    assert torch.equal(first[:2], whole[:2])
    assert torch.equal(second[2:4], whole[2:4])
    assert torch.count_nonzero(second[:2]) == torch.count_nonzero(first[2:4]) == 0
    assert whole.shape == (32, HIDDEN)
    # Each half, and the whole, is rounded to bfloat16 once: by half a unit, 2**-8 of its size, and
    # the fp32 sum of the whole's two slots by 2**-24.
    sizes = first.abs().double() + second.abs().double() + whole.abs().double()
    assert_rows_close(first.double() + second.double(), whole, sizes * (2.0**-8 + 2.0**-22))
