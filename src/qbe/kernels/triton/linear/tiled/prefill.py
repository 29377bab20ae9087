"""A long prompt whose rows may differ: each precision in use is dequantised once and multiplied for its rows.

Rows known to be alike take `uniform`, which is faster.
"""

from __future__ import annotations

import torch
import triton

from qbe.format.layout import SliceLayout
from qbe.kernels.triton.linear.tiled.dense_kernel import dense_kernel, dequantise_kernel
from qbe.kernels.triton.linear.tiled.layout import TILE, group_size_of, padded_shape
from qbe.sites import FULL_BITS

CHUNK_ROWS = 8192  # rows of one launch
_ANY = 2**30  # beyond every width


def prefill(
    x: torch.Tensor,
    tiled: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    layout: SliceLayout,
    exponent: int,
    y: torch.Tensor,
) -> None:
    """y = x @ W(bits).T + bias; the launches do not depend on the bits.

    Args:
        x: float16 or bfloat16 [M, K], contiguous; rows of 8-bit activations are rounded already.
        tiled: uint8 [bytes] (`qbe.kernels.triton.linear.tiled.layout`).
        bits: int32 [M], words of precision.
        original: [N, K] in x's dtype for rows at 16 bits; None serves them by the widest slice.
        y: [M, N] in x's dtype or float32, contiguous; written.
    """
    k, n = x.shape[1], y.shape[1]
    rows, inputs = padded_shape(n, k, layout)
    weight = torch.empty(rows, inputs, dtype=x.dtype, device=x.device)
    tile = {"BM": 128, "BN": 256, "BK": 64, "STAGES": 3, "EVEN": k % 64 == 0, "KSTEPS": -(-k // 64), "num_warps": 8}
    top = FULL_BITS if original is not None else _ANY
    bounds = (-_ANY, *layout.precisions[1:], top)
    for first in range(0, x.shape[0], CHUNK_ROWS):
        x_part, y_part, precision_words = (t[first : first + CHUNK_ROWS] for t in (x, y, bits))
        m = x_part.shape[0]
        grid = (-(-n // 256) * -(-m // 128),)
        for p in range(len(layout.precisions)):
            low, high = bounds[p], bounds[p + 1]
            dequantise_kernel[(rows // TILE, inputs // 256)](
                tiled, precision_words, weight, None, None, m, rows, inputs, exponent, low, high, 0,
                ROWS=triton.next_power_of_2(m), TOP=p, LARGEST=None, PRECISIONS=layout.precisions,
                PARTS=layout.needed_parts, GROUP=group_size_of(tiled, n, k, layout), ASM=x.device.type == "cuda",
            )  # fmt: skip
            dense_kernel[grid](x_part, weight, precision_words, bias, y_part, m, n, k, inputs, low, high, **tile)
        if original is not None:
            dense_kernel[grid](x_part, original, precision_words, bias, y_part, m, n, k, k, top, _ANY, **tile)
