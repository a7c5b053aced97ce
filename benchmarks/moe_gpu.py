"""One NVFP4 MoE layer on this GPU: our Triton experts beside vLLM's, in one process.

    python benchmarks/moe_gpu.py [--shape qwen3-30b-a3b] [--tokens 1 8 …] [--no-peers] [--stack]

Times are medians of a layer in a CUDA graph over eight routings, so that no cache holds an expert
until its next turn. Floors: bytes of the touched experts over the copy bandwidth measured here, and
FLOPs over the rate of a large BF16 matrix product measured here. Peers, if vLLM with CUDA is
installed: its BF16 Triton experts, its NVFP4 emulation (static scales), and Marlin (weights only).
"""

import argparse
import json

import torch
from tune_triton import SHAPES, SILU, TOKENS, graph_time

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts import reference
from vllm_nvfp4_pertoken.experts import triton as experts_triton
from vllm_nvfp4_pertoken.experts.reference import ExpertWeights

ROUTINGS = 8


def make_weights(experts: int, hidden: int, inter: int) -> ExpertWeights:
    def quantize(*shape):
        parts = [
            nvfp4.quantize_weight(torch.randn(*shape, device="cuda") * shape[-1] ** -0.5)
            for _ in range(experts)
        ]
        return (torch.stack([getattr(p, name) for p in parts]) for name in parts[0]._fields)

    w13, w13_scale, w13_scale_2 = quantize(2 * inter, hidden)
    w2, w2_scale, w2_scale_2 = quantize(hidden, inter)
    return ExpertWeights(
        w13, w13_scale, w13_scale_2[:, None].repeat(1, 2), w2, w2_scale, w2_scale_2
    )


