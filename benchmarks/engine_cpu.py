"""The same model in BF16 and in per-token NVFP4, under the same vLLM on the same CPU.

    python benchmarks/engine_cpu.py [--bf16 DIR --nvfp4 DIR] [--rounds 2]

Without arguments it builds SmolLM2 as a mixture of experts (eight experts, top-2) as the demo does.
Every round starts one engine after the other, so that both see the same machine; medians over all
rounds and repeats are printed with their ratios, and as JSON on the last line.

Decode: tokens per second beyond the first, from the difference of a long and a short generation.
Prefill: prompt tokens per second of one prompt with one token of output, no prefix cache.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

PREFILL = (128, 512, 1500)
BARS = {"decode, batch 1": 0.5, "decode, batch 8": 0.6, "prefill": 0.8}


def measure(model: str, quantization: str | None) -> dict[str, list[float]]:
    """Figures of one engine, in this process and its children."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to ask the worker for its memory
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(
        model,
        quantization=quantization,
        enforce_eager=True,
        max_model_len=2048,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
    )
    figures: dict[str, list[float]] = {"load, s": [time.perf_counter() - start]}
    rng = random.Random(0)

    def run(batch: int, prompt: int, output: int) -> float:
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, 40000) for _ in range(prompt)]}
            for _ in range(batch)
        ]
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    run(1, 16, 4)
    run(8, 16, 4)
    for _ in range(3):
        for batch, output in ((1, 48), (8, 32)):
            seconds = run(batch, 16, 2 + output) - run(batch, 16, 2)
            figures.setdefault(f"decode, batch {batch}, tokens/s", []).append(
                batch * output / seconds
            )
        for prompt in PREFILL:
            figures.setdefault(f"prefill, {prompt} tokens, tokens/s", []).append(
                prompt / run(1, prompt, 1)
            )
    experts, resident = llm.collective_rpc(_memory)[0]
    figures["experts' parameters, MB"] = [experts / 1e6]
    figures["worker's resident memory, MB"] = [resident / 1e6]
    return figures


def _memory(worker) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    import psutil

    experts = sum(
        parameter.nbytes
        for name, parameter in worker.model_runner.model.named_parameters()
        if ".routed_experts." in name or ".experts." in name
    )
    return experts, psutil.Process().memory_info().rss


def expert_bytes(model: Path) -> int:
    """Bytes of the experts' tensors in the checkpoint's files."""
    from vllm_nvfp4_pertoken.checkpoints.verify import verify_checkpoint

    return verify_checkpoint(model).expert_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bf16", type=Path, help="the BF16 checkpoint")
    parser.add_argument("--nvfp4", type=Path, help="the NVFP4 checkpoint of the same model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        model, quantization = args.child
        print(json.dumps(measure(model, quantization or None)))
        return
    if not (args.bf16 and args.nvfp4):
        from vllm_nvfp4_pertoken.demo import cached_models

        models = cached_models("e8k2")
        args.bf16, args.nvfp4 = models.bf16, models.nvfp4

    engines = {"BF16": (args.bf16, ""), "per-token NVFP4": (args.nvfp4, "nvfp4_per_token")}
    all_figures: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for round_ in range(args.rounds):
        for name, (model, quantization) in engines.items():
            print(f"round {round_ + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            out = subprocess.run(
                [sys.executable, __file__, "--child", str(model), quantization],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            for figure, values in json.loads(out.splitlines()[-1]).items():
                all_figures[name].setdefault(figure, []).extend(values)

    medians = {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in all_figures.items()
    }
    print(f"{'':36}{'BF16':>12}{'NVFP4':>12}{'ratio':>8}  bar")
    for figure, bf16 in medians["BF16"].items():
        nvfp4 = medians["per-token NVFP4"][figure]
        bar = next((f">= {b}" for prefix, b in BARS.items() if figure.startswith(prefix)), "")
        print(f"{figure:36}{bf16:12.1f}{nvfp4:12.1f}{nvfp4 / bf16:8.2f}  {bar}")
    on_disk = expert_bytes(args.nvfp4) / 1e6
    in_memory = medians["per-token NVFP4"]["experts' parameters, MB"]
    print(f"NVFP4 experts: {on_disk:.1f} MB on disk, {in_memory / on_disk:.3f}x of it in memory")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
