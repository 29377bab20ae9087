"""A whole weight at one precision, from the tiled layout: for prefill, where every row reads the same bits."""

from __future__ import annotations

import torch

from qbe.format.layout import SliceLayout
from qbe.kernels.triton.linear.eight_bit_rows import LARGEST
from qbe.kernels.triton.linear.tiled.dense_kernel import dequantise_kernel
from qbe.kernels.triton.linear.tiled.layout import TILE, group_size_of, largest_of_rows, padded_shape

_ANY = 2**30  # beyond every width: the kernel's bounds that ask for nothing


def dequantise(
    tiled: torch.Tensor, bits: torch.Tensor, n: int, k: int, layout: SliceLayout, exponent: int, precision: int,
    dtype: torch.dtype, first: int = 0, count: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Outputs of the weight at the precision of that index, padded to whole tiles and units.

    Args:
        tiled: uint8 [bytes] (`qbe.kernels.triton.linear.tiled.layout`).
        bits: int32 [1] or longer on the device; its values do not matter.
        dtype: a 16-bit float or float32, or float8_e4m3fn or int8 with a scale for each output.
        first, count: which outputs, multiples of 64; by itself all of them and the padding.

    Returns:
        dtype [count, kp], whose first k inputs are the weight and the rest finite, and of 8 bits the scales, float32
        [count].
    """
    rows, inputs = padded_shape(n, k, layout)
    count = rows if count is None else count
    weight = torch.empty(count, inputs, dtype=dtype, device=tiled.device)
    largest = scales = None
    if dtype in LARGEST:
        largest = largest_of_rows(tiled, n, k, layout)[precision, first : first + count]
        scales = torch.empty_like(largest)
    dequantise_kernel[(count // TILE, inputs // 256)](
        tiled, bits, weight, largest, scales, 1, rows, inputs, exponent, -_ANY, _ANY, first // TILE, ROWS=1,
        TOP=precision, PRECISIONS=layout.precisions, PARTS=layout.needed_parts,
        GROUP=group_size_of(tiled, n, k, layout), LARGEST=LARGEST.get(dtype), ASM=tiled.device.type == "cuda",
    )  # fmt: skip
    return weight, scales
