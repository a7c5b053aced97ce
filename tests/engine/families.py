"""Tiny random models of many families, and Hugging Face's forward with our numbers in it.

A family's model is made from its configuration alone and saved by transformers, so tensors have
their real names. `reference_logprobs` runs transformers' own code for it, in which every layer that
the converted checkpoint holds in NVFP4 computes what the torch reference defines.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import Tensors, bits, read_tensors
from torch import nn

from vllm_nvfp4_pertoken import nvfp4
from vllm_nvfp4_pertoken.experts.linear import linear_forward
from vllm_nvfp4_pertoken.experts.reference import Activation, ExpertWeights, moe_forward

VOCABULARY, EXPERTS = 256, 8
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough for every layer to matter beside the residual: 1 / sqrt(fan in).
    "initializer_range": 0.09,
}

# What some of them share.
_SMALL = {"intermediate_size": 128, "moe_intermediate_size": 64}
_ROUTED = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 16.0,  # as DeepSeek-V2; makes experts matter beside the rest
}
_SCORES = {"scoring_func": "sigmoid"}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # these two: what the engine's CPU kernel knows
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 2,
    "topk_group": 1,
}
_DELTA_NET = {
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}

# The configuration of each family. Extra keys are in real checkpoints' config.json, for the engine.
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_COMMON, **_SMALL, num_experts=EXPERTS),
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON, intermediate_size=64, num_local_experts=EXPERTS, sliding_window=None
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_COMMON, **_SMALL, **_DELTA_NET, num_experts=EXPERTS
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **{**_COMMON, **_MLA},
        **_SMALL,
        **_ROUTED,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_COMMON, **_MLA},
        **_SMALL,
        **_ROUTED,
        **_SCORES,
        q_lora_rank=64,
        topk_method="noaux_tc",
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_COMMON, **_SMALL, **_ROUTED, n_group=1, topk_group=1
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **_COMMON,
        **_SCORES,
        intermediate_size=64,
        num_local_experts=EXPERTS,
        rotary_dim=16,
        use_routing_bias=True,
    ),
}

# Linears that tensor parallelism cuts along their inputs: each rank quantizes its part of a row.
_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")


def make_model(family: str, directory: Path) -> Path:
    """A random BF16 model, as transformers saves it."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.ndim == 1 and "inv_freq" not in name:  # norms, biases: not all alike
                parameter += 0.1 * torch.randn_like(parameter)
    model.bfloat16().save_pretrained(directory)
    return directory


def make_prompts(count: int = 8, length: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (count, length), generator=generator).tolist()


def load(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()


def quantized(source: Path, converted: Path, ranks: int = 1, *, swap: bool = False) -> Any:
    """The model of `source` whose layers that are NVFP4 in `converted` compute as we define it.

    Layers find their tensors by content: the name in `source` of the very weights that
    transformers loaded is the name in `converted`. With `swap`, gate and up of every expert change
    places: what a wrong loader might do.
    """
    model = load(source)
    names = {_key(tensor): name for name, tensor in read_tensors(source).items()}
    tensors = read_tensors(converted)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            weight = names[_key(module.weight)]
            if tensors[weight].dtype == torch.uint8:
                parts = ranks if name.endswith(_ROW_PARALLEL) else 1
                module.forward = _Linear(module, _weight(tensors, weight, module.weight), parts)
        elif hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Parameter):
            module.forward = _Experts(module, names, tensors, ranks, swap)
    return model


def _key(tensor: torch.Tensor) -> bytes:
    return bits(tensor).numpy().tobytes()


