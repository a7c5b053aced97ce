"""Real vLLM models in this process: configuration, loader, processing, reload; no engine.

Much faster than an engine (about a second), so that many checkpoints and failures can be tried;
what needs schedulers and processes is tested with `LLM` and over HTTP.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cases import EXPERTS, HIDDEN, Tensors, read_tensors

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def engine_config(model: Path | str, **arguments: Any) -> Any:
    """The engine's configuration, as `vllm serve` makes it: where a start fails first."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {
        "quantization": "nvfp4_per_token",
        "enforce_eager": True,
        "max_model_len": 128,
        "gpu_memory_utilization": 0.3,
    }
    return EngineArgs(model=str(model), **{**defaults, **arguments}).create_engine_config()


@contextmanager
def worker(model: Path | str, **arguments: Any) -> Iterator[Any]:
    """What a worker has before it makes a model; yields vllm_config."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()  # as the CPU worker does: there is no accelerator to empty
    config = engine_config(model, **arguments)
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{tempfile.mkdtemp()}/rendezvous",
            backend="gloo",
        )
        initialize_model_parallel(1, 1)
        try:
            with torch.no_grad():
                yield config
        finally:
            cleanup_dist_env_and_memory()


@contextmanager
def loaded_model(model: Path | str, **arguments: Any) -> Iterator[Any]:
    """The model as a worker loads it; yields (vllm_config, model)."""
    from vllm.model_executor.model_loader import get_model

    with worker(model, **arguments) as config:
        yield config, get_model(vllm_config=config)


def moe_layers(model: Any) -> list[Any]:
    """The layers that hold experts, in order."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def moe_inputs(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of magnitudes from 1e-3 to 1e3, weights and ids that reach every expert."""
    generator = torch.Generator().manual_seed(7)
    magnitude = torch.logspace(-3, 3, rows)[:, None]
    hidden = (torch.randn(rows, HIDDEN, generator=generator) * magnitude).bfloat16()
    weights = torch.rand(rows, 2, generator=generator)
    first = torch.arange(rows) % EXPERTS
    ids = torch.stack([first, (first + 3) % EXPERTS], dim=1).int()
    return hidden, weights, ids


def run_moe(
    config: Any, layer: Any, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """What a layer's experts make of rows that are already routed."""
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config):
        return layer.quant_method.apply(layer, hidden.clone(), weights, ids, None, None).clone()


def parameters_of(model: Any) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def outputs_of(config: Any, model: Any) -> Tensors:
    """Outputs of every MoE layer and every linear one.

    Parameters alone would not do: vLLM's BF16 linears on CPU keep theirs in another library's
    memory, with an empty parameter in its place.
    """
    from vllm.model_executor.layers.linear import LinearBase

    outputs = {}
    for index, layer in enumerate(moe_layers(model)):
        outputs[f"moe {index}"] = run_moe(config, layer, *moe_inputs())
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            rows = torch.randn(
                4, module.input_size, generator=torch.Generator().manual_seed(1)
            ).bfloat16()
            result = module(rows)
            outputs[name] = (result[0] if isinstance(result, tuple) else result).clone()
    return outputs


def snapshot(config: Any, model: Any) -> Tensors:
    """Copies of all that a reload or another checkpoint may change: parameters and outputs."""
    return {**parameters_of(model), **outputs_of(config, model)}


@contextmanager
def engine(model: Path | str, log: Path | None = None, **arguments: Any) -> Iterator[Any]:
    """A real `LLM` with its processes, whose output goes to the file `log`; gone at the end."""
    from vllm import LLM

    # Functions are sent to the workers, which vLLM wants to be allowed explicitly.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    defaults = {
        "quantization": "nvfp4_per_token",
        "enforce_eager": True,
        "max_model_len": 128,
        "gpu_memory_utilization": 0.3,
        "disable_log_stats": True,
    }
    with output_to(log or Path(os.devnull)):
        llm = LLM(model=str(model), **{**defaults, **arguments})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def output_to(file: Path) -> Iterator[None]:
    """Processes that are started in the block write to `file`, for as long as they live."""
    saved = os.dup(1), os.dup(2)
    with file.open("ab") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    try:
        yield
    finally:
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


PROMPTS = [f"the quick brown fox {i} jumps over " + "the lazy dog " * i for i in range(8)]


def answers(llm: Any, prompts: list[str] | None = None) -> list[Any]:
    """Greedy tokens of each prompt, and the bits of the logprobs of prompt and answer.

    One prompt at a time: together, which of them share a step depends on the machine's load, and
    the sums of vLLM's BF16 layers depend on that.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, logprobs=5, prompt_logprobs=1
    )
    results = []
    for prompt in prompts or PROMPTS:
        (output,) = llm.generate([prompt], parameters, use_tqdm=False)
        answer = output.outputs[0]
        logprobs = [
            {token: entry.logprob.hex() for token, entry in position.items()}
            for position in (*output.prompt_logprobs[1:], *answer.logprobs)
        ]
        results.append((list(answer.token_ids), logprobs))
    return results


def reload(llm: Any, path: Path | str) -> None:
    """New weights through the engine's own door, as the documentation has it."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    llm.reset_prefix_cache()


def reload_tensors(llm: Any, path: Path) -> None:
    """The same from tensors: read in the workers, as vLLM's RPC carries none to them."""
    llm.collective_rpc(_reload_tensors, args=(str(path),))
    llm.reset_prefix_cache()


def _reload_tensors(worker: Any, path: str) -> None:
    worker.reload_weights(weights_iterator=iter(read_tensors(Path(path)).items()))
