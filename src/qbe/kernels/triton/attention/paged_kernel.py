"""Attention of one new token per sequence over its pages, each read at its own precision.

A program serves one key head of one sequence and a part of its pages; the query heads that share the key head are the
columns of its products. The new token's key and value come from the step itself, not from the page: the program of the
last part counts them after its pages and writes them to the page, where no other program reads them.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.attention.page_notes import NOTES, store_notes
from qbe.kernels.triton.attention.page_walk import LN2, LOG2E, attend_pages, capped, query_columns
from qbe.kernels.triton.kv_cache.blocks import PAGE
from qbe.kernels.triton.kv_cache.rotation import rotate, rotate_columns


# What changes between steps must not make Triton compile once more: how many parts, and how a table lies in memory.
@triton.jit(
    do_not_specialize=[
        "scaling", "softcap", "parts", "table_row", "table_head", "note_row", "slots_ptr", "block_tables_ptr",
        "lengths_ptr", "parts_ptr",
    ]
)  # fmt: skip
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    memory_ptr,
    numbers_ptr,
    head_offsets_ptr,
    slots_ptr,
    block_tables_ptr,
    lengths_ptr,
    means_ptr,
    parts_ptr,
    notes_ptr,
    raised_ptr,
    rotated_ptr,
    sinks_ptr,
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
    table_head,
    note_row,
    scaling,
    softcap,
    parts,
    KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ITEM: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """memory and numbers are the same bytes as uint8 and as the model's dtype.

    notes and raised are for bounded attention, else None: what to note of each page (`page_notes`), and how many pages
    of this head are read again, in a walk that is made for these alone. sinks may be None.
    """
    if raised_ptr is not None:  # noqa: SIM102 (the compiler takes no pointer that is None)
        if tl.load(raised_ptr + tl.program_id(0)) == 0:
            return
    sequence = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
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
    each = tl.cdiv(pages, parts)
    low = first // PAGE + part * each
    high = tl.minimum(low + each, first // PAGE + pages)
    table_ptr = block_tables_ptr + sequence * table_row + head * table_head
    NOTED: tl.constexpr = notes_ptr is not None
    if NOTED:
        notes_ptr += (sequence * KV_HEADS + head) * REPEAT * NOTES * note_row

    q_ptr += sequence * q_row + head * REPEAT * q_head
    rotated_ptr += (sequence * KV_HEADS + head) * REPEAT * 2 * KEY_DIM
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    weighted = tl.zeros((BM,), tl.float32)  # sum of weight * score, for the entropy
    acc = tl.zeros((BV, BM), tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 (the compiler takes no pointer that is None)
        if part == parts - 1:  # the sum begins with the sink, whose value is zero
            top = tl.load(sinks_ptr + heads, mask=m_ok, other=float("-inf")) * LOG2E
            total = tl.where(top > float("-inf"), 1.0, 0.0)
            weighted = tl.where(top > float("-inf"), top, 0.0)
    top, total, weighted, acc, rotated = attend_pages(
        q_ptr, q_head, q_one, rotated_ptr, top, total, weighted, acc, memory_ptr, numbers_ptr, head_offsets_ptr,
        table_ptr, head, low, high, first, past, scaling, softcap, KV_HEADS, REPEAT, KEY_DIM, VALUE_DIM, BK, BV, ITEM,
        WINDOW, SOFTCAP, ASM, notes_ptr, note_row, NOTED,
    )  # fmt: skip

    if part == parts - 1:
        k_new = tl.load(k_ptr + sequence * k_row + head * k_head + dk * k_one, mask=dk < KEY_DIM, other=0.0)
        k_new += k_new * 0  # infinity becomes NaN, so that it cannot hide behind a score that is low
        v_new = tl.load(v_ptr + sequence * v_row + head * v_head + dv * v_one, mask=dv < VALUE_DIM, other=0.0)
        slot = tl.load(slots_ptr + sequence)
        open_word = tl.load(head_offsets_ptr + head)  # of format 0
        to = (slot - slot % 256 + open_word - open_word % 256) // ITEM
        tl.store(numbers_ptr + to + slot % 256 * KEY_DIM + dk, k_new, mask=dk < KEY_DIM)
        tl.store(numbers_ptr + to + PAGE * KEY_DIM + slot % 256 * VALUE_DIM + dv, v_new, mask=dv < VALUE_DIM)
        q = query_columns(q_ptr, q_head, q_one, dk, dk < KEY_DIM, BM, REPEAT)
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[:, None], 0) * scaling
        score = capped(score, softcap, SOFTCAP) * LOG2E
        if rotated == 1:
            acc = rotate_columns(acc, VALUE_DIM)
        rotated *= 0
        higher = tl.maximum(top, score)
        factor = tl.exp2(top - higher)
        weight = tl.exp2(score - higher)
        total = total * factor + weight
        weighted = weighted * factor + weight * score
        acc = acc * factor[None, :] + v_new.to(tl.float32)[:, None] * weight[None, :]
        top = higher
        if NOTED:
            norm = tl.sqrt(tl.sum(v_new.to(tl.float32) * v_new.to(tl.float32), 0))
            store_notes(notes_ptr, note_row, note_row - 1, REPEAT, score, score * 0, score * 0, score * 0 + norm)

    # A part without keys has total 0: its mean is 0 and its logarithm -inf, which weighs nothing.
    some = tl.where(total > 0, total, 1.0)
    mean = acc / some[None, :]
    ok_out = m_ok[None, :] & (dv < VALUE_DIM)[:, None]
    at_means = ((sequence * parts + part) * KV_HEADS * REPEAT + heads) * VALUE_DIM
    tl.store(means_ptr + at_means[None, :] + dv[:, None], mean, mask=ok_out)
    heads_of_all = KV_HEADS * REPEAT
    at_parts = parts_ptr + (sequence * parts + part) * 3 * heads_of_all + heads
    tl.store(at_parts, top + tl.log2(total), mask=m_ok)
    tl.store(at_parts + heads_of_all, weighted / some, mask=m_ok)
    tl.store(at_parts + 2 * heads_of_all, rotated.to(tl.float32) + m * 0, mask=m_ok)


@triton.jit(do_not_specialize=["entropy_row", "heads", "parts", "entropy_ptr", "parts_ptr"])
def combine_kernel(
    means_ptr, parts_ptr, out_ptr, entropy_ptr, raised_ptr, entropy_row, heads, parts, BS: tl.constexpr,
    REPEAT: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """out[sequence, head]: the mean of the parts' means by their sums of weights; the entropy likewise, of mean scores.

    Of each part and head there are the logarithm of its sum of weights (to base 2), its mean score, and 1 if its mean
    is rotated, else 0.
    """
    if raised_ptr is not None:  # noqa: SIM102 (the compiler takes no pointer that is None)
        if tl.load(raised_ptr + tl.program_id(0) // REPEAT) == 0:
            return
    sequence = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    s = tl.arange(0, BS)
    dv = tl.arange(0, BV)
    first = (sequence * parts + s) * heads
    notes = parts_ptr + 3 * first + head
    sums = tl.load(notes, mask=s < parts, other=float("-inf"))
    scores = tl.load(notes + heads, mask=s < parts, other=0.0)
    rotated = tl.load(notes + 2 * heads, mask=s < parts, other=0.0)
    top = tl.max(sums, 0)
    weights = tl.exp2(sums - top)
    total = tl.sum(weights, 0)
    means = tl.load(
        means_ptr + (first + head)[:, None] * VALUE_DIM + dv[None, :],
        mask=(s < parts)[:, None] & (dv < VALUE_DIM)[None, :],
        other=0.0,
    )
    y = tl.sum(means * (weights * (1 - rotated))[:, None], 0)
    if tl.max(rotated, 0) > 0:
        y += tl.sum(rotate(tl.sum(means * (weights * rotated)[:, None], 0, keep_dims=True), VALUE_DIM), 0)
    to = out_ptr + tl.program_id(0).to(tl.int64) * VALUE_DIM + dv
    tl.store(to, (y / total).to(out_ptr.dtype.element_ty), mask=dv < VALUE_DIM)
    entropy = (top + tl.log2(total) - tl.sum(weights * scores, 0) / total) * LN2
    tl.store(entropy_ptr + sequence * entropy_row + head, entropy)
