"""`qbe::cascade` on a GPU: one launch, a program for each row."""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qbe.kernels.ops.cascade import WHO
from qbe.kernels.triton.linear.tiled.launch import early

_WIDTH = 1024  # numbers of attention at a time
_INPUTS = 512  # entropies at a time
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
    dynamic_precision: torch.Tensor,
    precision_words: torch.Tensor,
    point: int,
) -> torch.Tensor:
    """Arguments as those of `qbe.kernels.ops.cascade.cascade`."""
    n, heads = entropy.shape
    out, width, hidden = torch.empty_like(attended), attended[0].numel(), inner.shape[1]
    inputs, sites = (point + 1) * heads, len(precision_words)
    chunk = min(_INPUTS, triton.next_power_of_2(inputs))
    cascade_kernel[(n,)](
        attended, out, width, entropy, lengths, rows, seen, inner, inner_bias, outer, outer_bias, thresholds, gears,
        dynamic_precision, precision_words, entropy.stride(0), seen.stride(0), precision_words.stride(0), sites, inputs,
        WIDTHS=triton.cdiv(width, _WIDTH), BW=min(_WIDTH, triton.next_power_of_2(width)), HEADS=heads, HIDDEN=hidden,
        BU=triton.next_power_of_2(hidden), CHUNKS=triton.cdiv(inputs, chunk), BK=chunk,
        SITE_CHUNKS=triton.cdiv(sites, _SITES), BS=min(_SITES, triton.next_power_of_2(sites)), SLICES=len(gears) - 1,
        BE=triton.next_power_of_2(len(gears) - 1), WHO=WHO, num_warps=4 if chunk <= 128 else 8,
        **early(attended.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["inputs", "sites"])
def cascade_kernel(
    attended_ptr, out_ptr, width, entropy_ptr, lengths_ptr, rows_ptr, seen_ptr, inner_ptr, inner_bias_ptr, outer_ptr,
    outer_bias_ptr, thresholds_ptr, gears_ptr, dynamic_precision_ptr, precision_words_ptr, entropy_row, seen_row,
    precision_words_row, sites, inputs, WIDTHS: tl.constexpr, BW: tl.constexpr, HEADS: tl.constexpr,
    HIDDEN: tl.constexpr, BU: tl.constexpr, CHUNKS: tl.constexpr, BK: tl.constexpr, SITE_CHUNKS: tl.constexpr,
    BS: tl.constexpr, SLICES: tl.constexpr, BE: tl.constexpr, WHO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program serves one row. inputs: entropies, of which the last `HEADS` are this point's.

    Its time is that of loads that wait for one another. So the network is on its way before the kernel ahead has ended,
    and a row that the cascade does not move runs through all of it, too, though nothing is written for it.
    """
    i = tl.program_id(0).to(tl.int64)
    unit, slot = tl.arange(0, BU), tl.arange(0, BE)
    used = unit < HIDDEN
    units = tl.load(inner_bias_ptr + unit, mask=used, other=0.0)
    step = tl.load(gears_ptr + slot + 1, mask=slot < SLICES, other=0)
    step -= tl.load(gears_ptr + slot, mask=slot < SLICES, other=0)
    lowest = tl.load(gears_ptr)
    # Of the first part of either matrix, which is seldom less than all.
    k = tl.arange(0, BK)
    weights = tl.load(
        inner_ptr + k[:, None] * HIDDEN + unit[None, :], mask=(k < inputs)[:, None] & used[None, :], other=0.0
    )
    site = tl.arange(0, BS)
    score_at = site[:, None] * SLICES + slot[None, :]
    real = (site < sites)[:, None] & (slot < SLICES)[None, :]
    outer_at = outer_ptr + unit[:, None, None] * (sites * SLICES) + score_at[None, :, :]
    outer = tl.load(outer_at, mask=used[:, None, None] & real[None, :, :], other=0.0)
    bias = tl.load(outer_bias_ptr + score_at, mask=real, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = i
    if rows_ptr is not None:
        row = tl.load(rows_ptr + i)
    dynamic_precision = tl.load(dynamic_precision_ptr + row)
    length = tl.maximum(tl.load(lengths_ptr + i), 2).to(tl.float32)
    seen = seen_ptr + row * seen_row
    ours, wrong = (dynamic_precision >> 8) == WHO, 0
    threshold = tl.load(thresholds_ptr + (dynamic_precision & 255))
    precision_word = tl.load(
        precision_words_ptr + site.to(tl.int64) * precision_words_row + row, mask=site < sites, other=0
    )
    for part in tl.static_range(WIDTHS):
        channel = part * BW + tl.arange(0, BW)
        tl.store(
            out_ptr + i * width + channel,
            tl.load(attended_ptr + i * width + channel, mask=channel < width),
            mask=channel < width,
        )
    for part in tl.static_range(CHUNKS):
        if part > 0:
            k = part * BK + tl.arange(0, BK)
            weights = tl.load(
                inner_ptr + k[:, None] * HIDDEN + unit[None, :], mask=(k < inputs)[:, None] & used[None, :], other=0.0
            )
        newest = (k >= inputs - HEADS) & (k < inputs)
        x = tl.load(seen + k, mask=k < inputs - HEADS, other=0.0)
        now = tl.load(entropy_ptr + i * entropy_row + k - (inputs - HEADS), mask=newest, other=0.0) / tl.log(length)
        tl.store(seen + k, now, mask=newest & ours)
        x = tl.where(newest, now, x)
        units += tl.sum(x[:, None] * weights, 0)
        wrong += tl.sum((x * 0 != 0).to(tl.int32))  # heads without numbers
    units = tl.maximum(units, 0.0)
    for part in tl.static_range(SITE_CHUNKS):
        if part > 0:
            site = part * BS + tl.arange(0, BS)
            score_at = site[:, None] * SLICES + slot[None, :]
            real = (site < sites)[:, None] & (slot < SLICES)[None, :]
            outer_at = outer_ptr + unit[:, None, None] * (sites * SLICES) + score_at[None, :, :]
            outer = tl.load(outer_at, mask=used[:, None, None] & real[None, :, :], other=0.0)
            bias = tl.load(outer_bias_ptr + score_at, mask=real, other=0.0)
            precision_word = tl.load(
                precision_words_ptr + site.to(tl.int64) * precision_words_row + row, mask=site < sites, other=0
            )
        score = bias + tl.sum(units[:, None, None] * outer, 0)
        fall = tl.where(score > 20, score, tl.log(1.0 + tl.exp(tl.minimum(score, 20.0))))
        worth = tl.cumsum(tl.where(slot[None, :] == 0, score, -fall), 1)  # of a slice: falling
        gear = lowest + tl.sum(tl.where(worth > threshold, step[None, :], 0), 1)
        word_at = precision_words_ptr + site.to(tl.int64) * precision_words_row + row
        tl.store(word_at, (precision_word & -256) | gear, mask=(site < sites) & ours & (wrong == 0))
