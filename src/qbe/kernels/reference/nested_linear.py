"""Reference of `qbe::nested_linear`: dequantise at each row's precision, multiply in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.format import scales
from qbe.format.layout import SliceLayout
from qbe.format.packing import unpack
from qbe.kernels.reference.activations import eight_bits, has_eight, weight_bits
from qbe.sites import FULL_BITS


def dequantise(
    packed: torch.Tensor, meta: torch.Tensor, exponent: int, slices: Sequence[int], in_features: int, bits: int
) -> torch.Tensor:
    """The weight at a precision of the store.

    Args:
        packed: uint8 [total_bits, N*Kp/8] (`qbe.format.packing`).
        meta: uint8 [2P, N, G] (`qbe.format.scales`).

    Returns:
        float32 [N, K].
    """
    layout = SliceLayout.of(slices)
    n, groups = meta.shape[1:]
    codes = unpack(packed, layout, n, bits).view(n, groups, -1)
    scale, offset = scales.decode(meta, exponent, layout, bits)
    return ((codes.float() - offset[..., None]) * scale[..., None]).view(n, -1)[:, :in_features]


def nested_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    meta: torch.Tensor,
    bits: torch.Tensor,
    original: torch.Tensor | None,
    bias: torch.Tensor | None,
    slices: Sequence[int],
    exponent: int,
) -> torch.Tensor:
    """y[r] = x[r] @ W(bits[r]).T + bias, in float32, returned in x's dtype. Arguments as the custom op's.

    Rows of 8-bit activations are rounded to them first (`eight_bits`), whatever the weight's bits.
    """
    layout = SliceLayout.of(slices)
    rows = x.reshape(-1, x.shape[-1])
    eight, bits = has_eight(bits), weight_bits(bits)
    if eight.any():
        group_size = packed.shape[1] * 8 // meta.shape[1] // meta.shape[2]
        rows = torch.where(eight[:, None], eight_bits(rows, group_size), rows.float())
    y = torch.empty(rows.shape[0], meta.shape[1], dtype=torch.float32, device=x.device)
    for b in bits.unique().tolist():
        indices = (bits == b).nonzero().flatten()
        if b >= FULL_BITS:
            if original is None:
                raise RuntimeError("a row asks for 16 bits, but this weight was stored without its 16-bit original")
            weight = original.to(x.device).float()
        else:
            p = layout.precisions[layout.index(b)]
            weight = dequantise(packed, meta, exponent, slices, x.shape[-1], p)
        y[indices] = rows[indices].float() @ weight.T
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], -1)
