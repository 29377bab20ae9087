"""A whole weight at one precision, from the tiled layout: for prefill, where every row reads the same bits."""

from __future__ import annotations

import torch

from qbe.kernels.triton.layout import TILE, group_size_of, padded_shape
from qbe.kernels.triton.tiled_linear import _parts
from qbe.kernels.triton.tiled_rows_kernel import dequantise_kernel
from qbe.store.layout import SliceLayout

_ANY = 2**30  # beyond every width: the kernel's bounds that ask for nothing


def dequantise(
    tiled: torch.Tensor, bits: torch.Tensor, n: int, k: int, layout: SliceLayout, exponent: int, precision: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The weight [n, k] at the precision of that index, in `dtype` (16-bit floats or float32).

    Args:
        tiled: uint8 [bytes] (`qbe.kernels.triton.layout`).
        bits: int32 [1] or longer on the device; its values do not matter.
    """
    rows, inputs = padded_shape(n, k, layout)
    weight = torch.empty(rows, inputs, dtype=dtype, device=tiled.device)
    dequantise_kernel[(rows // TILE, inputs // 256)](
        tiled, bits, weight, 1, rows, inputs, exponent, -_ANY, _ANY, ROWS=1, TOP=precision,
        PRECISIONS=layout.precisions, PARTS=_parts(layout), GROUP=group_size_of(tiled, n, k, layout),
        ASM=tiled.device.type == "cuda",
    )  # fmt: skip
    return weight[:n, :k]
