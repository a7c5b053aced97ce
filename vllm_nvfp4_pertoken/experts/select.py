"""Choose the experts for a layer on a machine: a pure function, with every reason for a rejection.

The engine asks once for each layer. The answer depends on nothing but the arguments, which are the
same on every rank that holds a part of the layer, so that ranks agree without talking to each
other. Where a limit comes from a kernel, its source is named at the check.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from vllm_nvfp4_pertoken.errors import UnsupportedError

__all__ = [
    "ACCEPTED_BACKENDS",
    "FOUR_OVER_SIX",
    "MINIMUM_FLASHINFER",
    "TESTED_FLASHINFER",
    "Choice",
    "Facts",
    "Layer",
    "choose",
]

# Values of vLLM's `--moe-backend` that this package serves, and what each one means here.
ACCEPTED_BACKENDS: Mapping[str, str] = {
    "auto": "the fastest that is exact on this machine",
    "flashinfer_trtllm": "FlashInfer's trtllm-gen kernels, compute capability 10.0 and 10.3",
    "flashinfer_cutedsl": "FlashInfer's CuTe-DSL kernels, compute capability 10.0 and 10.3",
    "triton": "Triton kernels, NVIDIA GPUs from compute capability 8.0 on",
    "emulation": "the torch reference, on any device",
}
# Older ones return NaN in the per-token path: tile 192, FlashInfer #4486 and #4741.
MINIMUM_FLASHINFER = "0.7.0.post1"
TESTED_FLASHINFER = ("0.7.0.post1", "0.7.2.post1", "0.7.4")
_MINIMUM_VLLM = "0.32"
# FlashInfer's switch for another recipe, on when it is "1": each block of rows takes the scale that
# maps its largest value to 6 or to 4, whichever errs less. Variables with this prefix refine it.
FOUR_OVER_SIX = "FLASHINFER_NVFP4_4OVER6"

# B200/GB200 and B300/GB300. Not 11.0 (Thor) nor 12.x (consumer and workstation Blackwell, GB10):
# their tensor cores have other instructions, and these kernels are not compiled for them.
_DATACENTER_BLACKWELL = ((10, 0), (10, 3))
_FLASHINFER_BACKENDS = ("flashinfer_trtllm", "flashinfer_cutedsl")

# `_supports_activation` of vLLM's experts classes, without what has no proof: SwiGLU's parameters
# on trtllm-gen. Its "GeGlu" is the tanh approximation (batched_gemm/KernelRunner.h), so no "gelu".
_TRTLLM_ACTIVATIONS = ("silu", "gelu_tanh", "relu2_no_mul")
_CUTEDSL_ACTIVATIONS = ("silu", "swigluoai", "swigluoai_uninterleave", "relu2_no_mul")
# FlashInfer's routing kernels for at most this many experts per token.
_TRTLLM_MAX_TOP_K = 32
# Routing methods that trtllm-gen computes itself; vLLM's router does the others before it. As
# `TrtLlmNvFp4ExpertsMonolithic._supports_routing_method`, without Llama4: the FP4 launcher weighs
# outputs, and that router's weights belong on inputs.
_TRTLLM_ROUTING = (
    "DeepSeekV3",
    "Renormalize",
    "RenormalizeNaive",
    "SigmoidRenorm",
    "Sigmoid",
    "MiniMax2",
)


@dataclass(frozen=True)
class Facts:
    """The machine and what was asked for.

    Attributes:
        moe_backend: the value of ``--moe-backend``.
        platform: ``"cpu"``, ``"cuda"`` (NVIDIA), ``"rocm"``, …
        capability: compute capability of NVIDIA GPUs, as in ``(10, 0)``.
        vllm: version of vLLM.
        flashinfer: version of FlashInfer; None when it is not installed.
        flashinfer_unusable: why vLLM cannot use the FlashInfer that is installed; None when it can.
        unavailable: candidate to further reason why it cannot run: a kernel that was not compiled,
            a package that is missing, what vLLM has against it.
        triton_interpreted: whether Triton interprets kernels on the CPU, for tests.
        environment: variables that change what a kernel computes, by name.
    """

    moe_backend: str = "auto"
    platform: str = "cpu"
    capability: tuple[int, int] | None = None
    vllm: str = _MINIMUM_VLLM
    flashinfer: str | None = None
    flashinfer_unusable: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    triton_interpreted: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """One MoE layer, as one rank runs it.

    Attributes:
        hidden: the model's hidden size.
        intermediate: intermediate size per tensor-parallel rank.
        activation: vLLM's name of it, see ``reference.ACTIVATIONS``.
        alpha, beta, limit: parameters of SwiGLU variants; None where the model sets none.
        has_bias: whether the projections have biases.
        dtype: of hidden states.
        top_k, num_experts: experts per token, and of all ranks together.
        routing: name of vLLM's ``RoutingMethodType``.
        router_dtype: of router logits.
        router_weight_on_input: whether rows are weighed before FC1 instead of after FC2 (Llama 4).
        has_hash_routing: whether a token's id decides its experts.
        ep_size: expert-parallel ranks.
        eplb: whether experts move between ranks (EPLB).
        all2all: name of the all-to-all backend where rows are dispatched to other ranks, else None.
        batched: whether rows arrive in per-expert batches.
    """

    hidden: int = 2048
    intermediate: int = 768
    activation: str = "silu"
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    has_bias: bool = False
    dtype: str = "bfloat16"
    top_k: int = 8
    num_experts: int = 128
    routing: str = "RenormalizeNaive"
    router_dtype: str = "bfloat16"
    router_weight_on_input: bool = False
    has_hash_routing: bool = False
    ep_size: int = 1
    eplb: bool = False
    all2all: str | None = None
    batched: bool = False


@dataclass(frozen=True)
class Choice:
    """The experts to build, why, and why not the others.

    Attributes:
        name: ``"flashinfer_trtllm"``, ``"flashinfer_cutedsl"``, ``"triton"``, ``"cpu"`` (compiled
            kernel) or ``"reference"`` (torch).
        reason: why this one.
        rejected: faster candidates, and all the reasons against each.
        warning: what the choice costs, where a faster one was to be expected; or a version that
            was never tested.
        routes: whether the kernel computes the routing itself (vLLM: "monolithic").
    """

    name: str
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    warning: str | None = None
    routes: bool = False


def choose(facts: Facts, layer: Layer) -> Choice:
    """The experts for ``layer`` on the machine of ``facts``.

    Raises:
        UnsupportedError: for a ``--moe-backend`` that cannot run per-token here, with every
            reason; for deployments and recipes that no experts can serve; and on data-center
            Blackwell when FlashInfer is missing or too old, because one command mends that.
    """
    if facts.moe_backend not in ACCEPTED_BACKENDS:
        raise UnsupportedError(
            f"--moe-backend {facts.moe_backend} cannot run NVFP4 with per-token activation scales",
            expected=" or ".join(f"{name} ({what})" for name, what in ACCEPTED_BACKENDS.items()),
            way_out="leave --moe-backend out",
        )
    _check_recipe(facts)
    _check_deployment(layer)
    if facts.moe_backend == "emulation":
        return Choice("reference", "asked for with --moe-backend emulation")
    if facts.moe_backend != "auto":
        return _asked_for(facts, layer)
    rejected: dict[str, str] = {}
    for name, find in _CANDIDATES.items():
        reasons = find(facts, layer)
        if not reasons:
            return _chosen(name, _WHY[name], facts, layer, rejected)
        rejected[name] = "; ".join(reasons)
        if name in _FLASHINFER_BACKENDS and _is_datacenter_blackwell(facts):
            _check_flashinfer(facts)
    return _chosen("reference", "the only one that runs here", facts, layer, rejected)


def _asked_for(facts: Facts, layer: Layer) -> Choice:
    name = facts.moe_backend
    reasons = _CANDIDATES[name](facts, layer)
    if not reasons:
        return _chosen(name, f"asked for with --moe-backend {name}", facts, layer, {})
    raise UnsupportedError(
        f"--moe-backend {name} cannot run here: {'; '.join(reasons)}",
        expected=ACCEPTED_BACKENDS[name],
        way_out="leave --moe-backend out",
    )


def _chosen(
    name: str, reason: str, facts: Facts, layer: Layer, rejected: Mapping[str, str]
) -> Choice:
    warning = None
    if name in _FLASHINFER_BACKENDS and facts.flashinfer not in TESTED_FLASHINFER:
        warning = (
            f"FlashInfer {facts.flashinfer} was never tested with this; tested: "
            f"{', '.join(TESTED_FLASHINFER)}."
        )
    missed = [
        f"{candidate} was not possible: {why}"
        for candidate, why in rejected.items()
        if _is_expected(candidate, facts)
    ]
    if name in _COST and missed:
        warning = f"{_COST[name]} {'; '.join(missed)}"
    return Choice(
        name,
        reason,
        dict(rejected),
        warning,
        routes=name == "flashinfer_trtllm" and _trtllm_routes(layer),
    )


def _is_expected(candidate: str, facts: Facts) -> bool:
    """Whether the platform is one that a candidate is made for, so that it is missed here."""
    if candidate in _FLASHINFER_BACKENDS:
        return _is_datacenter_blackwell(facts)
    return (candidate == "cpu") == (facts.platform == "cpu")


def _check_recipe(facts: Facts) -> None:
    """4over6 is for weights and activations alike, and changes what all of FlashInfer computes.

    FlashInfer 0.7.0 and 0.7.2 mix it with the standard one, vLLM scales rows for the standard one,
    and experts of ours do not know it.
    """
    if facts.environment.get(FOUR_OVER_SIX) != "1":
        return
    found = ", ".join(
        f"{name}={value}"
        for name, value in sorted(facts.environment.items())
        if name.startswith(FOUR_OVER_SIX)
    )
    raise UnsupportedError(
        f"the environment asks FlashInfer for the 4over6 recipe ({found}), which no per-token "
        "experts here implement for weights, rows and intermediate rows alike; some would mix it "
        "with the standard recipe, others ignore it",
        expected="the standard NVFP4 recipe",
        way_out=f"unset {FOUR_OVER_SIX}",
    )


def _check_deployment(layer: Layer) -> None:
    if layer.batched:
        raise UnsupportedError(
            "the all-to-all backend hands over tokens in the batched activation format, in which "
            "rows of several tokens would share one scale",
            expected="the standard activation format",
            way_out="choose another --all2all-backend, such as allgather_reducescatter",
        )
    if layer.all2all == "flashinfer_nvlink_one_sided":
        raise UnsupportedError(
            "the all-to-all backend flashinfer_nvlink_one_sided sizes its buffers for rows that "
            "are quantized before they are sent, and per-token rows are quantized after (vLLM "
            "#57176)",
            expected="an all-to-all backend that sends rows as they are",
            way_out="choose another --all2all-backend, such as allgather_reducescatter",
        )


def _is_datacenter_blackwell(facts: Facts) -> bool:
    return facts.platform == "cuda" and facts.capability in _DATACENTER_BLACKWELL


def _flashinfer_fault(facts: Facts) -> str | None:
    """Why the installed FlashInfer cannot be used; None when it can."""
    install = f"pip install 'flashinfer-python>={MINIMUM_FLASHINFER}'"
    if facts.flashinfer is None:
        return f"FlashInfer is not installed ({install})"
    try:
        too_old = Version(facts.flashinfer) < Version(MINIMUM_FLASHINFER)
    except InvalidVersion:
        return f"FlashInfer has the version {facts.flashinfer!r}, which cannot be read ({install})"
    if too_old:
        return (
            f"FlashInfer {facts.flashinfer} is older than {MINIMUM_FLASHINFER}, and its per-token "
            f"kernels return NaN in places ({install})"
        )
    return facts.flashinfer_unusable


def _check_flashinfer(facts: Facts) -> None:
    """A GPU for which FlashInfer is made must not end up on slow experts for want of it."""
    fault = _flashinfer_fault(facts)
    if fault is not None:
        raise UnsupportedError(
            fault,
            expected=f"FlashInfer {MINIMUM_FLASHINFER} or newer on this GPU",
            way_out="install it, or choose slower experts with --moe-backend triton",
        )


def _flashinfer_reasons(facts: Facts, layer: Layer, name: str) -> list[str]:
    """What both FlashInfer backends need."""
    reasons = []
    if facts.platform != "cuda":
        reasons.append(f"the platform is {facts.platform}")
    elif not _is_datacenter_blackwell(facts):
        found = ".".join(map(str, facts.capability or ())) or "unknown"
        reasons.append(f"compute capability 10.0 or 10.3 is needed, this GPU has {found}")
    fault = _flashinfer_fault(facts)
    if fault is not None:
        reasons.append(fault)
    if _release(facts.vllm) < _release(_MINIMUM_VLLM):
        reasons.append(
            f"vLLM {facts.vllm} is older than {_MINIMUM_VLLM}, whose experts have a per-token mode"
        )
    if name in facts.unavailable:
        reasons.append(facts.unavailable[name])
    if layer.dtype != "bfloat16":
        reasons.append(f"the kernel's output is bfloat16, and the model runs in {layer.dtype}")
    if layer.has_bias:
        reasons.append("vLLM's NVFP4 experts hand no biases to the kernel, and the layer has some")
    if not 1 <= layer.top_k <= layer.num_experts:
        reasons.append(f"{layer.top_k} experts per token of {layer.num_experts}")
    return reasons


def _trtllm_reasons(facts: Facts, layer: Layer) -> list[str]:
    reasons = _flashinfer_reasons(facts, layer, "flashinfer_trtllm")
    given = _swiglu_parameters(layer)
    if given or layer.activation.startswith("swigluoai"):
        reasons.append(
            f"SwiGLU with parameters ({', '.join(given.values()) or layer.activation}): whether "
            "the kernel applies them before or after the row scale is not documented, and before "
            "would be wrong per-token"
        )
    elif layer.activation not in _TRTLLM_ACTIVATIONS:
        reasons.append(
            f"the activation is {layer.activation}; supported: {', '.join(_TRTLLM_ACTIVATIONS)}"
        )
    if layer.top_k > _TRTLLM_MAX_TOP_K:
        reasons.append(f"{layer.top_k} experts per token, of at most {_TRTLLM_MAX_TOP_K}")
    return reasons


def _trtllm_routes(layer: Layer) -> bool:
    """Whether routing runs in the kernel; otherwise vLLM's router runs before it."""
    return (
        layer.routing in _TRTLLM_ROUTING
        and layer.router_dtype in ("bfloat16", "float32")
        and not layer.router_weight_on_input
        and not layer.has_hash_routing
        and not layer.eplb
        and layer.all2all is None
    )


