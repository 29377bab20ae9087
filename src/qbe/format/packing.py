"""Codes <-> the packed buffer. The inverse pair that defines the layout; the oracle of every kernel's unpacking."""

from __future__ import annotations

import torch

from qbe.format.layout import BLOCK, SliceLayout


def pack(codes: torch.Tensor, layout: SliceLayout) -> torch.Tensor:
    """Packs codes into slices.

    Args:
        codes: uint8 [N, Kp], each below 2**total_bits; Kp a multiple of 64.

    Returns:
        uint8 [total_bits, N * Kp / 8]; the part at bit `first` of width w is rows first..first+w, seen as [N, Kp*w/8].
    """
    n, k = codes.shape
    packed = torch.empty(layout.total_bits, n * k // 8, dtype=torch.uint8, device=codes.device)
    for first, width in layout.parts:
        shift = layout.total_bits - first - width
        fields = (codes >> shift) & ((1 << width) - 1)
        fields = fields.view(n, k // BLOCK, 8 // width, 8 * width)  # [.., field j, byte u]
        part = torch.zeros(n, k // BLOCK, 8 * width, dtype=torch.uint8, device=codes.device)
        for j in range(8 // width):
            part |= fields[:, :, j] << (j * width)
        packed[first : first + width] = part.view(width, -1)
    return packed


def unpack(packed: torch.Tensor, layout: SliceLayout, out_features: int, bits: int) -> torch.Tensor:
    """Reads the codes at `bits` (a precision of the layout) and touches no slice above it.

    Returns:
        uint8 [N, Kp]: the first `bits` bits of each code.
    """
    blocks = packed.shape[1] * 8 // out_features // BLOCK
    codes = torch.zeros(out_features, blocks, BLOCK, dtype=torch.uint8, device=packed.device)
    for first, width in layout.parts:
        if first >= bits:
            break
        part = packed[first : first + width].reshape(out_features, blocks, 1, 8 * width)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
        fields = (part >> shifts) & ((1 << width) - 1)
        codes |= fields.reshape(out_features, blocks, BLOCK) << (bits - first - width)
    return codes.view(out_features, -1)


def of_rows(packed: torch.Tensor, layout: SliceLayout, out_features: int, rows: slice) -> torch.Tensor:
    """The packed buffer of some rows [n, Kp], uint8 [total_bits, n * Kp / 8]."""
    parts = [packed[first : first + width].reshape(out_features, -1)[rows] for first, width in layout.parts]
    return torch.cat([p.reshape(width, -1) for p, (_, width) in zip(parts, layout.parts, strict=True)])


def to_blocks(packed: torch.Tensor, layout: SliceLayout, out_features: int) -> torch.Tensor:
    """A view of the packed buffer by output and block, so that rows and columns can be cut out of it.

    Args:
        packed: uint8 [total_bits, N * Kp / 8].

    Returns:
        uint8 [N, Kp / 64, 8 * total_bits]: each block's bytes, most significant part first.
    """
    parts = [packed[first : first + width].reshape(out_features, -1, 8 * width) for first, width in layout.parts]
    return torch.cat(parts, dim=-1)


def from_blocks(blocks: torch.Tensor, layout: SliceLayout) -> torch.Tensor:
    """The inverse of `to_blocks`."""
    widths = [8 * width for _, width in layout.parts]
    parts = [part.reshape(width // 8, -1) for part, width in zip(blocks.split(widths, dim=-1), widths, strict=True)]
    return torch.cat(parts)
