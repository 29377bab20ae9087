"""A long product whose rows all read the same word: the weight is made once, and a library multiplies.

With 16-bit activations cuBLAS does, in x's dtype. With 8 the weight says which native format it bears, E4M3 or int8,
both sides with a scale per row. Without one, or at 16 bits, the product is that of 16-bit activations: rounding them
first would make it worse and no faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.format.layout import SliceLayout
from qbe.kernels.reference.activations import EIGHT
from qbe.kernels.triton.linear.eight_bit_rows import eight_bit_rows
from qbe.kernels.triton.linear.tiled.dequantise import dequantise
from qbe.kernels.triton.linear.tiled.layout import TILE, padded_shape
from qbe.sites import FULL_BITS

CACHED_BYTES = 32 << 20  # of the weight made at once: what a GPU's L2 cache holds until it is multiplied
LEAST_OUTPUTS = 2048  # made at once: a product of fewer does not fill the GPU


def uniform_linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    slices: Sequence[int],
    exponent: int,
    n: int,
    precision_word: int,
    native: torch.dtype | None = None,
    float32_output: bool = False,
) -> torch.Tensor | None:
    """y = x @ W(word).T + bias.

    Args:
        x: float16, bfloat16 or float32 [..., K].
        tiled: uint8 [bytes] (`qbe.kernels.triton.linear.tiled.layout`).
        bits: int32 [rows of x], all of them `precision_word`.
        original: [n, K], what 16 bits mean; None serves them by the widest precision.
        bias: [n] or None.
        native: float8_e4m3fn or int8, what a product of 8-bit activations is multiplied in; None where it is not.
        float32_output: give float32, rounded to x's dtype by nobody but E4M3's library.

    Returns:
        [..., n] in x's dtype or float32; None where the original that the word names is not on x's device in x's
        dtype.
    """
    layout = SliceLayout.of(slices)
    k = x.shape[-1]
    weight_bits, eight = precision_word & 255, precision_word >> 8 == EIGHT
    whole = original if weight_bits >= FULL_BITS else None
    if whole is not None and (whole.device != x.device or whole.dtype != x.dtype):
        return None
    precision = max((i for i, p in enumerate(layout.precisions) if p <= weight_bits), default=0)
    dtype = native if native is not None and eight and x.dtype != torch.float32 else x.dtype
    rows = x.reshape(-1, k).contiguous()
    if whole is not None:
        if float32_output:
            y = _wide_product(rows, whole)
            return (y if bias is None else y + bias).view(*x.shape[:-1], n)
        return torch.nn.functional.linear(rows, whole, bias).view(*x.shape[:-1], n)
    padded, inputs = padded_shape(n, k, layout)
    converted = eight_bit_rows(rows, inputs, dtype) if dtype != x.dtype else None
    y = torch.empty(rows.shape[0], n, dtype=torch.float32 if float32_output else x.dtype, device=x.device)
    step = max(LEAST_OUTPUTS, CACHED_BYTES // (inputs * dtype.itemsize) // TILE * TILE)
    for first in range(0, padded, step):
        count = min(step, padded - first)
        weight, scales = dequantise(tiled, bits, n, k, layout, exponent, precision, dtype, first, count)
        part = y[:, first : first + count]
        if converted is None and float32_output:
            part.copy_(_wide_product(rows, weight[: part.shape[1], :k]))
        elif converted is None:
            torch.mm(rows, weight[: part.shape[1], :k].t(), out=part)
        else:
            assert scales is not None
            part.copy_(eight_bit_product(*converted, weight, scales, y.dtype)[:, : part.shape[1]])
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], n)


def _wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32."""
    if x.dtype == torch.float32 or not x.is_cuda:  # torch's CPU product has no other result than its input
        return x.float() @ weight.float().t()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def eight_bit_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(x * x_scales) @ (weight * scales).T by the library that has it.

    Args:
        x: float8_e4m3fn or int8 [M, K]; K a multiple of 16.
        x_scales: float32 [M, 1].
        weight: of x's dtype [N, K]; N a multiple of 16.
        scales: float32 [N].

    Returns:
        dtype [M, N].
    """
    if x.dtype == torch.int8:
        return (torch._int_mm(x, weight.t()).float() * x_scales * scales).to(dtype)
    # Rowwise scales give bfloat16 everywhere; other results not on every device and version.
    y = torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=scales[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return y.to(dtype)
