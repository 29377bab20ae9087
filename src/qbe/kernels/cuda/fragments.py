"""The packed buffer as the CUDA kernels read it: codes in the order of the fragments of mma and register-source wgmma.

Made once from the canonical layout (`qbe.format.layout`) when a weight is placed on a GPU: one uint8 buffer, told from
the others by its three dimensions [1, 1, bytes]. N is padded to 64, K to whole groups, by zeros. It holds

    planes  of 4, 2 and 2 bits, most significant first, those that the precisions present need: [N/64, K/64, 4 warps,
            32 lanes, 16 bytes] the 4-bit plane, 8 bytes of a lane each 2-bit plane. A warp has 16 outputs; lane
            4*g + t has, of each step of 16 inputs, four pairs: pair j is output g + 8 * (j % 2), inputs
            2*t + 8 * (j // 2) and the next one: register a_j of m16n8k16. In the 4-bit plane the 32-bit word s is
            step s, pair j at bits 4*j and 16 + 4*j. In a 2-bit plane the word s // 2 has steps s and s + 1, pair
            p = 4 * (s % 2) + j at bits 2*p and 16 + 2*p. So `(word >> shift) & mask` is two values of a register.
    scales  [N/64, K/group, pairs, 8 g, 4 warps, 2 (output g, output g + 8), 2 bytes]: the pairs of
            `qbe.format.scales`: scale and zero point, then ratio and offset of each lower precision, ascending.
    counts  int32 [N/64], zero between launches: how many parts of a split sum have arrived. They belong to the
            weight, so that a CUDA graph needs no zeroed workspace; two streams must not multiply by one weight at once.

A run of inputs of 64 outputs is contiguous in every region: a bulk copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qbe.errors import QBEError
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack, unpack

SLICES = (4, 2, 2)  # the one layout of codes that there are fragments of
GROUPS = (64, 128)  # group sizes
TILE = 64  # outputs of a block
BLOCK = 64  # inputs of a block


class Regions(NamedTuple):
    """Where in the buffer each region begins, in bytes; all are multiples of 16 but the end."""

    planes: tuple[int, ...]
    scales: int
    counts: int
    end: int
    rows: int  # outputs and inputs after padding
    inputs: int
    pairs: int  # of scales, a group


def padded_shape(n: int, k: int, group_size: int) -> tuple[int, int]:
    """Outputs and inputs after padding."""
    return -(-n // TILE) * TILE, -(-k // group_size) * group_size


def regions(n: int, k: int, group_size: int, precisions: Sequence[int] = (4, 6, 8)) -> Regions:
    """Of a weight [n, k] of which these precisions are present: (4,), (4, 6) or (4, 6, 8).

    Raises:
        QBEError: other precisions.
    """
    if tuple(precisions) not in ((4,), (4, 6), (4, 6, 8)):
        raise QBEError(f"no layout of fragments has the precisions {tuple(precisions)}: give (4,), (4, 6) or (4, 6, 8)")
    rows, inputs = padded_shape(n, k, group_size)
    pairs = 1 + sum(bits < 8 for bits in precisions)
    starts, end = [], 0
    for width in SLICES[: len(precisions)]:
        starts.append(end)
        end += rows * inputs * width // 8
    counts = end + rows * inputs // group_size * 2 * pairs
    return Regions(tuple(starts), end, counts, counts + rows // TILE * 4, rows, inputs, pairs)


def is_fragments(packed: torch.Tensor) -> bool:
    """Whether a weight's codes are in this layout."""
    return packed.dim() == 3


