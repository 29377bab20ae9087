"""The rotation of quantised keys and values, written out: a Hadamard matrix on blocks of a head's numbers, between
signs.

It spreads what a few channels carry over all of them. Rotating a key and a query alike leaves their product as it is;
a sum of rotated values is the sum of the values, rotated. Pages are rotated when they are quantised, a query when it
meets them, and a sum when it has passed them. No weight could hold this: keys go through rotary embeddings after their
projection, and weights at 16 bits are the checkpoint's own.
"""

from __future__ import annotations

import torch


def rotation(dim: int, signs: bool = True) -> torch.Tensor:
    """float64 `[dim, dim]`: orthonormal, symmetric, its own inverse.

    Blocks have the largest power of two that divides `dim`: n of 128 for 128, five of 16 for 80. Entry (i, j) of one is
    (-1)^p / sqrt(n), p the parity of the bits of i & j and, with signs, of those of i & i/2 and j & j/2: the signs of
    Rudin and Shapiro, with which constant and alternating keys are spread evenly, too.
    """
    n = dim & -dim
    i = torch.arange(n)
    flips = i & i >> 1 if signs else torch.zeros_like(i)
    parity = (i[:, None] & i) ^ flips[:, None] ^ flips
    for shift in (32, 16, 8, 4, 2, 1):
        parity = parity ^ parity >> shift
    block = (1.0 - 2 * (parity & 1).double()) / n**0.5
    return torch.block_diag(*[block] * (dim // n))


def rotate(x: torch.Tensor, signs: bool = True) -> torch.Tensor:
    """`x` `[..., dim]` rotated, in its own dtype; once more gives it back."""
    return x @ rotation(x.shape[-1], signs).to(x)
