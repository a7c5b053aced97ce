"""What is in a checkpoint, what is wrong with it, and what the plugin will make of it.

Reads JSON files, headers and scales; no weight. Nothing here knows the engine: how a layer is
served is asked where the engine asks, in ``checkpoints/decide.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_nvfp4_pertoken.checkpoints.convert.groups import Options, modules_to_quantize
from vllm_nvfp4_pertoken.checkpoints.decide import serve_as
from vllm_nvfp4_pertoken.checkpoints.headers import (
    TensorHeader,
    config_number,
    config_sections,
    read_headers,
    read_json,
    shown,
)
from vllm_nvfp4_pertoken.checkpoints.inspect.findings import (
    Problem,
    input_scale_problems,
    scale_problems,
    tensor_problems,
    untouched,
)
from vllm_nvfp4_pertoken.checkpoints.inspect.rows import Row, make_rows
from vllm_nvfp4_pertoken.checkpoints.inspect.scan import read_scales
from vllm_nvfp4_pertoken.checkpoints.inspect.weights import (
    DRAFTS,
    PACKED,
    W13,
    Weight,
    by_unit,
    collect_weights,
)
from vllm_nvfp4_pertoken.checkpoints.modules import NVFP4_ALGORITHMS, stored_formats
from vllm_nvfp4_pertoken.checkpoints.quant_config import (
    QuantDescription,
    complete_description,
    parse_quant_config,
)
from vllm_nvfp4_pertoken.checkpoints.verify import find_wrong_tensors
from vllm_nvfp4_pertoken.errors import CheckpointError, PerTokenError

__all__ = ["Report", "Row", "inspect_checkpoint"]

PER_TOKEN, REFUSED, AS_DRAFT = "per-token", "refused", "as a draft only"
ONLINE = "quantized while loading, per-token"


@dataclass(frozen=True)
class Report:
    """What :func:`inspect_checkpoint` found.

    Attributes:
        path: the checkpoint's directory.
        description: of its quantization; None where there is none, or none that can be served.
        source: the file, and the place in it, that the description is from; empty: none.
        producer: what wrote it, where it says so.
        files, tensors, nbytes: of all tensors.
        other_nbytes: of tensors that are no weight of a linear: embeddings, norms, convolutions …
        rows: layers by kind, format and how they are served.
        problems: worst first.
        weights: every weight, with its scales.
    """

    path: Path
    description: QuantDescription | None
    source: str
    producer: str
    files: int
    tensors: int
    nbytes: int
    other_nbytes: int
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    weights: tuple[Weight, ...]

    @property
    def serves(self) -> bool:
        """Whether the plugin will serve it, as far as files can tell."""
        return not any(problem.severity == "error" for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` writes it; docs/inspect.md says what is in it."""
        description = self.description
        return {
            "schema": 1,
            "checkpoint": str(self.path),
            "serves": self.serves,
            "quantization": {
                "source": self.source or None,
                "producer": self.producer or None,
                "method": description.dialect if description else None,
                "algorithm": description.quant_algo if description else None,
                "kv_cache": description.kv_cache_quant_algo if description else None,
            },
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "other_bytes": self.other_nbytes,
            "problems": [problem.to_json() for problem in self.problems],
            "layers": [row.to_json() for row in self.rows],
        }


def inspect_checkpoint(
    path: Path,
    *,
    blocks: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Look at the checkpoint in the directory ``path``.

    Args:
        path: a directory.
        blocks: read block scales too.
        progress: called with what is done and the total, about in bytes.

    Raises:
        CheckpointError: for files that are missing or cannot be read; all else is a problem in the
            report.
        OSError: for files that the system does not let read.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is {'a file' if path.exists() else 'not a directory'}",
            expected="a directory with a Hugging Face checkpoint",
            way_out="download the model first, and give the directory",
        )
    config = read_json(path / "config.json")
    headers = read_headers(path)
    weights, others = collect_weights(headers, config_number(config, "num_hidden_layers"))
    problems = []
    description, source, producer = None, "", ""
    try:
        section, source, legacy = _quantization(path, config)
        if section is not None:
            producer = _producer(section) or _producer(legacy or {})
            description = parse_quant_config(section, source=f"{source} of {path}")
            description, disagreements = complete_description(description, legacy, str(path))
            problems += [Problem("warning", "configs-disagree", text) for text in disagreements]
    except PerTokenError as error:
        description = None
        problems.append(Problem.of_error("quantization-config", error))
    problems += tensor_problems(find_wrong_tensors(headers, config)[1])
    read_scales(weights, blocks=blocks, progress=progress)
    problems += scale_problems(weights)
    if source:
        served, decisions = _decide(headers, weights, description)
    else:
        served, decisions = _decide_unquantized(path, headers, config, weights)
    problems += decisions
    if description and PER_TOKEN not in {served[w.unit] for w in weights if w.kind == W13}:
        problems.append(
            Problem(
                "error",
                "no-nvfp4-experts",
                f"{path} has no NVFP4 experts",
                expected="a mixture-of-experts model whose experts are NVFP4",
                way_out="serve it without --quantization nvfp4_per_token",
            )
        )
    if description and description.quant_algo == "W4A16_NVFP4":
        problems.append(
            Problem(
                "note",
                "weights-only",
                "the checkpoint quantizes weights only (W4A16_NVFP4); per-token serving quantizes "
                "activations as well",
            )
        )
    cold = untouched(weights)
    problems += input_scale_problems(weights, cold)
    order = ("error", "warning", "note")
    return Report(
        path=path,
        description=description,
        source=source,
        producer=producer,
        files=len({header.file for header in headers.values()}),
        tensors=len(headers),
        nbytes=sum(header.nbytes for header in headers.values()),
        other_nbytes=sum(header.nbytes for header in others),
        rows=tuple(make_rows(weights, served, cold)),
        problems=tuple(sorted(problems, key=lambda problem: order.index(problem.severity))),
        weights=tuple(weights),
    )


