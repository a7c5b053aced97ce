"""Scales as checkpoints have them: which ones are damaged, and what exporters mean by odd ones."""

import torch

__all__ = ["E4M3_NAN", "damaged_scales", "invert_", "zero_dead_blocks"]

# E4M3 bytes: sign, four bits of exponent, three of mantissa; all ones but the sign is NaN.
E4M3_NAN = 0x7F
_E4M3_MINUS_ZERO = 0x80


def zero_dead_blocks(scale_2: torch.Tensor, block_scale: torch.Tensor) -> None:
    """Zero the block scales of matrices whose ``weight_scale_2`` is 0, in place.

    ModelOpt writes an all-zero matrix with ``weight_scale_2`` 0 and NaN block scales: its value is
    zero, and 0 * NaN must not make it NaN.

    Args:
        scale_2: float32, any shape.
        block_scale: float8_e4m3fn or its bytes, of the same leading dimensions.
    """
    blocks = block_scale.view(torch.uint8)
    dead = (scale_2 == 0).reshape(scale_2.shape + (1,) * (blocks.ndim - scale_2.ndim))
    blocks.masked_fill_(dead, 0)


def invert_(scales: torch.Tensor) -> None:
    """compressed-tensors' ``weight_global_scale`` to ``weight_scale_2``, in place.

    Rounded to fp32 once, so within half an ulp of the inverse, and exact for powers of two. What
    is no positive, finite number becomes NaN, which is refused.

    Args:
        scales: float32, any shape.
    """
    usable = scales.isfinite() & (scales > 0)
    scales.copy_(torch.where(usable, scales.reciprocal(), torch.nan))


def damaged_scales(block_scale: torch.Tensor, keep: int = 0) -> torch.Tensor:
    """Whether block scales hold NaN or negative ones: bool, of the first ``keep`` dimensions."""
    blocks = block_scale.view(torch.uint8).flatten(keep)
    return (((blocks & E4M3_NAN) == E4M3_NAN) | (blocks > _E4M3_MINUS_ZERO)).any(-1)
