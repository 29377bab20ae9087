"""`qbe::cascade` on a GPU: one launch, a program for each row."""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.cascade_ops import WHO

_BLOCK = 256  # numbers of attention at a time
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
    cascade_kernel[(n,)](
        attended, out, width, entropy, lengths, rows, seen, inner, inner_bias, outer, outer_bias, thresholds, gears,
        steering, words, entropy.stride(0), seen.stride(0), words.stride(0), len(words), point * heads,
        HEADS=heads, BH=triton.next_power_of_2(heads), HIDDEN=hidden, BU=triton.next_power_of_2(hidden),
        SLICES=len(gears) - 1, WHO=WHO, BLOCK=_BLOCK, BK=_INPUTS, BS=_SITES, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["before", "sites"])
def cascade_kernel(
    attended_ptr, out_ptr, width, entropy_ptr, lengths_ptr, rows_ptr, seen_ptr, inner_ptr, inner_bias_ptr, outer_ptr,
    outer_bias_ptr, thresholds_ptr, gears_ptr, steering_ptr, words_ptr, entropy_row, seen_row, words_row, sites, before,
    HEADS: tl.constexpr, BH: tl.constexpr, HIDDEN: tl.constexpr, BU: tl.constexpr, SLICES: tl.constexpr,
    WHO: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """A program serves one row. before: entropies of the points before this one."""
    i = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + i * width + at, tl.load(attended_ptr + i * width + at, mask=at < width), mask=at < width)
    row = i
    if rows_ptr is not None:
        row = tl.load(rows_ptr + i)
    steer = tl.load(steering_ptr + row)
    if (steer >> 8) == WHO:
        unit, head = tl.arange(0, BU), tl.arange(0, BH)
        used = unit < HIDDEN
        length = tl.maximum(tl.load(lengths_ptr + i), 2).to(tl.float32)
        share = tl.load(entropy_ptr + i * entropy_row + head, mask=head < HEADS, other=0.0) / tl.log(length)
        own = seen_ptr + row * seen_row
        tl.store(own + before + head, share, mask=head < HEADS)
        weight = inner_ptr + (before + head)[:, None] * HIDDEN + unit[None, :]
        weights = tl.load(weight, mask=(head < HEADS)[:, None] & used[None, :], other=0.0)
        units = tl.load(inner_bias_ptr + unit, mask=used, other=0.0) + tl.sum(share[:, None] * weights, 0)
        wrong = tl.sum((share * 0 != 0).to(tl.int32))  # heads without numbers
        for first in range(0, before, BK):
            k = first + tl.arange(0, BK)
            x = tl.load(own + k, mask=k < before, other=0.0)
            weight = inner_ptr + k[:, None] * HIDDEN + unit[None, :]
            weights = tl.load(weight, mask=(k < before)[:, None] & used[None, :], other=0.0)
            units += tl.sum(x[:, None] * weights, 0)
            wrong += tl.sum((x * 0 != 0).to(tl.int32))
        units = tl.maximum(units, 0.0)
        threshold = tl.load(thresholds_ptr + (steer & 255))
        for first in range(0, sites, BS):
            site = first + tl.arange(0, BS)
            there = site < tl.where(wrong == 0, sites, 0)
            worth = tl.zeros((BS,), tl.float32)
            chosen = tl.zeros((BS,), tl.int32)
            for e in tl.static_range(SLICES):
                score_at = site * SLICES + e
                weight = outer_ptr + unit[:, None] * (sites * SLICES) + score_at[None, :]
                weights = tl.load(weight, mask=used[:, None] & there[None, :], other=0.0)
                score = tl.load(outer_bias_ptr + score_at, mask=there, other=0.0) + tl.sum(units[:, None] * weights, 0)
                if e == 0:
                    worth = score
                else:
                    worth -= tl.where(score > 20, score, tl.log(1.0 + tl.exp(tl.minimum(score, 20.0))))
                chosen += (worth > threshold).to(tl.int32)
            at = words_ptr + site.to(tl.int64) * words_row + row
            word = tl.load(at, mask=there, other=0)
            tl.store(at, (word & -256) | tl.load(gears_ptr + chosen, mask=there, other=0), mask=there)
