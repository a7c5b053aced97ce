"""Measure tile sizes of the Triton GEMMs on this GPU and print the table for triton_configs.py.

    python benchmarks/tune_triton.py [--shape qwen3-30b-a3b …] [--tokens 1 8 64 …] [--json out.json]

Every candidate is compiled beforehand, in all cores. A time is that of one GEMM in a CUDA graph
over eight routings, so that weights come from memory and not from the L2 cache.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics

import torch

from vllm_nvfp4_pertoken.experts import triton as experts_triton
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights
from vllm_nvfp4_pertoken.experts.triton_configs import Config

SILU = Activation("silu")
# name: experts, hidden size, intermediate size, top_k
SHAPES = {
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "qwen3-235b-a22b": (128, 4096, 1536, 8),
    "deepseek-v3": (256, 7168, 2048, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}
TOKENS = (1, 8, 32, 64, 256, 1024, 4096, 8192)


def candidates(rows_per_expert: float) -> list[Config]:
    if rows_per_expert < 1:
        grid = [
            Config(8, bn, bk, warps, stages)
            for bn, bk, warps in (
                (32, 256, 2), (32, 512, 2), (32, 256, 4), (32, 512, 4), (64, 128, 4),
                (64, 256, 4), (64, 512, 4), (128, 128, 4), (128, 256, 4),
            )
            for stages in (2, 3, 4)
        ]  # fmt: skip
    elif rows_per_expert < 8:
        grid = [
            Config(bm, bn, bk, warps, stages)
            for bm in (8, 16)
            for bn, bk, warps in ((64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 256, 4))
            for stages in (3, 4)
        ]
    elif rows_per_expert < 32:
        grid = [
            Config(bm, bn, bk, warps, 3, half)
            for bm, half in ((16, False), (32, False), (32, True), (64, True))
            for bn, bk, warps in (
                (64, 128, 4), (128, 128, 4), (128, 256, 4), (128, 128, 8), (256, 128, 8),
            )
        ]  # fmt: skip
    else:
        grid = [
            Config(bm, bn, bk, warps, stages, half)
            for bm, half in ((64, False), (128, False), (128, True))
            for bn, bk, warps in (
                (128, 64, 4), (128, 128, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8),
                (256, 128, 8),
            )
            for stages in (2, 3, 4)
        ] + [Config(256, 128, 64, 8, s, True) for s in (2, 3)]  # fmt: skip
    return grid


class Case:
    """One layer: weights of all experts, and routed inputs."""

    def __init__(self, shape: str, device: str = "cuda") -> None:
        self.experts, self.hidden, self.inter, self.top_k = SHAPES[shape]
        e, h, i = self.experts, self.hidden, self.inter

        def bytes_(*size):
            return torch.randint(0, 256, size, dtype=torch.uint8, device=device)

        def scales(*size):  # E5M3 bytes of ordinary block scales
            raw = torch.randint(64, 128, size, dtype=torch.uint8, device=device)
            return raw.view(torch.float8_e4m3fn)

        self.weights = ExpertWeights(
            bytes_(e, 2 * i, h // 2), scales(e, 2 * i, h // 16),
            torch.full((e, 2), 1e-4, device=device),
            bytes_(e, h, i // 2), scales(e, h, i // 16),
            torch.full((e,), 1e-4, device=device),
        )  # fmt: skip

    def routings(self, tokens: int, count: int) -> list[torch.Tensor]:
        score = torch.rand(count, tokens, self.experts, device="cuda")
        return list(score.topk(self.top_k, dim=-1).indices.int().contiguous())

    def gemms(self, tokens: int, which: int, config: Config, count: int = 8):
        """Functions that run FC1 (0) or FC2 (1) once, each with its own routing."""
        k = self.hidden if which == 0 else self.inter
        entries = tokens * self.top_k
        x = torch.randn(tokens if which == 0 else entries, k, device="cuda").bfloat16()
        values, row_scale = experts_triton.quantize_rows(x)
        width = self.inter if which == 0 else self.hidden
        out = torch.empty(entries, width, device="cuda", dtype=torch.bfloat16)
        w = self.weights
        args = (
            (w.w13, w.w13_scale, w.w13_scale_2) if which == 0 else (w.w2, w.w2_scale, w.w2_scale_2)
        )
        routes = [
            experts_triton._sort(ids, None, self.experts, (config, config), True)
            for ids in self.routings(tokens, count)
        ]

        def function(route):
            return lambda: experts_triton._gemm(
                values, row_scale, *args, None, out, route, which, config, SILU, k
            )

        return [function(route) for route in routes]


def graph_time(functions, repeats: int = 5) -> float:
    """Median seconds of one of ``functions``, which run one after the other in a CUDA graph."""
    functions[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(functions))
    return statistics.median(times[1:])


def _compile(job) -> None:
    shape, configs = job
    case = Case(shape)
    for which, tokens, config in configs:
        with contextlib.suppress(Exception):  # too large for this GPU: reported when measured
            case.gemms(tokens, which, config, count=1)[0]()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["qwen3-30b-a3b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--json", help="also write all times here")
    args = parser.parse_args()
    everything = []
    for shape in args.shape:
        experts, _, _, top_k = SHAPES[shape]
        jobs = [
            (which, tokens, config)
            for tokens in args.tokens
            for which in (0, 1)
            for config in candidates(tokens * top_k / experts)
        ]
        workers = min(14, os.cpu_count() or 1)
        kinds = {}
        for which, tokens, config in jobs:  # one of each kernel
            kinds.setdefault(
                (which, tokens * top_k * 4 <= experts, config), (which, tokens, config)
            )
        unique = list(kinds.values())
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(_compile, [(shape, unique[i::workers]) for i in range(workers)], chunksize=1)
        case = Case(shape)
        best = {}
        for which, tokens, config in jobs:
            try:
                seconds = graph_time(case.gemms(tokens, which, config))
            except Exception as error:  # does not fit: not a candidate
                print(f"{shape} FC{which + 1} M={tokens} {tuple(config)}: {type(error).__name__}")
                continue
            everything.append((shape, which, tokens, tuple(config), seconds))
            best.setdefault((which, tokens), []).append((seconds, config))
        for (which, tokens), found in sorted(best.items()):
            found.sort()
            for seconds, config in found[:6]:
                name = f"{shape} FC{which + 1} M={tokens:5d}"
                print(f"{name} {seconds * 1e6:8.1f} us {tuple(config)}")
        print(f"# {torch.cuda.get_device_name()}, {shape}")
        for which in (0, 1):
            n = (2 * case.inter, case.hidden)[which]
            k = (case.hidden, case.inter)[which]
            rows = []
            for i, tokens in enumerate(args.tokens):
                following = args.tokens[i + 1] if i + 1 < len(args.tokens) else None
                # Up to halfway (geometrically) to the next measured size.
                limit = (tokens * following) ** 0.5 * top_k / experts if following else "inf"
                rows.append(f"({limit}, Config{tuple(min(best[which, tokens])[1])})")
            print(f"({n}, {k}): ({', '.join(rows)}),")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(everything, file)


if __name__ == "__main__":
    main()
