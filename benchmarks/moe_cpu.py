"""One NVFP4 per-token MoE layer on this CPU: our kernel, the torch reference, vLLM's BF16 layer.

    python benchmarks/moe_cpu.py [--shape smollm2x8 qwen3-30b-a3b] [--tokens 1 8 64 512 2048]

Times are medians per layer, over several layers with weights of their own, so that no cache holds
a layer until its next turn; the variants take turns within a round. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time

import torch

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts import cpu, reference

# name: experts, hidden size, intermediate size, top_k, layers in rotation
SHAPES = {"smollm2x8": (8, 576, 1536, 2, 10), "qwen3-30b-a3b": (128, 2048, 768, 8, 2)}


def bf16_layers(layers, experts, hidden, inter):
    """vLLM's own BF16 MoE for CPUs, as functions of (x, weights, ids); None without vLLM."""
    try:
        from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
    except ImportError:
        return None
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    w13 = torch.randn(experts, 2 * inter, hidden).mul_(0.05).bfloat16()
    w2 = torch.randn(experts, hidden, inter).mul_(0.05).bfloat16()
    w13, w2 = cpu_prepack_moe_weight(w13, isa), cpu_prepack_moe_weight(w2, isa)

    def layer(a, b):
        def run(x, weights, ids):
            out = torch.empty_like(x)
            cpu_fused_moe(out, x, a, b, None, None, weights, ids, "silu", isa, False)

        return run

    return [layer(w13.clone(), w2.clone()) for _ in range(layers)]


def nvfp4_weights(experts, hidden, inter):
    w13 = nvfp4.quantize_weight(torch.randn(experts, 2 * inter, hidden) * 0.05)
    w2 = nvfp4.quantize_weight(torch.randn(experts, hidden, inter) * 0.05)
    scale_2 = torch.full((experts, 2), 1e-4)
    return reference.ExpertWeights(*w13[:2], scale_2, *w2[:2], scale_2[:, 0].contiguous())


def measure(variants, tokens, experts, hidden, top_k, seconds):
    """Median seconds per layer of each variant."""
    x = torch.randn(tokens, hidden).bfloat16()
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    weights = torch.full((tokens, top_k), 1 / top_k)
    times = {name: [] for name in variants}
    start = time.perf_counter()
    while len(next(iter(times.values()))) < 4 or time.perf_counter() - start < seconds:
        for name, layers in variants.items():
            if name == "reference" and len(times[name]) >= 2:  # slow
                continue
            begin = time.perf_counter()
            for layer in layers:
                layer(x, weights, ids)
            times[name].append((time.perf_counter() - begin) / len(layers))
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="*", default=["smollm2x8"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 512, 2048])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", nargs="*", default=[], choices=cpu.ISAS, help="others to time too")
    parser.add_argument("--seconds", type=float, default=3.0, help="per row of the table")
    parser.add_argument("--no-reference", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ok, reason = cpu.available()
    if not ok:
        raise SystemExit(reason)
    print(f"{reason}, {args.threads} threads, torch {torch.__version__}")
    activation = reference.Activation("silu")
    results = []
    for shape in args.shape:
        experts, hidden, inter, top_k, layers = SHAPES[shape]
        print(f"\n{shape}: {experts} experts, hidden {hidden}, intermediate {inter}, top-{top_k}")
        plain = nvfp4_weights(experts, hidden, inter)
        packed = [
            reference.ExpertWeights(*(None if t is None else t.clone() for t in w))
            for w in [cpu.pack(plain, activation)] * layers
        ]

        def kernel(w, isa):
            return lambda x, weights, ids: cpu.moe_forward(x, weights, ids, w, activation, isa=isa)

        variants = {"nvfp4": [kernel(w, None) for w in packed]}
        bf16 = bf16_layers(layers, experts, hidden, inter)
        if bf16 is not None:
            variants["bf16 (vLLM)"] = bf16
        for isa in args.isa:
            variants[isa] = [kernel(w, isa) for w in packed]
        if not args.no_reference:
            variants["reference"] = [
                lambda x, weights, ids, plain=plain: reference.moe_forward(
                    x, weights, ids, plain, activation
                )
            ]
        print(
            f"{'tokens':>8}"
            + "".join(f"{name + ', us':>18}" for name in variants)
            + f"{'GFLOP/s':>10}"
            + "".join(f"{'x ' + n:>14}" for n in list(variants)[1:])
        )
        for tokens in args.tokens:
            t = measure(variants, tokens, experts, hidden, top_k, args.seconds)
            flops = tokens * top_k * 3 * hidden * inter * 2 / t["nvfp4"] / 1e9
            print(
                f"{tokens:>8}"
                + "".join(f"{v * 1e6:>18.0f}" for v in t.values())
                + f"{flops:>10.0f}"
                + "".join(f"{t['nvfp4'] / v:>14.2f}" for v in list(t.values())[1:])
            )
            results.append({"shape": shape, "tokens": tokens} | t)
    print(json.dumps({"threads": args.threads, "kernel": reason, "seconds": results}))


if __name__ == "__main__":
    main()