def route(tokens: int, experts: int, top_k: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts; skewed: half of the tokens take theirs among the first four (and top_k)."""
    score = torch.rand(tokens, experts, device="cuda")
    if skewed:
        score[: tokens // 2, : max(4, top_k)] += 1
    ids = score.topk(top_k, dim=-1).indices.int()
    return torch.full((tokens, top_k), 1 / top_k, device="cuda"), ids.contiguous()


def ours(weights: ExpertWeights):
    packed = experts_triton.pack(weights, SILU)
    return lambda x, w, ids: experts_triton.moe_forward(x, w, ids, packed, SILU)


def bf16(weights: ExpertWeights):
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13 = dequantize(weights.w13, weights.w13_scale, weights.w13_scale_2[:, 0])
    w2 = dequantize(weights.w2, weights.w2_scale, weights.w2_scale_2)
    return lambda x, w, ids: fused_experts(x, w13, w2, w, ids)


def dequantize(codes, scale, scale_2) -> torch.Tensor:
    return torch.stack(
        [nvfp4.dequantize(c, s, t, torch.bfloat16) for c, s, t in zip(codes, scale, scale_2)]  # noqa: B905
    )


def marlin(weights: ExpertWeights):
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_nvfp4_moe_layer_for_marlin,
    )
    from vllm.scalar_type import scalar_types

    experts, rows13, half = weights.w13.shape
    layer = SimpleNamespace(
        num_experts=experts,
        hidden_size=half * 2,
        intermediate_size_per_partition=rows13 // 2,
        params_dtype=torch.bfloat16,
    )
    w13, s13, g13, w2, s2, g2 = prepare_nvfp4_moe_layer_for_marlin(
        layer,
        weights.w13,
        weights.w13_scale,
        weights.w13_scale_2[:, 0].contiguous(),
        weights.w2,
        weights.w2_scale,
        weights.w2_scale_2,
        True,
    )
    return lambda x, w, ids: fused_marlin_moe(
        x, w13, w2, None, None, s13, s2, w, ids, scalar_types.float4_e2m1f.id,
        global_num_experts=experts, global_scale1=g13, global_scale2=g2, workspace=layer.workspace,
    )  # fmt: skip


def emulation(weights: ExpertWeights):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
        nvfp4_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.experts.nvfp4_emulation_moe import (
        Nvfp4QuantizationEmulationTritonExperts,
    )

    experts, rows13, half = weights.w13.shape
    config = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=8,
        hidden_dim=half * 2,
        intermediate_size=rows13 // 2,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    one = torch.tensor(1.0, device="cuda")
    kernel = Nvfp4QuantizationEmulationTritonExperts(
        config,
        nvfp4_moe_quant_config(
            weights.w13_scale_2[:, 0].contiguous(), weights.w2_scale_2, one, one,
            weights.w13_scale, weights.w2_scale, is_scale_swizzled=False,
        ),
    )  # fmt: skip

    def run(x, w, ids):
        tokens, hidden = x.shape
        first, second, _ = kernel.workspace_shapes(
            tokens, rows13, hidden, ids.shape[1], experts, experts, None, MoEActivation.SILU
        )
        out = torch.empty_like(x)
        kernel.apply(
            out, x, weights.w13, weights.w2, w, ids, MoEActivation.SILU, experts, None, None, None,
            x.new_empty(first), x.new_empty(second), None, False,
        )  # fmt: skip
        return out

    return run


def ceilings() -> tuple[float, float]:
    """Bytes per second of a copy, read and written; FLOPs per second of a BF16 matrix product."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    copy = graph_time([lambda: other.copy_(big)] * 4)
    product = graph_time([lambda: torch.mm(a, a.T)] * 4)
    return 2 * big.numel() / copy, 2 * 8192**3 / product


def quantizer(bandwidth: float) -> None:
    print("\nrow quantizer: bytes read and written over time, of the copy's")
    for rows, k in ((4096, 2048), (8192, 2048), (32768, 2048), (65536, 768), (8192, 7168)):
        xs = [torch.randn(rows, k, device="cuda").bfloat16() for _ in range(8)]
        seconds = graph_time([lambda x=x: experts_triton.quantize_rows(x) for x in xs])
        moved = rows * (4 * k + 4)
        print(f"{rows:6d} x {k:5d}: {seconds * 1e6:7.1f} us, {moved / seconds / bandwidth:.2f}")


def stack(shape: str, layers: int = 48) -> None:
    """One decode step of ``layers`` MoE layers, one after the other, in one CUDA graph."""
    experts, hidden, inter, top_k = SHAPES[shape]
    one = make_weights(experts, hidden, inter)
    all_layers = [ours(one) for _ in range(layers)]
    print(f"\n{layers} layers in one CUDA graph, ours")
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        routes = [route(tokens, experts, top_k, False) for _ in range(layers)]

        def step(x=x, routes=routes):
            for layer, routing in zip(all_layers, routes, strict=True):
                x = layer(x, *routing)
            return x

        seconds = graph_time([step])
        print(f"M={tokens:3d}: {seconds * 1e6:8.1f} us, {seconds / layers * 1e6:6.1f} us a layer")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--no-peers", action="store_true", help="ours and the floors only")
    parser.add_argument("--stack", action="store_true", help="also a decode step of 48 layers")
    args = parser.parse_args()
    experts, hidden, inter, top_k = SHAPES[args.shape]
    torch.manual_seed(0)
    weights = make_weights(experts, hidden, inter)
    makers = {"ours": ours}
    if not args.no_peers:
        makers |= {"bf16": bf16, "emulation": emulation, "marlin": marlin}
    variants = {name: make(weights) for name, make in makers.items()}
    bandwidth, flops = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.shape}")
    print(f"copy {bandwidth / 1e12:.2f} TB/s, BF16 8192^3 {flops / 1e12:.0f} TFLOP/s")

    x = torch.randn(64, hidden, device="cuda").bfloat16()
    routing = route(64, experts, top_k, False)
    expected = reference.moe_forward(x, *routing, weights, SILU).float()
    for name, run in variants.items():
        error = (run(x, *routing).float() - expected).norm() / expected.norm()
        print(f"{name}: relative difference from the reference {error.item():.2g}")

    results = []
    header = "".join(f"{name:>12}" for name in variants)
    print(
        f"\n{'us':>14}{'bytes':>9}{'FLOPs':>9}{header}   ours/marlin ours/bf16 ours/emul. of peak"
    )
    for tokens in args.tokens:
        for skewed in (False, True) if tokens >= 256 else (False,):
            x = torch.randn(tokens, hidden, device="cuda").bfloat16()
            routes = [route(tokens, experts, top_k, skewed) for _ in range(ROUTINGS)]
            touched = sum(len(ids.unique()) for _, ids in routes) / ROUTINGS
            per_expert = 3 * hidden * inter * 9 / 16
            work = 6 * tokens * top_k * hidden * inter
            row = {"tokens": tokens, "skewed": skewed}
            row["bytes"] = touched * per_expert / bandwidth
            row["flops"] = work / flops
            for name, run in variants.items():
                row[name] = graph_time([lambda r=r, run=run, x=x: run(x, *r) for r in routes])
            results.append(row)
            cells = "".join(f"{row[name] * 1e6:12.1f}" for name in variants)
            ratios = "".join(
                f"{row['ours'] / row[name]:11.2f}"
                for name in ("marlin", "bf16", "emulation")
                if name in row
            )
            kind = "skew" if skewed else ""
            print(
                f"M={tokens:5d} {kind:>5}{row['bytes'] * 1e6:11.1f}{row['flops'] * 1e6:9.1f}{cells}"
                f"{ratios}{row['flops'] / row['ours']:9.2f}"
            )
    quantizer(bandwidth)
    if args.stack:
        stack(args.shape)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
