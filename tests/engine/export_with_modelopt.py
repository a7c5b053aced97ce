"""A script: quantize a tiny random Qwen3-MoE with ModelOpt on the CPU, and export it.

In a process of its own, because ModelOpt changes transformers' classes while it works.

Usage: export_with_modelopt.py (experts | all) DIRECTORY
"""

import copy
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 512


def main(what: str, target: str) -> None:
    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=2,
        max_position_embeddings=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    )
    # Saved and loaded, as a model from a hub is: the export needs what loading adds.
    base = f"{target}.bf16"
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(base)
    model = Qwen3MoeForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()

    def calibrate(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _ in range(2):
                ids = torch.randint(4, VOCABULARY, (2, 32), generator=generator)
                model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)

    recipe = {"experts": mtq.NVFP4_EXPERTS_ONLY_CFG, "all": mtq.NVFP4_DEFAULT_CFG}[what]
    model = mtq.quantize(model, copy.deepcopy(recipe), calibrate)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=target)


if __name__ == "__main__":
    main(*sys.argv[1:])
