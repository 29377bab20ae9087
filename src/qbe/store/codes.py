"""From a weight matrix to nested codes: round to nearest at the widest precision, refit every lower one.

For each group a few clipping ranges are tried (steps of the widest scale's own grid) and the one with the least
weighted squared error over all precisions is kept. A bit more divides the error by four and doubles its weight:
low precisions may tighten the range, but not at the cost of ruining the widest one.
Calibration from data is a later stage; this one needs none.
"""

from __future__ import annotations

import torch

from qbe.errors import QBEError
from qbe.store import scales
from qbe.store.layout import SliceLayout, check_group_size, padded

CLIP_STEPS = (0, 1, 2, 3, 4, 6)  # grid steps of about 4.4 % below the range that clips nothing
CHUNK = 1 << 20  # weights handled at once: temporaries stay in cache and memory stays flat


def quantise(weight: torch.Tensor, layout: SliceLayout, group_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Nested codes of a weight matrix.

    Args:
        weight: float [N, K].

    Returns:
        codes uint8 [N, Kp], meta uint8 [2P, N, G] and the matrix's scale exponent (`qbe.store.scales`).

    Raises:
        QBEError: not a matrix, NaN or infinity in it, or a group size that is no multiple of 64.
    """
    check_group_size(group_size)
    if weight.dim() != 2:
        raise QBEError(f"only matrices can be nested, not a tensor of shape {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise QBEError("the weight holds NaN or infinity; the checkpoint is damaged, fetch it again")
    n, k = weight.shape
    kp = padded(k, group_size)
    groups, levels = kp // group_size, 2**layout.total_bits - 1
    count = torch.full((groups,), float(group_size), device=weight.device)
    count[-1] -= kp - k

    largest = 0.0
    rows = max(1, CHUNK // kp)
    for part in weight.split(rows):
        g = _grouped(part, kp, groups)
        span = g.amax(-1).clamp_min(0) - g.amin(-1).clamp_max(0)
        largest = max(largest, float(span.max()) / levels if span.numel() else 0.0)
    exponent = scales.exponent_for(largest)

    codes = torch.empty(n, kp, dtype=torch.uint8, device=weight.device)
    meta = torch.empty(2 * len(layout.precisions), n, groups, dtype=torch.uint8, device=weight.device)
    for i, part in enumerate(weight.split(rows)):
        at = slice(i * rows, i * rows + part.shape[0])
        c, m = _quantise_rows(_grouped(part, kp, groups), layout, exponent, levels, count)
        codes[at], meta[:, at] = c.view(part.shape[0], kp), m
    return codes, meta, exponent


def _grouped(part: torch.Tensor, kp: int, groups: int) -> torch.Tensor:
    w = torch.nn.functional.pad(part.float(), (0, kp - part.shape[1]))
    return w.view(part.shape[0], groups, -1)


def _quantise_rows(
    w: torch.Tensor, layout: SliceLayout, exponent: int, levels: int, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, G, g] and meta [2P, n, G] of the rows w [n, G, g]: the best of the clipping steps, group by group."""
    low, high = w.amin(-1).clamp_max(0), w.amax(-1).clamp_min(0)
    span = high - low
    zero = (levels * -low / span.clamp_min(1e-30)).round().clamp(0, levels)
    unclipped = scales.encode_scale(span / levels, exponent)
    inside = torch.arange(w.shape[-1], device=w.device) < count.view(-1, 1)  # [G, g], false in padding

    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for step in CLIP_STEPS:
        scale_code = (unclipped - step).clamp_min(0)
        scale = scales.decode_scale(scale_code, exponent)
        codes = ((w / scale[..., None]).round_() + zero[..., None]).clamp_(0, levels)
        planes = [scale_code, zero.to(torch.int32)]
        error = torch.zeros_like(scale)
        for bits in layout.precisions:
            shift = layout.total_bits - bits
            if shift:
                cut = torch.where(inside, (codes / 2**shift).floor_(), 0)
                ratio, offset = scales.refit(w, cut, scale, zero, shift, count)
                planes += [ratio, offset]
                at = scale * 2**shift * (1 + ratio / scales.RATIO_STEP)
                mid = scales.nominal_offset(zero, shift) + offset / scales.OFFSET_STEP
                off = cut.sub_(mid[..., None]).mul_(at[..., None]).sub_(w)
            else:
                off = (codes - zero[..., None]).mul_(scale[..., None]).sub_(w)
            importance = 2.0 ** (bits - layout.precisions[0])
            error += torch.where(inside, off, 0).square_().sum(-1) * importance
        meta = (torch.stack(planes) & 255).to(torch.uint8)
        if best is None:
            best = error, codes.to(torch.uint8), meta
        else:
            wins = error < best[0]
            best = (
                torch.where(wins, error, best[0]),
                torch.where(wins[..., None], codes.to(torch.uint8), best[1]),
                torch.where(wins, meta, best[2]),
            )
    assert best is not None
    return best[1], best[2]
