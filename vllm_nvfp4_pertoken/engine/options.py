"""Options of ours, from ``--additional-config '{"nvfp4_per_token": {…}}'``."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_nvfp4_pertoken.errors import UnsupportedError

__all__ = ["ADDITIONAL_CONFIG_KEY", "Options"]

ADDITIONAL_CONFIG_KEY = "nvfp4_per_token"


class Options(BaseModel):
    """What can be set; everything has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    linear: Literal["static", "per_token"] = Field(
        default="per_token",
        description=(
            "dense NVFP4 layers: 'per_token' computes activation scales as for experts, 'static' "
            "takes the checkpoint's input_scale, on vLLM's kernels"
        ),
    )

    bf16: Literal["experts", "all"] = Field(
        default="experts",
        description=(
            "of an unquantized checkpoint, what is quantized while loading: 'experts', or 'all' "
            "linears, as nvfp4-pertoken convert does with --experts-only and --all"
        ),
    )
    exclude: list[str] = Field(
        default=[],
        description=(
            "of an unquantized checkpoint, modules that stay as they are: names, containers or "
            "wildcards, as of nvfp4-pertoken convert --exclude"
        ),
    )

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "Options":
        """Read and check our part of vLLM's ``additional_config``.

        Raises:
            UnsupportedError: for an unknown key or a value that is not accepted.
        """
        section = (
            additional_config.get(ADDITIONAL_CONFIG_KEY, {})
            if isinstance(additional_config, Mapping)
            else {}
        )
        try:
            return cls.model_validate(section)
        except ValidationError as error:
            found = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or ADDITIONAL_CONFIG_KEY}: {item['msg']}"
                for item in error.errors()
            )
            known = "; ".join(
                f"{name} ({field.description}; default {field.default!r})"
                for name, field in cls.model_fields.items()
            )
            raise UnsupportedError(
                f"--additional-config has {ADDITIONAL_CONFIG_KEY} = {section!r}: {found}",
                expected=f"an object with the keys {known}",
                way_out="correct the key or leave it out",
            ) from None