def _cutedsl_reasons(facts: Facts, layer: Layer) -> list[str]:
    reasons = _flashinfer_reasons(facts, layer, "flashinfer_cutedsl")
    if layer.activation not in _CUTEDSL_ACTIVATIONS:
        reasons.append(
            f"the activation is {layer.activation}; supported: {', '.join(_CUTEDSL_ACTIVATIONS)}"
        )
    elif layer.activation == "silu":
        given = _swiglu_parameters(layer)
        given.pop("limit", None)
        if given:
            reasons.append(
                f"vLLM hands only a limit to the kernel for silu, not {', '.join(given.values())}"
            )
    return reasons


def _swiglu_parameters(layer: Layer) -> dict[str, str]:
    """Parameters that make SwiGLU another function than ``silu(gate) * up``, as in "beta 1.0"."""
    neutral = {"alpha": (layer.alpha, 1.0), "beta": (layer.beta, 0.0), "limit": (layer.limit, None)}
    return {
        name: f"{name} {value}"
        for name, (value, nothing) in neutral.items()
        if value not in (None, nothing)
    }


def _triton_reasons(facts: Facts, layer: Layer) -> list[str]:
    reasons = []
    interpreted = facts.triton_interpreted and facts.moe_backend == "triton"
    if facts.platform != "cuda" and not interpreted:
        reasons.append(f"the kernels are for NVIDIA GPUs, and the platform is {facts.platform}")
    elif facts.capability is not None and facts.capability < (8, 0):
        found = ".".join(map(str, facts.capability))
        reasons.append(f"compute capability 8.0 or newer is needed, this GPU has {found}")
    if "triton" in facts.unavailable:
        reasons.append(facts.unavailable["triton"])
    return reasons


