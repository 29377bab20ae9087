"""Attention of one new token per sequence over its pages, each read at its own precision.

A program serves one key head of one sequence and a part of its pages; the query heads that share the key head are the
rows of its products. It walks through runs of pages whose blocks of this head have the same bits: the branch on the
precision is outside of the loop over a run, whose loads are pipelined. The new token's key and value come from the step
itself, not from the page: the program of the first part counts them and writes them to the page, where no other program
reads them.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.kv_blocks import (
    PAGE,
    as_numbers,
    full_keys,
    full_values,
    origin,
    sealed_keys,
    sealed_values,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
AHEAD = tl.constexpr(32)  # pages that are looked at to find the end of a run


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap), through exp2 (no tanh in Triton's language)."""
    if SOFTCAP:
        e = tl.exp2(tl.abs(scores) * (-2 * LOG2E) / softcap)
        capped = softcap * (1 - e) / (1 + e)
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit
def _attend_run(
    q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, offset, begin, end, first, past,
    scaling, softcap, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, ITEM: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Goes on with an online softmax over pages [begin, end), whose blocks lie `offset` bytes into them."""
    ORIGIN: tl.constexpr = origin(q.dtype, BITS)
    t = tl.arange(0, PAGE)
    for page in tl.range(begin, end, num_stages=STAGES):
        entry = tl.load(table_ptr + page)
        at = tl.multiple_of(entry - entry % 256 + offset, 256)
        seen = (page * PAGE + t >= first) & (page * PAGE + t < past)
        # A number is scale * (code - ORIGIN) + low. A channel's scale goes into the query, a token's into its weight:
        # codes are only unpacked. ORIGIN is taken off with the scaled query or weight as rounding left it.
        if BITS == 16:
            k = full_keys(numbers_ptr, at, seen, KEY_DIM, BK, ITEM)
            scores = tl.dot(q, k, input_precision="ieee")
        else:
            codes, scale, lowest = sealed_keys(memory_ptr, halves_ptr, at, BITS, KEY_DIM, VALUE_DIM, BK)
            scaled = (q.to(tl.float32) * scale[None, :]).to(q.dtype)
            base = tl.sum(q.to(tl.float32) * lowest[None, :] - scaled.to(tl.float32) * ORIGIN, 1)
            scores = tl.dot(scaled, as_numbers(codes, q.dtype, BITS), input_precision="ieee") + base[:, None]
        scores = tl.where(seen[None, :], _capped(scores * scaling, softcap, SOFTCAP) * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        factor = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * factor + tl.sum(weights, 1)
        weighted = weighted * factor + tl.sum(tl.where(seen[None, :], weights * scores, 0.0), 1)
        if BITS == 16:
            v = full_values(numbers_ptr, at, seen, KEY_DIM, VALUE_DIM, BV, ITEM)
            acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            codes, scale, lowest = sealed_values(memory_ptr, halves_ptr, at, BITS, KEY_DIM, VALUE_DIM, BV)
            scaled = (weights * scale[None, :]).to(q.dtype)
            base = tl.sum(weights * lowest[None, :] - scaled.to(tl.float32) * ORIGIN, 1)
            product = tl.dot(scaled, as_numbers(codes, q.dtype, BITS), input_precision="ieee")
            acc = acc * factor[:, None] + product + base[:, None]
        top = higher
    return top, total, weighted, acc


@triton.jit(do_not_specialize=["scaling", "softcap"])
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    memory_ptr,
    numbers_ptr,
    halves_ptr,
    words_ptr,
    slots_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    entropy_ptr,
    means_ptr,
    sums_ptr,
    logs_ptr,
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
    entropy_row,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ITEM: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """memory, numbers and halves are the same bytes as uint8, as the model's dtype and as float16."""
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
    pages = tl.where(past > first, tl.cdiv(past, PAGE) - first // PAGE, 0)
    each = tl.cdiv(pages, SPLITS)
    low = first // PAGE + split * each
    high = tl.minimum(low + each, first // PAGE + pages)
    table_ptr = tables_ptr + sequence * table_row

    q = tl.load(
        q_ptr + sequence * q_row + heads[:, None] * q_head + dk[None, :] * q_one,
        mask=m_ok[:, None] & (dk < KEY_DIM)[None, :],
        other=0.0,
    )
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    weighted = tl.zeros((BM,), tl.float32)  # sum of weight * score, for the entropy
    acc = tl.zeros((BM, BV), tl.float32)
    if split == 0:
        k_new = tl.load(k_ptr + sequence * k_row + head * k_head + dk * k_one, mask=dk < KEY_DIM, other=0.0)
        v_new = tl.load(v_ptr + sequence * v_row + head * v_head + dv * v_one, mask=dv < VALUE_DIM, other=0.0)
        slot = tl.load(slots_ptr + sequence)
        open_word = tl.load(words_ptr + head)  # of format 0
        to = (slot - slot % 256 + open_word - open_word % 256) // ITEM
        tl.store(numbers_ptr + to + slot % 256 * KEY_DIM + dk, k_new, mask=dk < KEY_DIM)
        tl.store(numbers_ptr + to + PAGE * KEY_DIM + slot % 256 * VALUE_DIM + dv, v_new, mask=dv < VALUE_DIM)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scaling
        top = _capped(score, softcap, SOFTCAP) * LOG2E
        total += 1.0
        weighted += top
        acc += v_new.to(tl.float32)[None, :]

    page = low
    while page < high:
        ahead = page + tl.arange(0, AHEAD)
        inside = ahead < high
        formats = tl.load(table_ptr + ahead, mask=inside, other=0) % 256
        words = tl.load(words_ptr + formats * KV_HEADS + head, mask=inside, other=-1)
        word = tl.load(words_ptr + tl.load(table_ptr + page) % 256 * KV_HEADS + head)
        end = tl.min(tl.where(words == word, page + AHEAD, ahead), 0)
        bits = word % 256
        if bits == 16:
            top, total, weighted, acc = _attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, end,
                first, past, scaling, softcap, 16, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        elif bits == 8:
            top, total, weighted, acc = _attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, end,
                first, past, scaling, softcap, 8, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        elif bits == 4:
            top, total, weighted, acc = _attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, end,
                first, past, scaling, softcap, 4, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        else:
            top, total, weighted, acc = _attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, end,
                first, past, scaling, softcap, 2, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        page = end

    # A part without keys has total 0: its mean is 0 and its logarithm -inf, which weighs nothing.
    some = tl.where(total > 0, total, 1.0)
    mean = acc / some[:, None]
    ok_out = m_ok[:, None] & (dv < VALUE_DIM)[None, :]
    if SPLITS == 1:
        at_out = (sequence * KV_HEADS * REPEAT + heads[:, None]) * VALUE_DIM + dv[None, :]
        tl.store(out_ptr + at_out, mean.to(out_ptr.dtype.element_ty), mask=ok_out)
        entropy = (top + tl.log2(total) - weighted / some) * LN2
        tl.store(entropy_ptr + sequence * entropy_row + heads, entropy, mask=m_ok)
    else:
        part = (sequence * SPLITS + split) * KV_HEADS * REPEAT + heads
        tl.store(means_ptr + part[:, None] * VALUE_DIM + dv[None, :], mean, mask=ok_out)
        tl.store(sums_ptr + part, top + tl.log2(total), mask=m_ok)
        tl.store(logs_ptr + part, weighted / some, mask=m_ok)


@triton.jit
def combine_kernel(
    means_ptr, sums_ptr, logs_ptr, out_ptr, entropy_ptr, entropy_row, heads, SPLITS: tl.constexpr, BS: tl.constexpr,
    VALUE_DIM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """out[sequence, head] = mean of the parts' means, weighted by 2**sums; entropy likewise, of their mean scores"""
    sequence = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    s = tl.arange(0, BS)
    dv = tl.arange(0, BV)
    part = (sequence * SPLITS + s) * heads + head
    sums = tl.load(sums_ptr + part, mask=s < SPLITS, other=float("-inf"))
    logs = tl.load(logs_ptr + part, mask=s < SPLITS, other=0.0)
    top = tl.max(sums, 0)
    weights = tl.exp2(sums - top)
    total = tl.sum(weights, 0)
    means = tl.load(
        means_ptr + part[:, None] * VALUE_DIM + dv[None, :],
        mask=(s < SPLITS)[:, None] & (dv < VALUE_DIM)[None, :],
        other=0.0,
    )
    y = tl.sum(means * weights[:, None], 0) / total
    tl.store(
        out_ptr + tl.program_id(0).to(tl.int64) * VALUE_DIM + dv, y.to(out_ptr.dtype.element_ty), mask=dv < VALUE_DIM
    )
    entropy = (top + tl.log2(total) - tl.sum(weights * logs, 0) / total) * LN2
    tl.store(entropy_ptr + sequence * entropy_row + head, entropy)
