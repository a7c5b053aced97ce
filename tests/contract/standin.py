"""FlashInfer without its compiled kernels: they check what they are given, and compute in fp64.

Everything else is FlashInfer's: signatures, row permutations, the layout of scales. What the
launchers check (``csrc/trtllm_fused_moe_kernel_launcher.cu``) is checked, and what they only trust,
because they take raw pointers: dtype, shape and contiguity of scales.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from flashinfer.batch_invariant.quantization.nvfp4_reference import (
    swizzle_sf_128x4,
    unswizzle_sf_128x4,
)
from flashinfer.fused_moe.core import (
    _maybe_get_cached_w3_w1_permute_indices,
    get_w2_permute_indices_with_cache,
)
from flashinfer.tllm_enums import ActivationType, RoutingMethodType, SfLayout

from vllm_nvfp4_pertoken import nvfp4

EPILOGUE_TILE = 128
BASE_SCALE = 1.0 / (448.0 * 6.0)
E4M3 = torch.float8_e4m3fn


class ContractViolation(AssertionError):
    """A kernel was handed what it would compute garbage from, or crash on."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ContractViolation(what)


def require_tensor(name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    require(isinstance(tensor, torch.Tensor), f"{name} is {type(tensor).__name__}, not a tensor")
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}")
    require(tuple(tensor.shape) == shape, f"{name} is {tuple(tensor.shape)}, not {shape}")
    require(tensor.is_contiguous(), f"{name} is not contiguous: strides {tensor.stride()}")


