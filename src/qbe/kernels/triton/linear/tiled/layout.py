"""The packed buffer as the GPU kernels read it: tiles of 64 outputs, runs of 64 bytes, scales beside each other.

Made once from the canonical layout (`qbe.format.layout`), when a weight is placed on a GPU. One flat uint8 buffer, told
from the canonical one by its single dimension, holds, with N and K padded to whole tiles and units by zeros:

    parts   [N/64, K*w/512, 64, 64] each, most significant first: a run of 64 bytes of one output; bits [j*w, j*w+w) of
            byte u of run t belong to input (t*8/w + j)*64 + u. One shift and one mask give 64 inputs of one group.
    meta    [P, N/64, K/256, 64, 256/group_size, 2]: scale and zero point, then ratio and offset of each lower
            precision: the pairs of an output for 256 inputs are one word of 4 or 8 bytes.
    largest float32 [P, N]: a bound of the magnitudes of each output's weights (`qbe.format.scales.largest_of_rows`).
    counts  int32 [N/16], zero between launches: how many parts of a split sum have arrived. They belong to the weight,
            so that a CUDA graph needs no workspace; two streams must not multiply by one weight at once.
"""

from __future__ import annotations

import torch

from qbe.errors import QBEError
from qbe.format import scales
from qbe.format.layout import SliceLayout
from qbe.format.packing import pack, unpack

RUN = 64  # bytes of one output in a run
TILE = 64  # outputs of a tile
SCALE_WORD_INPUTS = 256  # inputs that share a word of meta
GROUPS = (64, 128)  # group sizes the layout is made for


def unit(layout: SliceLayout) -> int:
    """Inputs after which every part is at the start of a run and meta at a word: the step of the kernels."""
    return max(SCALE_WORD_INPUTS, 8 * RUN // min(part.width for part in layout.parts))


def padded_shape(n: int, k: int, layout: SliceLayout) -> tuple[int, int]:
    """Outputs and inputs after padding."""
    step = unit(layout)
    return -(-n // TILE) * TILE, -(-k // step) * step


def _sizes(n: int, k: int, layout: SliceLayout, group_size: int) -> tuple[int, int, int, int]:
    """Bytes of the parts, of meta, of the bounds and of the counts."""
    rows, inputs = padded_shape(n, k, layout)
    p = len(layout.precisions)
    return layout.total_bits * rows * inputs // 8, p * rows * inputs // group_size * 2, p * rows * 4, rows // 4


def tiled_bytes(n: int, k: int, layout: SliceLayout, group_size: int) -> int:
    """Size of the buffer of a weight [n, k]; the last `padded n / 4` bytes are its counts."""
    return sum(_sizes(n, k, layout, group_size))


def group_size_of(tiled: torch.Tensor, n: int, k: int, layout: SliceLayout) -> int:
    """The group size a tiled buffer was made for.

    Raises:
        QBEError: a buffer of another shape or layout.
    """
    for group_size in GROUPS:
        if tiled.numel() == tiled_bytes(n, k, layout, group_size):
            return group_size
    raise QBEError(f"a tiled buffer of {tiled.numel()} bytes does not hold a weight of shape ({n}, {k})")


def largest_of_rows(tiled: torch.Tensor, n: int, k: int, layout: SliceLayout) -> torch.Tensor:
    """The bounds, float32 [P, N], N padded to whole tiles."""
    rows, p = padded_shape(n, k, layout)[0], len(layout.precisions)
    end = tiled.numel() - rows // 4
    return tiled[end - p * rows * 4 : end].view(torch.float32).view(p, rows)


def to_device_layout(
    packed: torch.Tensor, meta: torch.Tensor, layout: SliceLayout, in_features: int, exponent: int
) -> torch.Tensor | None:
    """The canonical buffer (uint8 [total_bits, N*Kp/8]) and meta (uint8 [2P, N, G]) -> uint8 [bytes], on their device.

    Returns:
        None where the tiled layout does not fit (a group size other than 64 and 128): keep the canonical one.
    """
    n, groups = meta.shape[1:]
    if n == 0 or groups == 0:
        return None
    kp = packed.shape[1] * 8 // n
    group_size = kp // groups
    if group_size not in GROUPS:
        return None
    rows, inputs = padded_shape(n, in_features, layout)
    codes_bytes, meta_bytes, *rest = _sizes(n, in_features, layout, group_size)
    out = torch.zeros(codes_bytes + meta_bytes + sum(rest), dtype=torch.uint8, device=packed.device)
    codes = torch.zeros(rows, inputs, dtype=torch.uint8, device=packed.device)
    codes[:n, :kp] = unpack(packed, layout, n, layout.total_bits)
    for first, width in layout.parts:
        fields = (codes >> (layout.total_bits - first - width)) & ((1 << width) - 1)
        fields = fields.view(rows // TILE, TILE, -1, 8 // width, RUN)
        part = torch.zeros_like(fields[:, :, :, 0])
        for j in range(8 // width):
            part |= fields[:, :, :, j] << (j * width)
        begin = first * rows * inputs // 8
        out[begin : begin + width * rows * inputs // 8] = part.transpose(1, 2).reshape(-1)
    p = len(layout.precisions)
    wide = torch.zeros(p, 2, rows, inputs // group_size, dtype=torch.uint8, device=packed.device)
    wide[:, :, :n, :groups] = meta.view(p, 2, n, groups)
    wide = wide.view(p, 2, rows // TILE, TILE, inputs // SCALE_WORD_INPUTS, SCALE_WORD_INPUTS // group_size).permute(
        0, 2, 4, 3, 5, 1
    )
    out[codes_bytes : codes_bytes + meta_bytes] = wide.reshape(-1)
    largest = largest_of_rows(out, n, in_features, layout)
    for i, bits in enumerate(layout.precisions):
        largest[i, :n] = scales.largest_of_rows(meta, exponent, layout, bits)
    return out


def from_device_layout(tiled: torch.Tensor, meta: torch.Tensor, layout: SliceLayout, in_features: int) -> torch.Tensor:
    """The inverse: the canonical buffer, uint8 [total_bits, N*Kp/8], on the same device."""
    n, groups = meta.shape[1:]
    kp = groups * group_size_of(tiled, n, in_features, layout)
    rows, inputs = padded_shape(n, in_features, layout)
    codes = torch.zeros(rows, inputs, dtype=torch.uint8, device=tiled.device)
    for first, width in layout.parts:
        begin = first * rows * inputs // 8
        part = tiled[begin : begin + width * rows * inputs // 8].view(rows // TILE, -1, TILE, RUN).transpose(1, 2)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=tiled.device).view(-1, 1)
        fields = (part[:, :, :, None] >> shifts) & ((1 << width) - 1)
        codes |= fields.reshape(rows, inputs) << (layout.total_bits - first - width)
    return pack(codes[:n, :kp].contiguous(), layout)
