"""Inputs that reach the corners of NVFP4: hypothesis strategies, shared by the format's tests."""

import torch
from hypothesis import strategies as st

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HALF_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
KINDS = ("normal", "blocks", "exponents", "ties")


def matrix(kind: str, rows: int, columns: int, dtype: torch.dtype, seed: int, decade: int):
    """[rows, columns] of finite numbers around 10**decade.

    ``normal``: one scale; ``blocks``: each block has its own, over 6 decades; ``exponents``: every
    element has; ``ties``: numbers on and halfway between the grid's, where rounding is decided.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "blocks":
        spread = torch.rand(rows, columns // 16, generator=generator) * 6 - 3
        x *= (10.0**spread).repeat_interleave(16, dim=1)
    elif kind == "exponents":
        x = x.sign() * 10.0 ** (torch.rand(rows, columns, generator=generator) * 12 - 6)
    elif kind == "ties":
        pick = torch.randint(len(_HALF_STEPS), (rows, columns), generator=generator)
        block = torch.randint(-8, 8, (rows, columns // 16), generator=generator).float()
        x = torch.tensor(_HALF_STEPS)[pick].copysign(x)
        x[:, ::16] = 6.0
        x *= torch.exp2(block).repeat_interleave(16, dim=1)
        x[:, 0] = 2688.0 * 2.0**7  # so that scales are powers of two and the ties stay ties
        return (x * 2.0 ** round(decade * 3.3)).clamp(*_limits(dtype)).to(dtype)
    return (x.double() * 10.0**decade).clamp(*_limits(dtype)).to(dtype)


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    return torch.finfo(dtype).min, torch.finfo(dtype).max


@st.composite
def matrices(draw, max_rows: int = 9, max_columns: int = 8192, special: bool = True):
    """Rows of every dtype, 1e-30 to 1e30 (float16: 1e-6 to 1e4), K from 16 on, odd M among them.

    ``special``: some have zeros, minus zeros, subnormals, the largest numbers, inf and NaN.
    """
    dtype = draw(st.sampled_from(DTYPES))
    decades = (-6, 4) if dtype == torch.float16 else (-30, 30)
    x = matrix(
        draw(st.sampled_from(KINDS)),
        draw(st.integers(1, max_rows)),
        16 * draw(st.integers(1, max_columns // 16)),
        dtype,
        draw(st.integers(0, 2**31)),
        draw(st.integers(*decades)),
    )
    if special:
        info = torch.finfo(dtype)
        values = (0.0, -0.0, info.smallest_normal, -info.smallest_normal * info.eps, info.max)
        values += (-info.max, torch.inf, -torch.inf, torch.nan, -torch.nan)
        for value in draw(st.lists(st.sampled_from(values), max_size=3)):
            row = draw(st.integers(0, x.shape[0] - 1))
            first = draw(st.integers(0, x.shape[1] - 1))
            count = draw(st.sampled_from((1, 16, x.shape[1])))
            x[row, first : first + count] = value
    return x