class StandIn:
    """The kernels; counts their calls, so that a test can tell that they ran."""

    def __init__(self) -> None:
        import flashinfer
        import flashinfer.fused_moe

        self.calls: list[tuple[str, int]] = []
        # Of the installed version: an unknown or a missing argument fails as it would on a GPU.
        self.signatures = {
            "nvfp4_quantize": inspect.signature(flashinfer.nvfp4_quantize),
            "nvfp4_block_scale_interleave": inspect.signature(
                flashinfer.nvfp4_block_scale_interleave
            ),
            "trtllm_fp4_block_scale_moe": inspect.signature(
                flashinfer.fused_moe.trtllm_fp4_block_scale_moe
            ),
            "trtllm_fp4_block_scale_routed_moe": inspect.signature(
                flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe
            ),
        }

    def _bind(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        bound = self.signatures[name].bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def nvfp4_quantize(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Rows, per token, in the linear layout: our reference's bits, tested against FlashInfer's
        specification in tests/unit/test_nvfp4_flashinfer.py."""
        given = self._bind("nvfp4_quantize", args, kwargs)
        x = given["a"]
        require(given["per_token_activation"] is True, "static activation scales were asked for")
        require(given["sfLayout"] == SfLayout.layout_linear, f"layout {given['sfLayout']}")
        require(isinstance(given["a_global_sf"], float), "a tensor as base scale makes CUDA wait")
        require(given["a_global_sf"] == BASE_SCALE, f"base scale {given['a_global_sf']}")
        require(x.ndim == 2 and x.is_contiguous(), f"rows {tuple(x.shape)} {x.stride()}")
        require(x.dtype in (torch.bfloat16, torch.float16), f"rows are {x.dtype}")
        require(x.shape[1] % 16 == 0, f"{x.shape[1]} columns")
        rows = nvfp4.quantize_per_token(x)
        return rows.codes, rows.block_scale.view(torch.uint8), rows.row_scale

    def nvfp4_block_scale_interleave(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        scales = self._bind("nvfp4_block_scale_interleave", args, kwargs)["unswizzled_sf"]
        require(scales.dtype == torch.uint8 and scales.ndim == 2, f"{scales.dtype} {scales.ndim}D")
        return swizzle_sf_128x4(scales, scales.shape[0], 16 * scales.shape[1]).flatten()

    def trtllm_fp4_block_scale_moe(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = self._bind("trtllm_fp4_block_scale_moe", args, kwargs)
        logits, experts = given["routing_logits"], given["num_experts"]
        tokens = given["hidden_states"].shape[0]
        require(logits.dtype in (torch.bfloat16, torch.float32), f"router logits {logits.dtype}")
        require_tensor("routing_logits", logits, logits.dtype, (tokens, experts))
        bias = given["routing_bias"]
        if bias is not None:
            require(bias.dtype in (torch.bfloat16, torch.float32), f"routing bias {bias.dtype}")
            require_tensor("routing_bias", bias, bias.dtype, (experts,))
        weights, ids = route(given)
        # The routing kernels write their weights in bf16.
        return [self._moe("trtllm_fp4_block_scale_moe", given, weights.bfloat16(), ids)]

    def trtllm_fp4_block_scale_routed_moe(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = self._bind("trtllm_fp4_block_scale_routed_moe", args, kwargs)
        ids, weights = given["topk_ids"]
        shape = (given["hidden_states"].shape[0], given["top_k"])
        require_tensor("topk_ids", ids, torch.int32, shape)
        require(weights.dtype in (torch.bfloat16, torch.float32), f"topk_weights {weights.dtype}")
        require_tensor("topk_weights", weights, weights.dtype, shape)
        require(bool((ids < given["num_experts"]).all()), "an expert that does not exist")
        return [self._moe("trtllm_fp4_block_scale_routed_moe", given, weights, ids)]

    def _moe(
        self, name: str, given: dict[str, Any], topk_weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        activation = ActivationType(given["activation_type"])
        gated = activation in (ActivationType.Swiglu, ActivationType.Geglu)
        require(gated or activation == ActivationType.Relu2, f"activation {activation!r}")
        codes, inter = given["hidden_states"], given["intermediate_size"]
        experts, first = given["local_num_experts"], given["local_expert_offset"]
        require(codes.dtype == torch.uint8 and codes.ndim == 2, "hidden states are not packed")
        tokens, hidden = codes.shape[0], 2 * codes.shape[1]
        rows = inter * (2 if gated else 1)
        self.calls.append((name, tokens))
        require(tokens > 0, "no tokens: the launcher divides by their number")
        require(hidden % (256 if gated else 512) == 0, f"hidden size {hidden}")
        require(rows % 128 == 0, f"{rows} rows of FC1")
        require(1 <= given["top_k"] <= min(32, given["num_experts"]), f"top_k {given['top_k']}")
        require(first >= 0 and first + experts <= given["num_experts"], "experts out of range")
        require(given["do_finalize"] is True, "an output that is not finalized")
        for parameter in ("gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta"):
            require(given[parameter] is None, f"{parameter} is given")
        require(given["gemm1_clamp_limit"] is None, "a clamp has no meaning in per-token mode")
        require_tensor("hidden_states", codes, torch.uint8, (tokens, hidden // 2))
        scale = given["hidden_states_scale"]
        require_tensor("hidden_states_scale", scale, E4M3, (tokens, hidden // 16))
        require_tensor("per_token_scale", given["per_token_scale"], torch.float32, (tokens,))
        for parameter in ("output1_scale_scalar", "output1_scale_gate_scalar"):
            require_tensor(parameter, given[parameter], torch.float32, (experts,))
        require_tensor(
            "output2_scale_scalar", given["output2_scale_scalar"], torch.float32, (experts,)
        )
        w13 = weights_of(given, "gemm1", experts, rows, hidden, gated)
        w2 = weights_of(given, "gemm2", experts, hidden, inter, gated)
        output = given.get("output")
        if output is None:
            output = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        require_tensor("output", output, torch.bfloat16, (tokens, hidden))

        x = nvfp4.dequantize(codes, scale, given["per_token_scale"], torch.float32).double()
        total = torch.zeros(tokens, hidden, dtype=torch.float32)
        for expert in range(experts):
            token, slot = torch.where(ids == first + expert)
            fc1 = x[token] @ w13[expert].T
            gate_scale = given["output1_scale_gate_scalar"][expert].double()
            up_scale = given["output1_scale_scalar"][expert].double()
            if gated:  # (x0 * scaleC) * act(x1 * scaleGate), batched_gemm/KernelRunner.h
                linear, gate = fc1.chunk(2, dim=1)
                act = F.silu if activation == ActivationType.Swiglu else gelu_tanh
                inner = linear * up_scale * act(gate * gate_scale)
            else:
                inner = F.relu(fc1 * gate_scale).square() * up_scale
            again = nvfp4.quantize_per_token(inner.bfloat16())
            inner = nvfp4.dequantize(*again, torch.float32).double()
            fc2 = inner @ w2[expert].T * given["output2_scale_scalar"][expert].double()
            total.index_add_(0, token, fc2.bfloat16().float() * topk_weights[token, slot, None])
        output.copy_(total)
        return output


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def weights_of(
    given: dict[str, Any], gemm: str, experts: int, rows: int, columns: int, gated: bool
) -> torch.Tensor:
    """Weights without their second scale, float64 [experts, rows, columns], shuffling undone."""
    codes, scales = given[f"{gemm}_weights"], given[f"{gemm}_weights_scale"]
    require_tensor(f"{gemm}_weights", codes, torch.uint8, (experts, rows, columns // 2))
    require_tensor(f"{gemm}_weights_scale", scales, E4M3, (experts, rows, columns // 16))
    cache: dict[Any, torch.Tensor] = {}

    def order(matrix: torch.Tensor, **sf: int) -> torch.Tensor:
        if gemm == "gemm2":
            return get_w2_permute_indices_with_cache(cache, matrix, EPILOGUE_TILE, **sf)
        return _maybe_get_cached_w3_w1_permute_indices(
            cache, matrix, EPILOGUE_TILE, is_gated_act_gemm=gated, **sf
        )

    result = torch.empty(experts, rows, columns, dtype=torch.float64)
    for expert in range(experts):
        shuffled = codes[expert]
        straight = torch.empty_like(shuffled)
        straight[order(shuffled)] = shuffled
        linear = unswizzle_sf_128x4(scales[expert].view(torch.uint8), rows, columns)
        straight_scales = torch.empty_like(linear)
        straight_scales[order(linear, num_elts_per_sf=16)] = linear
        result[expert] = nvfp4.dequantize(straight, straight_scales.view(E4M3), 1.0)
    return result


def route(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights, float64 [T, top_k], and experts, int32, as FlashInfer documents each
    ``RoutingMethodType``."""
    method = RoutingMethodType(int(given["routing_method_type"]))
    logits, top_k = given["routing_logits"].double(), given["top_k"]
    bias, groups = given["routing_bias"], given["n_group"] or 0
    factor = given["routed_scaling_factor"]
    factor = 1.0 if factor is None else factor
    grouped = method == RoutingMethodType.DeepSeekV3
    require(grouped or groups <= 1, f"n_group {groups} with {method!r}")
    if method == RoutingMethodType.Renormalize:
        best, ids = logits.topk(top_k)
        return best.softmax(-1), ids.int()
    if method == RoutingMethodType.RenormalizeNaive:
        best, ids = logits.softmax(-1).topk(top_k)
        return best / best.sum(-1, keepdim=True), ids.int()
    scores = logits.sigmoid()
    biased = scores if bias is None else scores + bias.double()
    if grouped:
        require(groups > 0 and given["num_experts"] % groups == 0, f"n_group {groups}")
        require(0 < given["topk_group"] <= min(4, groups), f"topk_group {given['topk_group']}")
        require(top_k <= (8 if given["num_experts"] <= 384 else 22), f"grouped top_k {top_k}")
        by_group = biased.view(len(biased), groups, -1)
        best_groups = by_group.topk(2).values.sum(-1).topk(given["topk_group"]).indices
        keep = torch.zeros(len(biased), groups, dtype=torch.bool).scatter_(1, best_groups, True)
        biased = by_group.masked_fill(~keep[..., None], -torch.inf).flatten(1)
    elif method not in (
        RoutingMethodType.SigmoidRenorm,
        RoutingMethodType.Sigmoid,
        RoutingMethodType.MiniMax2,
    ):
        raise ContractViolation(f"routing {method!r}")
    ids = biased.topk(top_k).indices
    weights = scores.gather(1, ids)
    if method != RoutingMethodType.Sigmoid:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if grouped or method == RoutingMethodType.MiniMax2:
        weights = weights * factor
    return weights, ids.int()
