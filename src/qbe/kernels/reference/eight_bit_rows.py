"""Reference of long products in a native 8-bit format: both sides in 8 bits with a scale per row.

A prompt with 8-bit activations that has a step to itself is multiplied this way where the hardware has such products
and the site bears it (`qbe.sites.SiteTable.native`). E4M3 has 3 bits of mantissa: a value is off by at most 2**-4 of
itself, and by 2**-10 of the scale where it is below 2**-6 of it. int8 is off by at most half a scale.
"""

from __future__ import annotations

import torch

from qbe.hardware import NumberFormat

DTYPES = {str(NumberFormat.FP8_E4M3): torch.float8_e4m3fn, str(NumberFormat.INT8): torch.int8}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def eight_bit_rows(
    x: torch.Tensor, dtype: torch.dtype, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in 8 bits with a scale per row.

    Args:
        x: float [R, K].
        dtype: float8_e4m3fn or int8.
        largest: float32 [R], a bound of each row's magnitudes; None takes the largest there is.

    Returns:
        dtype [R, K] and float32 [R, 1]: their product is x.
    """
    x = x.float()
    largest = x.abs().amax(-1) if largest is None else largest
    largest = largest.clamp_min(1e-30)[:, None]
    # A division, which a number over a tensor is not: E4M3 has so few values that exact ties are common.
    q = x * torch.full_like(largest, LARGEST[dtype]).div(largest)
    return (torch.floor(q + 0.5) if dtype == torch.int8 else q).to(dtype), largest / LARGEST[dtype]


def linear(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, largest: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T, both rounded row by row, in float32.

    Args:
        x: float [M, K].
        weight: float [N, K].
        largest: float32 [N], a bound of the magnitudes of each row of the weight.
    """
    (a, scale_a), (b, scale_b) = eight_bit_rows(x, dtype), eight_bit_rows(weight, dtype, largest)
    return (a.float() @ b.float().T) * scale_a * scale_b.T