def _cpu_reasons(facts: Facts, layer: Layer) -> list[str]:
    if facts.platform != "cpu":
        return [f"the platform is {facts.platform}"]
    return [facts.unavailable["cpu"]] if "cpu" in facts.unavailable else []


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release
    except InvalidVersion:
        return ()


# Fastest first.
_CANDIDATES: Mapping[str, Callable[[Facts, Layer], list[str]]] = {
    "flashinfer_trtllm": _trtllm_reasons,
    "flashinfer_cutedsl": _cutedsl_reasons,
    "triton": _triton_reasons,
    "cpu": _cpu_reasons,
}
_WHY: Mapping[str, str] = {
    "flashinfer_trtllm": "FP4 tensor cores, trtllm-gen kernels",
    "flashinfer_cutedsl": "FP4 tensor cores, CuTe-DSL kernels",
    "triton": "packed weights through BF16 tensor cores",
    "cpu": "compiled kernel for this CPU",
}
# Rates of dense FP4 and BF16 on B200 and B300, from NVIDIA's data sheets: 9 : 2.25 and 14 : 2.5
# PFLOPS.
_COST: Mapping[str, str] = {
    "triton": (
        "per-token NVFP4 runs through BF16 tensor cores, which on this GPU have a quarter of the "
        "FP4 rate or less: prompts take longer accordingly, memory traffic is the same."
    ),
    "reference": "per-token NVFP4 runs on the torch reference: correct and slow.",
}