def _quantization(
    path: Path, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str, Mapping[str, Any] | None]:
    """The quantization section, where it is from, and ``hf_quant_config.json``.

    In the order in which vLLM looks. None, empty and None for a checkpoint without quantization.
    """
    file = path / "hf_quant_config.json"
    legacy = read_json(file) if file.exists() else None
    text = config_sections(config)[-1]
    for section, source in (
        (config.get("quantization_config"), "quantization_config in config.json"),
        (legacy, "hf_quant_config.json"),
        (text.get("quantization_config"), "text_config.quantization_config in config.json"),
        (config.get("compression_config"), "compression_config in config.json"),
    ):
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise CheckpointError(
                f"{source} of {path} is {shown(section)}",
                expected="an object",
                way_out="export the checkpoint again, or repair the file",
            )
        return section, source, legacy
    return None, "", None


def _producer(section: Mapping[str, Any]) -> str:
    producer = section.get("producer")
    if not isinstance(producer, Mapping):
        return ""
    words = [producer.get(key) for key in ("name", "version")]
    return " ".join(word for word in words if isinstance(word, str))


def _decide(
    headers: Mapping[str, TensorHeader],
    weights: list[Weight],
    description: QuantDescription | None,
) -> tuple[dict[str, str], list[Problem]]:
    """How each layer of the engine will be served, and what is odd about that."""
    stored = stored_formats((h.name, h.dtype, len(h.shape)) for h in headers.values())
    served: dict[str, str] = {}
    problems = []
    contradictions = []
    for unit, parts in by_unit(weights).items():
        formats = sorted({weight.format for weight in parts})
        if description is None:
            served[unit] = REFUSED
            continue
        try:
            algorithm, contradiction = serve_as(unit, description, stored, PACKED)
            if algorithm in NVFP4_ALGORITHMS and formats != ["NVFP4"]:
                raise CheckpointError(
                    f"{unit} is stored in {' and '.join(formats)}, and the checkpoint's config "
                    f"says {algorithm}",
                    expected="NVFP4 weights",
                    way_out="export the checkpoint again, or repair its quantization config",
                )
        except PerTokenError as error:
            served[unit] = REFUSED
            problems.append(Problem.of_error("format", error))
            continue
        if parts[0].kind == DRAFTS:
            served[unit] = AS_DRAFT
        elif algorithm in NVFP4_ALGORITHMS:
            served[unit] = PER_TOKEN
        else:
            served[unit] = f"{' and '.join(formats)}, as stored"
        if contradiction and parts[0].kind != DRAFTS:
            contradictions.append(f"{unit} ({contradiction})")
    if contradictions:
        problems.append(
            Problem(
                "warning",
                "config-contradicts-tensors",
                f"{len(contradictions)} modules are not stored as the checkpoint's config says, "
                f"and are served as they are stored: {', '.join(contradictions[:5])}"
                + (", …" if len(contradictions) > 5 else ""),
                count=len(contradictions),
            )
        )
    return served, problems


def _decide_unquantized(
    path: Path,
    headers: Mapping[str, TensorHeader],
    config: Mapping[str, Any],
    weights: list[Weight],
) -> tuple[dict[str, str], list[Problem]]:
    """The same of a checkpoint without quantization, whose experts are quantized while loading."""
    served = {w.unit: AS_DRAFT if w.kind == DRAFTS else f"{w.format}, as stored" for w in weights}
    try:
        modules = modules_to_quantize(str(path), headers, config, Options())
    except PerTokenError as error:
        return dict.fromkeys(served, REFUSED), [Problem.of_error("not-quantized", error)]
    for module in modules:
        served[f"{module.rpartition('.experts.')[0]}.experts"] = ONLINE
    return served, [
        Problem(
            "note",
            "not-quantized",
            "the checkpoint is not quantized: its experts will be while they load, at every start; "
            f"nvfp4-pertoken convert {path} DST does it once",
        )
    ]
