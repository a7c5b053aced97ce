"""What a source checkpoint holds: its configuration, and the matrices that could be quantized."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_nvfp4_pertoken.checkpoints.convert.read import Matrix
from vllm_nvfp4_pertoken.checkpoints.decide import is_draft
from vllm_nvfp4_pertoken.checkpoints.headers import TensorHeader, config_number, config_sections
from vllm_nvfp4_pertoken.checkpoints.layout import EXPERT_TENSOR
from vllm_nvfp4_pertoken.errors import CheckpointError, UnsupportedError
from vllm_nvfp4_pertoken.nvfp4 import BLOCK_SIZE

__all__ = [
    "FLOATS",
    "FUSED",
    "SOURCE",
    "STAY_FUSED",
    "Weights",
    "fp8_block",
    "fp8_scale",
]

FLOATS = ("BF16", "F16", "F32")
SOURCE = "a checkpoint in BF16, FP16, FP32, or FP8 with weight_block_size as DeepSeek's"
# Fused experts of these families stay fused: their loaders expect it. The others' are split.
STAY_FUSED = ("llama4", "llama4_text", "gpt_oss")
FUSED = re.compile(r"^(?P<container>.*\bexperts)\.(?P<kind>gate_up_proj|down_proj)$")
# Linears that ModelOpt's recipes leave alone too, because they are small, sensitive or no linears.
NEVER = re.compile(
    r"(^|\.)(lm_head|embed\w*|embeddings|wte|wpe|router|gate|shared_expert_gate|conv1d|proj_out|"
    r"output_layer|visual|vision_\w+|vision|audio_\w+|multi_modal_projector|mtp|eh_proj|"
    r"enorm|hnorm|shared_head)(\.|$)"
)


def is_dense(module: str) -> bool:
    """Whether a linear of this name is quantized where all are; experts are none of them."""
    return not NEVER.search(module)


class Weights:
    """The matrices that could be quantized, by module, and what each belongs to."""

    def __init__(
        self,
        headers: Mapping[str, TensorHeader],
        config: Mapping[str, Any],
        block: tuple[int, int] | None,
    ) -> None:
        self.headers = headers
        self.block = block
        self.layers = config_number(config, "num_hidden_layers")
        self.stay_fused = any(
            section.get("model_type") in STAY_FUSED for section in config_sections(config)
        )
        self.experts = dict(self._experts())
        self.fused = dict(self._fused_experts())
        self.dense = dict(self._dense())
        self._check_projections()

    def _experts(self) -> Iterator[tuple[str, TensorHeader]]:
        for name, header in self.headers.items():
            match = EXPERT_TENSOR.match(name)
            if not match or is_draft(name, self.layers):
                continue
            if match["kind"] == "weight":
                yield name.removesuffix(".weight"), header
            elif not (match["kind"] == "weight_scale_inv" and self.block):
                raise UnsupportedError(
                    f"{name} in {header.file} is not a weight",
                    expected="experts that consist of weights alone",
                    way_out="expert biases and scales cannot be converted",
                )

    def _fused_experts(self) -> Iterator[tuple[str, TensorHeader]]:
        for name, header in self.headers.items():
            match = FUSED.match(name)
            if match and len(header.shape) == 3 and not is_draft(name, self.layers):
                yield name, header

    def _dense(self) -> Iterator[tuple[str, TensorHeader]]:
        for name, header in self.headers.items():
            module, _, kind = name.rpartition(".")
            matrix = kind == "weight" and len(header.shape) == 2
            elsewhere = EXPERT_TENSOR.match(name) or is_draft(name, self.layers)
            if (
                matrix
                and not elsewhere
                and is_dense(module)
                and header.dtype in (*FLOATS, "F8_E4M3")
            ):
                yield module, header

    def _check_projections(self) -> None:
        projections: dict[str, set[str]] = defaultdict(set)
        experts: dict[str, dict[str, str]] = defaultdict(dict)
        for module in self.experts:
            match = EXPERT_TENSOR.match(f"{module}.weight")
            assert match is not None
            projections[match["container"]].add(match["projection"])
            experts[match["container"]][match["expert"]] = module
        for container, present in experts.items():
            for expert, example in present.items():
                for projection in sorted(projections[container]):
                    module = f"{container}.{expert}.{projection}"
                    if module not in self.experts:
                        file = self.headers[f"{example}.weight"].file
                        raise CheckpointError(
                            f"{module}.weight is missing in {file.parent}, where {example}.weight "
                            f"is in {file.name}",
                            expected="all projections of every expert",
                            way_out="finish the download or copy the checkpoint again",
                        )

    def matrix(self, module: str, header: TensorHeader) -> Matrix:
        """A plain [rows, columns] weight, checked."""
        good = len(header.shape) == 2 and all(header.shape) and header.shape[1] % BLOCK_SIZE == 0
        scale = None
        if header.dtype == "F8_E4M3" and self.block and good:
            scale = fp8_scale(self.headers, header, self.block)
        elif header.dtype not in FLOATS or not good:
            raise UnsupportedError(
                f"{header.name} in {header.file} is {header.dtype} {list(header.shape)}",
                expected=f"BF16, F16 or F32 [rows, a multiple of {BLOCK_SIZE}]",
                way_out=f"NVFP4 cannot hold this matrix; leave it out with --exclude {module}, or "
                "serve the model unquantized",
            )
        rows, columns = header.shape
        return Matrix(header, rows, columns, scale=scale, block=self.block or (1, 1))


def fp8_scale(
    headers: Mapping[str, TensorHeader], header: TensorHeader, block: tuple[int, int]
) -> TensorHeader:
    """The ``weight_scale_inv`` of an FP8 weight, checked."""
    name = f"{header.name}_scale_inv"
    scale = headers.get(name)
    expected = [-(-size // step) for size, step in zip(header.shape, block, strict=True)]
    if scale is None or list(scale.shape) != expected or scale.dtype not in FLOATS:
        found = f"{scale.dtype} {list(scale.shape)} in {scale.file}" if scale else "missing"
        raise CheckpointError(
            f"{name} is {found}, where {header.name} in {header.file} is FP8 {list(header.shape)}",
            expected=f"F32 {expected}, one scale for {block[0]}x{block[1]} values",
            way_out="finish the download or copy the checkpoint again",
        )
    return scale


def fp8_block(src: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of FP8 blocks; None where the source is not quantized."""
    block = None
    places = ("config.json", "config.json, text_config")
    for section, where in zip(config_sections(config), places, strict=False):
        quantization = section.get("quantization_config")
        if not quantization:
            continue
        method = (
            quantization.get("quant_method", "unnamed")
            if isinstance(quantization, Mapping)
            else quantization
        )
        size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
        sizes = size if isinstance(size, list) else []
        if method == "fp8" and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes):
            block = (sizes[0], sizes[1])
            continue
        raise UnsupportedError(
            f"{src} is quantized already ({where} has a quantization_config of {method!r})",
            expected=SOURCE,
            way_out="convert the original checkpoint; if this one is ModelOpt NVFP4, serve it "
            "as it is",
        )
    if (src / "hf_quant_config.json").is_file():
        raise UnsupportedError(
            f"{src} is quantized already (it has a hf_quant_config.json)",
            expected=SOURCE,
            way_out="convert the original checkpoint; if this one is NVFP4, serve it as it is",
        )
    return block