def to_fragments(
    packed: torch.Tensor,
    meta: torch.Tensor,
    layout: SliceLayout,
    in_features: int,
    precisions: Sequence[int] = (4, 6, 8),
) -> torch.Tensor | None:
    """The canonical buffer (uint8 [8, N*Kp/8]) and meta (uint8 [6, N, G]) -> uint8 [1, 1, bytes], on their device.

    Args:
        precisions: those to keep.

    Returns:
        None for slices and group sizes that the layout is not made for.
    """
    n, groups = meta.shape[1:]
    if layout.slices != SLICES or n == 0 or groups == 0:
        return None
    kp = packed.shape[1] * 8 // n
    group_size = kp // groups
    if group_size not in GROUPS:
        return None
    places = regions(n, in_features, group_size, precisions)
    out = torch.zeros(places.end, dtype=torch.uint8, device=packed.device)
    codes = torch.zeros(places.rows, places.inputs, dtype=torch.uint8, device=packed.device)
    codes[:n, :kp] = unpack(packed, layout, n, 8)
    # tile, w, h, g, block, s, kk, t, e
    blocks = codes.view(places.rows // TILE, 4, 2, 8, places.inputs // BLOCK, 4, 2, 4, 2)
    high = (blocks >> 4).permute(0, 4, 1, 3, 7, 5, 8, 6, 2)  # tile, block, w, g, t, s, e, kk, h
    _put(out, places.planes[0], high[..., 0] | high[..., 1] << 4)
    for start, shift in zip(places.planes[1:], (2, 0), strict=False):
        pairs = ((blocks >> shift) & 3).unflatten(5, (2, 2))  # tile, w, h, g, block, s // 2, s % 2, kk, t, e
        low = pairs.permute(0, 4, 1, 3, 8, 5, 9, 6, 7, 2)  # tile, block, w, g, t, s // 2, e, s % 2, kk, h
        byte = torch.zeros_like(low[..., 0, 0])
        for kk in range(2):
            for h in range(2):
                byte |= low[..., kk, h] << (2 * h + 4 * kk)
        _put(out, start, byte)
    scales = torch.zeros(places.pairs, 2, places.rows, groups, dtype=torch.uint8, device=packed.device)
    scales[:, :, :n] = meta.view(-1, 2, n, groups)[: places.pairs]
    scales = scales.view(places.pairs, 2, places.rows // TILE, 4, 2, 8, groups).permute(2, 6, 0, 5, 3, 4, 1)
    _put(out, places.scales, scales)
    return out.view(1, 1, -1)


def _put(out: torch.Tensor, start: int, values: torch.Tensor) -> None:
    out[start : start + values.numel()] = values.reshape(-1)


def group_size_of(fragments: torch.Tensor, n: int, k: int, precisions: Sequence[int] = (4, 6, 8)) -> int:
    """The group size a buffer was made for.

    Raises:
        QBEError: a buffer of another shape.
    """
    for group_size in GROUPS:
        if fragments.numel() == regions(n, k, group_size, precisions).end:
            return group_size
    raise QBEError(f"a buffer of {fragments.numel()} bytes does not hold fragments of a weight of shape ({n}, {k})")


def codes_of(fragments: torch.Tensor, n: int, k: int, precisions: Sequence[int] = (4, 6, 8)) -> torch.Tensor:
    """The 8-bit codes [n, K padded to groups], uint8; bits of planes that are not present are 0."""
    layout = regions(n, k, group_size_of(fragments, n, k, precisions), precisions)
    flat = fragments.reshape(-1)
    tiles, blocks = layout.rows // TILE, layout.inputs // BLOCK
    codes = torch.zeros(tiles, blocks, 4, 8, 4, 4, 2, 2, 2, dtype=torch.uint8, device=flat.device)
    # tile, block, w, g, t, s, e, kk, h
    plane = flat[: layout.rows * layout.inputs // 2].view(tiles, blocks, 4, 8, 4, 4, 2, 2)
    codes[..., 0], codes[..., 1] = (plane & 15) << 4, plane & 240
    for start, shift in zip(layout.planes[1:], (2, 0), strict=False):
        plane = flat[start : start + layout.rows * layout.inputs // 4].view(tiles, blocks, 4, 8, 4, 2, 2, 2)
        plane = plane.transpose(-1, -2).flatten(5, 6)  # tile, block, w, g, t, s, e
        for kk in range(2):
            for h in range(2):
                codes[..., kk, h] |= ((plane >> (2 * h + 4 * kk)) & 3) << shift
    return codes.permute(0, 2, 8, 3, 1, 5, 7, 4, 6).reshape(layout.rows, layout.inputs)[:n]


def meta_of(fragments: torch.Tensor, n: int, k: int, precisions: Sequence[int] = (4, 6, 8)) -> torch.Tensor:
    """The pairs of scales in the canonical order, uint8 [2 * pairs, n, G]."""
    layout = regions(n, k, group_size_of(fragments, n, k, precisions), precisions)
    groups = (layout.counts - layout.scales) // (2 * layout.pairs * layout.rows)
    scales = fragments.reshape(-1)[layout.scales : layout.counts].view(
        layout.rows // TILE, groups, layout.pairs, 8, 4, 2, 2
    )
    return scales.permute(2, 6, 0, 4, 5, 3, 1).reshape(2 * layout.pairs, layout.rows, groups)[:, :n]


def from_fragments(fragments: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of `to_fragments` for all precisions: the canonical buffer, uint8 [8, N*Kp/8], on the same device."""
    return pack(codes_of(fragments, n, k).contiguous(), SliceLayout(SLICES))
