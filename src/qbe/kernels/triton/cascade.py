"""`qbe::cascade` on a GPU: one launch, a program for each row."""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.cascade_ops import DOWN, LEVELS, POINTS, UP, WHO, WIDTHS

_BLOCK = 256  # sites, or numbers of attention, at a time


def cascade(
    attended: torch.Tensor,
    entropy: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    words: torch.Tensor,
    steering: torch.Tensor,
    moves: torch.Tensor,
    thresholds: torch.Tensor,
    steps: torch.Tensor,
    layers: torch.Tensor,
    point: int,
    layer: int,
    sign: int,
    window: int,
    most: int,
) -> torch.Tensor:
    """Arguments as those of `qbe.kernels.cascade_ops.cascade`."""
    n, heads = entropy.shape
    out, width = torch.empty_like(attended), attended[0].numel()
    cascade_kernel[(n,)](
        attended, out, width, entropy, lengths, rows, words, steering, moves, thresholds, steps, layers,
        entropy.stride(0), words.stride(0), len(words), layer, sign, window, most,
        POINT=point, HEADS=heads, BH=triton.next_power_of_2(heads), BLOCK=_BLOCK, WHO=WHO, UP=UP, DOWN=DOWN,
        POINTS=POINTS, LEVELS=LEVELS, WIDTHS=WIDTHS, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["layer", "sign", "window", "most"])
def cascade_kernel(
    attended_ptr, out_ptr, width, entropy_ptr, lengths_ptr, rows_ptr, words_ptr, steering_ptr, moves_ptr,
    thresholds_ptr, steps_ptr, layers_ptr, entropy_row, words_row, sites, layer, sign, window, most,
    POINT: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr, WHO: tl.constexpr,
    UP: tl.constexpr, DOWN: tl.constexpr, POINTS: tl.constexpr, LEVELS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """A program serves one row."""
    i = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + i * width + at, tl.load(attended_ptr + i * width + at, mask=at < width), mask=at < width)
    row = i
    if rows_ptr is not None:
        row = tl.load(rows_ptr + i)
    done = tl.load(moves_ptr + row)
    if POINT == 0:
        done = done * 0
    steer = tl.load(steering_ptr + row)
    if (steer >> 8) == WHO:
        heads = tl.arange(0, BH)
        total = tl.sum(tl.load(entropy_ptr + i * entropy_row + heads, mask=heads < HEADS, other=0.0))
        seen = tl.load(lengths_ptr + i)
        seen = tl.where((window > 0) & (seen > window), window, seen)
        most_there_is = tl.log(tl.maximum(seen, 2).to(tl.float32))
        share = sign * (total / HEADS) / most_there_is
        limit = thresholds_ptr + 2 * (POINT * LEVELS + (steer & 255))
        up = share > tl.load(limit + 1)
        down = share < tl.load(limit)
        changes = 0
        for p in tl.static_range(POINTS):
            changes += (((done >> (2 * p)) & 3) != 0).to(tl.int32)
        if (up | down) & (changes < most):
            done = done | (tl.where(up, UP, DOWN) << (2 * POINT))
            side = up.to(tl.int32)
            for first in range(0, sites, BLOCK):
                site = first + tl.arange(0, BLOCK)
                later = (site < sites) & (tl.load(layers_ptr + site, mask=site < sites, other=-1) > layer)
                at = words_ptr + site.to(tl.int64) * words_row + row
                word = tl.load(at, mask=later, other=0)
                step = tl.load(steps_ptr + (site * 2 + side) * WIDTHS + (word & 31), mask=later, other=0)
                tl.store(at, (word & -256) | step.to(tl.int32), mask=later)
    tl.store(moves_ptr + row, done)
