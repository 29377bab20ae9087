"""Scales and offsets of every precision in two bytes each: how they are coded and decoded.

A weight at precision b is scale_b * (code_b - offset_b), where code_b is the first b bits of the code. One bfloat16
pair per (group, precision) would cost 1.5 bits a weight at three precisions and group 64. Here it costs 0.75:

- the widest precision keeps an unsigned 8-bit float (4 exponent bits, 4 mantissa bits, one exponent bias per
  matrix) and an 8-bit zero point. The codes are rounded under this very scale, so its coarse grid costs range, not
  accuracy;
- each lower precision stores how far its refitted scale and offset lie from what truncation alone would give:
  a ratio in steps of 1/256 and an offset in steps of 1/64.

meta is uint8 [2P, N, G]: plane 0 the scale, 1 the zero point, then for the i-th lower precision (ascending) plane
2+2i the ratio and 3+2i the offset, both two's complement. Decoding is exact in float32 on every device.
"""

from __future__ import annotations

import torch

from qbe.format.layout import SliceLayout

RATIO_STEP = 256.0
OFFSET_STEP = 64.0
MAX_SCALE = 2.0**15 * (1 + 15 / 16)  # of code 255, before the matrix's exponent


def exponent_for(largest: float) -> int:
    """The matrix's float32 exponent field so that a scale of `largest` is still representable."""
    if not largest > 0:
        return 127 - 15
    exponent = 127 - 15
    while MAX_SCALE * 2.0 ** (exponent - 127) < largest and exponent < 254 - 15:
        exponent += 1
    while exponent > 1 and MAX_SCALE * 2.0 ** (exponent - 1 - 127) >= largest:
        exponent -= 1
    return exponent


def decode_scale(code: torch.Tensor, exponent: int) -> torch.Tensor:
    """uint8 -> float32: the code becomes the top mantissa and low exponent bits of a float."""
    return ((code.to(torch.int32) << 19) + (exponent << 23)).view(torch.float32)


def largest_of_rows(meta: torch.Tensor, exponent: int, layout: SliceLayout, bits: int) -> torch.Tensor:
    """A bound of the magnitudes of each row's weights at a precision of the layout, from scales and offsets alone.

    Groups are not clipped, so that their first and last codes nearly always occur: beyond the rounding of the scale
    (up to 1/16) it is the largest weight there is.

    Returns:
        float32 [N].
    """
    scale, offset = decode(meta, exponent, layout, bits)
    return (scale * torch.maximum(offset, 2**bits - 1 - offset)).amax(-1)


def encode_scale(scale: torch.Tensor, exponent: int) -> torch.Tensor:
    """float32 -> int32 in 0..255: the smallest code whose value is not below `scale`."""
    bits = scale.contiguous().view(torch.int32) - (exponent << 23)
    return ((bits + (1 << 19) - 1) >> 19).clamp(0, 255)


def nominal_offset(zero: torch.Tensor, shift: int) -> torch.Tensor:
    """Offset of a precision `shift` bits below the widest if each truncated code stood for the middle of its range."""
    return (zero.float() - (2**shift - 1) / 2) / 2**shift


def decode(meta: torch.Tensor, exponent: int, layout: SliceLayout, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset at a precision of the layout.

    Returns:
        float32 [N, G] each.
    """
    scale, zero = decode_scale(meta[0], exponent), meta[1]
    shift = layout.total_bits - bits
    if shift == 0:
        return scale, zero.float()
    i = layout.precisions.index(bits)
    ratio = 1 + meta[2 + 2 * i].view(torch.int8).float() / RATIO_STEP
    offset = nominal_offset(zero, shift) + meta[3 + 2 * i].view(torch.int8).float() / OFFSET_STEP
    return scale * 2**shift * ratio, offset


def refit(
    weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, shift: int, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least-squares scale and offset of the truncated codes, coded in a byte each.

    Args:
        weight: float32 [N, G, g], zero in padding.
        codes: float32 [N, G, g], already truncated, zero in padding.
        scale, zero: float32 [N, G] of the widest precision.
        shift: bits cut off.
        count: float32 [G], inputs of each group that are not padding.

    Returns:
        ratio and offset bytes as int8-valued int32 [N, G].
    """
    mean_w, mean_c = weight.sum(-1) / count, codes.sum(-1) / count
    variance = (codes * codes).sum(-1) / count - mean_c * mean_c
    covariance = (codes * weight).sum(-1) / count - mean_c * mean_w
    plain = scale * 2**shift
    slope = torch.where(variance > 1e-6, covariance / variance.clamp_min(1e-6), plain)
    ratio = ((slope / plain - 1) * RATIO_STEP).round().clamp(-128, 127)
    # The offset is fitted to the scale as it will be read, so the rounding of the ratio costs almost nothing.
    fitted = plain * (1 + ratio / RATIO_STEP)
    offset = (mean_c - mean_w / fitted - nominal_offset(zero, shift)) * OFFSET_STEP
    return ratio.to(torch.int32), offset.round().clamp(-128, 127).to(torch.int32)