def _weight(
    tensors: Tensors, name: str, original: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales and second scale; close to what they were made from."""
    parts = tensors[name], tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
    error = nvfp4.dequantize(*parts).float() - original.float()
    assert error.norm() < 0.12 * original.float().norm(), name
    return parts


class _Linear:
    def __init__(self, module: nn.Linear, weight: tuple[torch.Tensor, ...], parts: int) -> None:
        codes, scale, scale_2 = weight
        self.bias = module.bias
        self.parts = list(
            zip(
                codes.chunk(parts, 1),
                scale.chunk(parts, 1),
                [scale_2.reshape(1)] * parts,
                strict=True,
            )
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).chunk(len(self.parts), 1)
        out = sum(
            linear_forward(part.contiguous(), *weight, [len(weight[0])])
            for part, weight in zip(rows, self.parts, strict=True)
        )
        out = out.reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class _Experts:
    """transformers' fused experts; each rank's share of them is a layer of its own."""

    def __init__(
        self,
        module: nn.Module,
        names: dict[bytes, str],
        tensors: Tensors,
        ranks: int,
        swap: bool,
    ) -> None:
        self.activation = Activation("silu")

        def expert(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return _weight(tensors, names[_key(matrix)], matrix)

        both = [
            [expert(half) for half in matrix.chunk(2)][:: -1 if swap else 1]
            for matrix in module.gate_up_proj.detach()
        ]
        down = [expert(matrix) for matrix in module.down_proj.detach()]
        whole = ExpertWeights(
            w13=torch.stack([torch.cat([g[0], u[0]]) for g, u in both]),
            w13_scale=torch.stack([torch.cat([g[1], u[1]]) for g, u in both]),
            w13_scale_2=torch.stack([torch.stack([g[2], u[2]]) for g, u in both]),
            w2=torch.stack([d[0] for d in down]),
            w2_scale=torch.stack([d[1] for d in down]),
            w2_scale_2=torch.stack([d[2] for d in down]),
        )
        self.shares = list(_shares(whole, ranks))

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        outputs = [moe_forward(rows, weights, ids, share, self.activation) for share in self.shares]
        return sum(outputs).reshape(hidden.shape)


def _shares(whole: ExpertWeights, ranks: int) -> Iterator[ExpertWeights]:
    """What each tensor-parallel rank holds: rows of gate and up, columns of down."""
    halves = whole.w13_scale_2.shape[1]

    def rows(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        parts = tensor.unflatten(1, (halves, ranks, -1))
        return parts[:, :, rank].flatten(1, 2)

    for rank in range(ranks):
        yield whole._replace(
            w13=rows(whole.w13, rank),
            w13_scale=rows(whole.w13_scale.view(torch.uint8), rank).view(torch.float8_e4m3fn),
            w2=whole.w2.chunk(ranks, 2)[rank],
            w2_scale=whole.w2_scale.chunk(ranks, 2)[rank],
        )


def rounded_differently(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook of an embedding: one value of eight moves by a unit in the last place."""
    moved = torch.rand(output.shape, generator=torch.Generator().manual_seed(9)) < 1 / 8
    return (output.view(torch.int16) + moved.short()).view(output.dtype)


def logprobs(model: Any, sequences: torch.Tensor) -> torch.Tensor:
    """[N, tokens] -> [N, tokens - 1, vocabulary]: distributions of all tokens but the first."""
    with torch.no_grad():
        return model(input_ids=sequences).logits[:, :-1].float().log_softmax(-1)


def divergence(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """KL(expected || actual) of every position: [N, tokens, vocabulary] -> [N, tokens]."""
    return (expected.exp() * (expected - actual)).sum(-1)


def engine_logprobs(
    model: str, ranks: int, log: str, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with the engine's greedy answers, and the `logprobs` of these sequences.

    For a process of its own, in which many models can be served after each other.
    """
    # Where vLLM reads them, the engine's core stays in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if ranks == 1 else "0|1"
    from harness import engine
    from vllm import SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    parameters = SamplingParams(
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        logprobs=VOCABULARY,
        prompt_logprobs=VOCABULARY,
        detokenize=False,
    )
    sequences, distributions = [], []
    try:
        with engine(
            model,
            Path(log),
            skip_tokenizer_init=True,
            max_logprobs=VOCABULARY,
            tensor_parallel_size=ranks,
            enable_prefix_caching=False,
            # vLLM's RoPE operator for CPUs is wrong for MLA's queries, its torch code is right.
            compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
        ) as llm:
            for prompt in prompts:
                (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
                answer = output.outputs[0]
                positions = [*output.prompt_logprobs[1:], *answer.logprobs]
                distributions.append(
                    [[entry[t].logprob for t in range(VOCABULARY)] for entry in positions]
                )
                sequences.append([*prompt, *answer.token_ids])
    finally:
        cleanup_dist_env_and_memory()
    return torch.tensor(sequences), torch.tensor(distributions)
