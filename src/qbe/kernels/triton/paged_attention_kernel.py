"""Attention of one new token per sequence over its pages.

A program serves one key head of one sequence and a part of its keys; the query heads that share the key head are the
rows of its products. The new token's key and value come from the step itself, not from the page: the program of the
first part counts them and writes them to the page, which no other program reads.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap), through exp2 (no tanh in Triton's language)."""
    if SOFTCAP:
        e = tl.exp2(tl.abs(scores) * (-2 * LOG2E) / softcap)
        capped = softcap * (1 - e) / (1 + e)
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit(do_not_specialize=["scaling", "softcap"])
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    means_ptr,
    sums_ptr,
    q_row,
    q_head,
    q_one,
    k_row,
    k_head,
    k_one,
    v_row,
    v_head,
    v_one,
    table_row,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    m = tl.arange(0, BM)
    dk = tl.arange(0, BK)
    dv = tl.arange(0, BV)
    heads = head * REPEAT + m
    m_ok = m < REPEAT
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    past = length - 1  # keys that are read from pages
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    blocks = tl.cdiv(past - first, BLOCK)
    each = tl.cdiv(blocks, SPLITS)
    low = first + split * each * BLOCK
    high = tl.minimum(low + each * BLOCK, past)

    q = tl.load(
        q_ptr + sequence * q_row + heads[:, None] * q_head + dk[None, :] * q_one,
        mask=m_ok[:, None] & (dk < KEY_DIM)[None, :],
        other=0.0,
    )
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    if split == 0:
        k_new = tl.load(k_ptr + sequence * k_row + head * k_head + dk * k_one, mask=dk < KEY_DIM, other=0.0)
        v_new = tl.load(v_ptr + sequence * v_row + head * v_head + dv * v_one, mask=dv < VALUE_DIM, other=0.0)
        slot = tl.load(slots_ptr + sequence)
        tl.store(keys_ptr + (slot * KV_HEADS + head) * KEY_DIM + dk, k_new, mask=dk < KEY_DIM)
        tl.store(values_ptr + (slot * KV_HEADS + head) * VALUE_DIM + dv, v_new, mask=dv < VALUE_DIM)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scaling
        top = _capped(score, softcap, SOFTCAP) * LOG2E
        total += 1.0
        acc += v_new.to(tl.float32)[None, :]

    for start in range(low, high, BLOCK):
        at = start + tl.arange(0, BLOCK)
        ok = at < high
        page = tl.load(tables_ptr + sequence * table_row + at // PAGE, mask=ok, other=0).to(tl.int64)
        row = (page * PAGE + at % PAGE) * KV_HEADS + head
        k = tl.load(
            keys_ptr + row[None, :] * KEY_DIM + dk[:, None], mask=ok[None, :] & (dk < KEY_DIM)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        scores = tl.where(ok[None, :], _capped(scores, softcap, SOFTCAP) * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        factor = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * factor + tl.sum(weights, 1)
        v = tl.load(
            values_ptr + row[:, None] * VALUE_DIM + dv[None, :],
            mask=ok[:, None] & (dv < VALUE_DIM)[None, :],
            other=0.0,
        )
        acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    # A part without keys has total 0: its mean is 0 and its logarithm -inf, which weighs nothing.
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    ok_out = m_ok[:, None] & (dv < VALUE_DIM)[None, :]
    if SPLITS == 1:
        at_out = (sequence * KV_HEADS * REPEAT + heads[:, None]) * VALUE_DIM + dv[None, :]
        tl.store(out_ptr + at_out, mean.to(out_ptr.dtype.element_ty), mask=ok_out)
    else:
        part = (sequence * SPLITS + split) * KV_HEADS * REPEAT + heads
        tl.store(means_ptr + part[:, None] * VALUE_DIM + dv[None, :], mean, mask=ok_out)
        tl.store(sums_ptr + part, top + tl.log2(total), mask=m_ok)


@triton.jit
def combine_kernel(
    means_ptr, sums_ptr, out_ptr, heads, SPLITS: tl.constexpr, BS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """out[sequence, head] = mean of the parts' means, weighted by 2**sums"""
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    s = tl.arange(0, BS)
    dv = tl.arange(0, BV)
    part = (sequence * SPLITS + s).to(tl.int64) * heads + head
    sums = tl.load(sums_ptr + part, mask=s < SPLITS, other=float("-inf"))
    weights = tl.exp2(sums - tl.max(sums, 0))
    means = tl.load(
        means_ptr + part[:, None] * VALUE_DIM + dv[None, :],
        mask=(s < SPLITS)[:, None] & (dv < VALUE_DIM)[None, :],
        other=0.0,
    )
    y = tl.sum(means * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(
        out_ptr + tl.program_id(0).to(tl.int64) * VALUE_DIM + dv, y.to(out_ptr.dtype.element_ty), mask=dv < VALUE_DIM
    )
