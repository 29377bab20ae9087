"""How hard tokens are to predict, on a GPU: one pass over the logits, and a small launch that adds its parts up.

A row is cut into parts, a program each, because one program would take longer for a row than a GPU for all of them.
Every part is relative to the row's likeliest logit, which is known, so that parts add up as they are.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.reference.difficulty import LOWEST

_PART = 1024  # logits of a part: 126 parts of 128 256 logits, about a program for each multiprocessor of an H200


def difficulty(logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Arguments and result as those of `qbe.analysis.difficulty.difficulty`."""
    n, vocabulary = logits.shape
    count = triton.cdiv(vocabulary, _PART)
    parts = torch.empty(n, 3, count, dtype=torch.float32, device=logits.device)
    out = torch.empty(3, n, dtype=torch.float64, device=logits.device)
    with torch.cuda.device_of(logits):
        parts_kernel[(n, count)](
            logits, best, parts, *logits.stride(), vocabulary, COUNT=count, PART=_PART, LOWEST=LOWEST, num_warps=4
        )
        add_parts_kernel[(n,)](best, parts, out, n, COUNT=count, BLOCK=triton.next_power_of_2(count), num_warps=4)
    return out


@triton.jit
def parts_kernel(
    logits_ptr, best_ptr, parts_ptr, row, column, vocabulary, COUNT: tl.constexpr, PART: tl.constexpr,
    LOWEST: tl.constexpr,
):  # fmt: skip
    """A part of a row: the sums of exp(l) and exp(l) * l, and the largest l but the best token's, less the best one."""
    i = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = tl.maximum(tl.load(best_ptr + i), 0)
    token = part * PART + tl.arange(0, PART)
    logits = tl.load(logits_ptr + i * row + token.to(tl.int64) * column, mask=token < vocabulary, other=float("-inf"))
    below = logits - tl.load(logits_ptr + i * row + first * column)
    below = tl.where(below < LOWEST, LOWEST, below)  # a NaN stays one
    weights = tl.exp(below)  # 0 behind the vocabulary's end
    to = parts_ptr + i * 3 * COUNT + part
    tl.store(to, tl.sum(weights))
    tl.store(to + COUNT, tl.sum(weights * below))
    tl.store(to + 2 * COUNT, tl.max(tl.where((token < vocabulary) & (token != first), below, float("-inf"))))


@triton.jit(do_not_specialize=["n"])
def add_parts_kernel(best_ptr, parts_ptr, out_ptr, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers of a row."""
    i = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < COUNT
    parts_ptr += i * 3 * COUNT + part
    total = tl.sum(tl.load(parts_ptr, mask=inside, other=0.0))
    entropy = tl.log(total) - tl.sum(tl.load(parts_ptr + COUNT, mask=inside, other=0.0)) / total
    margin = -tl.max(tl.load(parts_ptr + 2 * COUNT, mask=inside, other=float("-inf")))
    tl.store(out_ptr + i, tl.load(best_ptr + i).to(tl.float64))
    tl.store(out_ptr + n + i, entropy.to(tl.float64))
    tl.store(out_ptr + 2 * n + i, tl.where(entropy == entropy, margin, entropy).to(tl.float64))
