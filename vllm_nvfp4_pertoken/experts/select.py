"""Choose the experts for a machine: a pure function of facts, with a reason for every rejection."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_nvfp4_pertoken.errors import UnsupportedError

__all__ = ["ACCEPTED_BACKENDS", "Choice", "Facts", "choose"]

# Values of vLLM's `--moe-backend` that this package serves, and what each one means here.
ACCEPTED_BACKENDS: Mapping[str, str] = {
    "auto": "the fastest that is exact on this machine",
    "triton": "Triton kernels, NVIDIA GPUs from compute capability 8.0 on",
    "emulation": "the torch reference, on any device",
}


@dataclass(frozen=True)
class Facts:
    """What the choice depends on.

    Attributes:
        moe_backend: the value of ``--moe-backend``.
        device: ``"cpu"``, ``"cuda"``, …
        cpu_kernel_missing: why the compiled CPU kernel cannot be used; None when it can.
        triton_missing: why the Triton kernels cannot be used; None when they can.
        activation_format: ``"standard"``, or ``"batched"`` when an all-to-all backend hands tokens
            over in per-expert batches.
    """

    moe_backend: str
    device: str
    cpu_kernel_missing: str | None = None
    triton_missing: str | None = None
    activation_format: str = "standard"


@dataclass(frozen=True)
class Choice:
    """The experts to build, why, and why not the others.

    Attributes:
        name: ``"cpu"`` (compiled kernel), ``"triton"`` or ``"reference"`` (torch).
        reason: why this one.
        rejected: candidate to reason.
        warning: what the choice costs, where a faster one was to be expected.
    """

    name: str
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    warning: str | None = None


def choose(facts: Facts) -> Choice:
    """The experts for ``facts``.

    Raises:
        UnsupportedError: for a ``--moe-backend`` that cannot run per-token, and for deployments
            that no experts here can serve.
    """
    if facts.moe_backend not in ACCEPTED_BACKENDS:
        raise UnsupportedError(
            f"--moe-backend {facts.moe_backend} cannot run NVFP4 with per-token activation scales",
            expected=" or ".join(f"{name} ({what})" for name, what in ACCEPTED_BACKENDS.items()),
            way_out="leave --moe-backend out",
        )
    if facts.activation_format != "standard":
        raise UnsupportedError(
            "the all-to-all backend hands over tokens in the batched activation format, in which "
            "rows of several tokens would share one scale",
            expected="the standard activation format",
            way_out="choose another --all2all-backend, such as allgather_reducescatter",
        )
    if facts.moe_backend == "triton":
        if facts.triton_missing is not None:
            raise UnsupportedError(
                f"--moe-backend triton cannot run here: {facts.triton_missing}",
                expected="an NVIDIA GPU of compute capability 8.0 or newer, and Triton",
                way_out="leave --moe-backend out",
            )
        return Choice("triton", "asked for with --moe-backend triton")
    if facts.moe_backend == "emulation":
        return Choice("reference", "asked for with --moe-backend emulation")
    rejected: dict[str, str] = {}
    if facts.device != "cpu":
        rejected["cpu"] = f"the device is {facts.device}"
    elif facts.cpu_kernel_missing is not None:
        rejected["cpu"] = facts.cpu_kernel_missing
    else:
        return Choice("cpu", "compiled kernel for this CPU")
    return Choice(
        "reference",
        "; ".join(f"{name}: {reason}" for name, reason in rejected.items()),
        rejected,
        warning=(
            "per-token NVFP4 runs on the torch reference: correct and slow. "
            + "; ".join(f"{name} was not possible: {reason}" for name, reason in rejected.items())
        ),
    )
