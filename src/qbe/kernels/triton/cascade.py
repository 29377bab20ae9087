"""`qbe::cascade` on a GPU: one launch, a program for each row."""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.cascade_ops import WHO
from qbe.kernels.triton.tiled_linear import early

_WIDTH = 1024  # numbers of attention at a time
_INPUTS = 64  # entropies of the points before at a time
_SITES = 64  # at a time


def cascade(
    attended: torch.Tensor,
    entropy: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor | None,
    seen: torch.Tensor,
    inner: torch.Tensor,
    inner_bias: torch.Tensor,
    outer: torch.Tensor,
    outer_bias: torch.Tensor,
    thresholds: torch.Tensor,
    gears: torch.Tensor,
    steering: torch.Tensor,
    words: torch.Tensor,
    point: int,
) -> torch.Tensor:
    """Arguments as those of `qbe.kernels.cascade_ops.cascade`."""
    n, heads = entropy.shape
    out, width, hidden = torch.empty_like(attended), attended[0].numel(), inner.shape[1]
    before, sites = point * heads, len(words)
    cascade_kernel[(n,)](
        attended, out, width, entropy, lengths, rows, seen, inner, inner_bias, outer, outer_bias, thresholds, gears,
        steering, words, entropy.stride(0), seen.stride(0), words.stride(0), sites, before,
        WIDTHS=triton.cdiv(width, _WIDTH), BW=min(_WIDTH, triton.next_power_of_2(width)), HEADS=heads,
        BH=triton.next_power_of_2(heads), HIDDEN=hidden, BU=triton.next_power_of_2(hidden),
        CHUNKS=triton.cdiv(before, _INPUTS), BK=_INPUTS, SITE_CHUNKS=triton.cdiv(sites, _SITES),
        BS=min(_SITES, triton.next_power_of_2(sites)), SLICES=len(gears) - 1, WHO=WHO, num_warps=4,
        **early(attended.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["before", "sites"])
def cascade_kernel(
    attended_ptr, out_ptr, width, entropy_ptr, lengths_ptr, rows_ptr, seen_ptr, inner_ptr, inner_bias_ptr, outer_ptr,
    outer_bias_ptr, thresholds_ptr, gears_ptr, steering_ptr, words_ptr, entropy_row, seen_row, words_row, sites, before,
    WIDTHS: tl.constexpr, BW: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr, HIDDEN: tl.constexpr,
    BU: tl.constexpr, CHUNKS: tl.constexpr, BK: tl.constexpr, SITE_CHUNKS: tl.constexpr, BS: tl.constexpr,
    SLICES: tl.constexpr, WHO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program serves one row. before: entropies of the points before this one.

    Its time is that of loads that wait for one another; so a row that is not steered runs through all of it, too, and
    nothing is written for it.
    """
    i = tl.program_id(0).to(tl.int64)
    unit, head = tl.arange(0, BU), tl.arange(0, BH)
    used = unit < HIDDEN
    own_at = inner_ptr + (before + head)[:, None] * HIDDEN + unit[None, :]
    own_weights = tl.load(own_at, mask=(head < HEADS)[:, None] & used[None, :], other=0.0)
    units = tl.load(inner_bias_ptr + unit, mask=used, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = i
    if rows_ptr is not None:
        row = tl.load(rows_ptr + i)
    steer = tl.load(steering_ptr + row)
    length = tl.maximum(tl.load(lengths_ptr + i), 2).to(tl.float32)
    entropy = tl.load(entropy_ptr + i * entropy_row + head, mask=head < HEADS, other=0.0)
    for part in tl.static_range(WIDTHS):
        at = part * BW + tl.arange(0, BW)
        tl.store(out_ptr + i * width + at, tl.load(attended_ptr + i * width + at, mask=at < width), mask=at < width)
    ours = (steer >> 8) == WHO
    threshold = tl.load(thresholds_ptr + (steer & 255))
    share = entropy / tl.log(length)
    seen = seen_ptr + row * seen_row
    tl.store(seen + before + head, share, mask=(head < HEADS) & ours)
    units += tl.sum(share[:, None] * own_weights, 0)
    wrong = tl.sum((share * 0 != 0).to(tl.int32))  # heads without numbers
    for chunk in tl.static_range(CHUNKS):
        k = chunk * BK + tl.arange(0, BK)
        x = tl.load(seen + k, mask=k < before, other=0.0)
        inner_at = inner_ptr + k[:, None] * HIDDEN + unit[None, :]
        inner_weights = tl.load(inner_at, mask=(k < before)[:, None] & used[None, :], other=0.0)
        units += tl.sum(x[:, None] * inner_weights, 0)
        wrong += tl.sum((x * 0 != 0).to(tl.int32))
    units = tl.maximum(units, 0.0)
    for chunk in tl.static_range(SITE_CHUNKS):
        site = chunk * BS + tl.arange(0, BS)
        there = site < sites
        word_at = words_ptr + site.to(tl.int64) * words_row + row
        word = tl.load(word_at, mask=there, other=0)
        worth = tl.zeros((BS,), tl.float32)
        gear = tl.load(gears_ptr) + tl.zeros((BS,), tl.int32)
        for e in tl.static_range(SLICES):
            score_at = site * SLICES + e
            outer_at = outer_ptr + unit[:, None] * (sites * SLICES) + score_at[None, :]
            outer_weights = tl.load(outer_at, mask=used[:, None] & there[None, :], other=0.0)
            score = tl.load(outer_bias_ptr + score_at, mask=there, other=0.0) + tl.sum(
                units[:, None] * outer_weights, 0
            )
            if e == 0:
                worth = score
            else:  # worths fall from slice to slice
                worth -= tl.where(score > 20, score, tl.log(1.0 + tl.exp(tl.minimum(score, 20.0))))
            gear = tl.where(worth > threshold, tl.load(gears_ptr + e + 1), gear)
        tl.store(word_at, (word & -256) | gear, mask=there & ours & (wrong == 0))
