"""An online softmax over pages of mixed precision: what decode and prompt attention have in common.

It walks through runs of pages whose blocks of this head are of the same kind: the branch on the kind is outside of the
loop over a run, whose loads can be pipelined. Quantised pages meet rotated queries; where a run of them borders on
pages of 16 bits the sum of values is rotated. Keys and values are the left operands of the products, queries and
weights the right ones: codes go from memory through registers to the tensor cores and are unpacked on the way.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator, arg-type, index"

from __future__ import annotations

import triton
import triton.language as tl

from qbe.kernels.triton.attention.page_notes import note_full, note_quantised, number_errors
from qbe.kernels.triton.kv_cache.blocks import (
    PAGE,
    QUANTISED_KINDS,
    bits_of,
    block_of,
    centre,
    fields_of,
    full_keys,
    is_turbo,
    key_scales,
    numbers_of,
    quantised_keys,
    quantised_kind,
    quantised_values,
    row_bytes,
    turbo_levels,
    turbo_mean,
    turbo_scales,
    turbo_signs,
    value_scales,
)
from qbe.kernels.triton.kv_cache.rotation import rotate_columns

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
AHEAD = tl.constexpr(64)  # pages that are looked at to find the end of a run


@triton.jit
def capped(scores, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap), through exp2 (no tanh in Triton's language)."""
    if SOFTCAP:
        e = tl.exp2(tl.abs(scores) * (-2 * LOG2E) / softcap)
        bent = softcap * (1 - e) / (1 + e)
        scores = tl.where(scores < 0, -bent, bent)
    return scores


@triton.jit
def _scaled(scores, scaling, softcap, SOFTCAP: tl.constexpr):
    """Scores times log2 e."""
    if SOFTCAP:
        return capped(scores * scaling, softcap, SOFTCAP) * LOG2E
    else:
        return scores * (scaling * LOG2E)


@triton.jit
def query_columns(q_ptr, q_head, q_one, d, d_ok, BM: tl.constexpr, REPEAT: tl.constexpr):
    """Channels d of REPEAT queries, which lie q_head apart and their numbers q_one, as columns [BD, BM]; else 0."""
    m = tl.arange(0, BM)
    offsets = m[None, :] * q_head + d[:, None] * q_one
    return tl.load(q_ptr + offsets, mask=(m < REPEAT)[None, :] & d_ok[:, None], other=0.0)


@triton.jit
def _fields_of_queries(rotated_ptr, BITS: tl.constexpr, KEY_DIM: tl.constexpr, BM: tl.constexpr, REPEAT: tl.constexpr):
    """A tuple of the channels of each field of quantised keys, columns [block_of(R), BM]."""
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    u = tl.arange(0, block_of(ROW))
    q = ()
    for i in tl.static_range(8 // BITS):
        ok = (u < ROW) & (i * ROW + u < KEY_DIM)
        q += (query_columns(rotated_ptr, 2 * KEY_DIM, 1, i * ROW + u, ok, BM, REPEAT),)
    return q


@triton.jit
def _quantised_scores(
    q, memory_ptr, block, BITS: tl.constexpr, DTYPE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ASM: tl.constexpr, NOTED: tl.constexpr,
):  # fmt: skip
    """[PAGE, BM] of keys of 8, 4 or 2 bits and the fields of rotated queries; and numbers [.., BM] whose sums are how
    far these may be off, if NOTED.
    """
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    packed = quantised_keys(memory_ptr, block, BITS, KEY_DIM)
    scores = tl.zeros((PAGE, q[0].shape[1]), tl.float32)
    moved = tl.zeros((block_of(ROW), q[0].shape[1]), tl.float32)
    errors = moved
    for i in tl.static_range(8 // BITS):
        scale, low = key_scales(memory_ptr, block, i, BITS, KEY_DIM, VALUE_DIM)
        scaled = (q[i].to(tl.float32) * scale[:, None]).to(DTYPE)
        moved += q[i].to(tl.float32) * (low + scale * centre(BITS))[:, None]
        if NOTED:
            errors += tl.abs(q[i].to(tl.float32)) * number_errors(scale, low, BITS)[:, None]
        k = numbers_of(packed, i, BITS, DTYPE, ASM)
        scores = tl.dot(k, scaled, scores, input_precision="ieee")
    return scores + tl.sum(moved, 0)[None, :], errors


@triton.jit
def _turbo_scores(
    q, sketch, memory_ptr, block, KIND: tl.constexpr, DTYPE: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """The same of turbo keys; sketch: the queries rotated as the keys' sketches are."""
    BITS: tl.constexpr = bits_of(KIND)
    ROW: tl.constexpr = row_bytes(KEY_DIM, BITS)
    u = tl.arange(0, block_of(ROW))
    packed = quantised_keys(memory_ptr, block, BITS, KEY_DIM).to(tl.int32)
    levels = tl.zeros((PAGE, q[0].shape[1]), tl.float32)
    signs = tl.zeros((PAGE, q[0].shape[1]), tl.float32)
    moved = tl.zeros((block_of(ROW), q[0].shape[1]), tl.float32)
    for i in tl.static_range(8 // BITS):
        d = i * ROW + u
        mean = turbo_mean(memory_ptr, block, d, (u < ROW) & (d < KEY_DIM), KIND, KEY_DIM, VALUE_DIM)
        moved += q[i].to(tl.float32) * mean[:, None]
        codes = packed >> (i * BITS)
        levels = tl.dot(turbo_levels(codes, BITS).to(tl.float32).to(DTYPE), q[i], levels, input_precision="ieee")
        signs = tl.dot(turbo_signs(codes, BITS).to(tl.float32).to(DTYPE), sketch[i], signs, input_precision="ieee")
    scale, sketch_scale = turbo_scales(memory_ptr, block, tl.arange(0, PAGE), KIND, KEY_DIM, VALUE_DIM)
    return tl.sum(moved, 0)[None, :] + levels * scale[:, None] + signs * sketch_scale[:, None]


@triton.jit
def _softmax_step(scores, top, total, weighted, MASKED: tl.constexpr):
    """Weights of scores [PAGE, BM] in an online softmax, what it has summed, and the factor of what came before.

    total, weighted [PAGE, BM]: sums over pages, not yet over the places in a page, since that would be a barrier.
    Keys that are not seen have a score of -inf, if MASKED.
    """
    higher = tl.maximum(top, tl.max(scores, 0))
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen nothing yet
    factor = tl.exp2(top - finite)
    weights = tl.exp2(scores - finite[None, :])
    total = total * factor[None, :] + weights
    products = weights * scores
    if MASKED:
        products = tl.where(weights > 0, products, 0.0)
    weighted = weighted * factor[None, :] + products
    return weights, factor, higher, total, weighted


@triton.jit
def _factor(before, top):
    """Of weights relative to a highest score of `before` when it has become `top`."""
    return tl.exp2(before - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _values_by_channel(
    numbers_ptr, block, ok, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BV: tl.constexpr, ITEM: tl.constexpr
):  # fmt: skip
    """Values [BV, PAGE] of a block of 16 bits; 0 for tokens that are not `ok`.

    Transposed by their addresses: values that are transposed later would be kept in registers ahead of time.
    """
    d = tl.arange(0, BV)
    offsets = block // ITEM + PAGE * KEY_DIM + tl.arange(0, PAGE)[None, :] * VALUE_DIM + d[:, None]
    return tl.load(numbers_ptr + offsets, mask=ok[None, :] & (d < VALUE_DIM)[:, None], other=0.0)


@triton.jit
def _full_run(
    q_ptr, q_head, q_one, top, total, weighted, acc, numbers_ptr, table_ptr, offset, begin, end, first, past, scaling,
    softcap, REPEAT: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ITEM: tl.constexpr, SOFTCAP: tl.constexpr, notes_ptr, note_row, NOTED: tl.constexpr,
):  # fmt: skip
    """Pages [begin, end) of 16 bits, whose blocks of this head lie `offset` bytes into them."""
    t = tl.arange(0, PAGE)
    d = tl.arange(0, BK)
    before = top
    totals = tl.zeros((PAGE, top.shape[0]), tl.float32)
    products = totals
    q = query_columns(q_ptr, q_head, q_one, d, d < KEY_DIM, top.shape[0], REPEAT)
    block_id = tl.load(table_ptr + begin)
    for page in tl.range(begin, end, num_stages=2):  # 3 would leave room for few programs on a processor
        block = tl.multiple_of(block_id - block_id % 256 + offset, 256)
        block_id = tl.load(table_ptr + tl.minimum(page + 1, end - 1))  # a page ahead: addresses come from it
        position = page * PAGE + t
        k = full_keys(numbers_ptr, block, position < past, KEY_DIM, BK, ITEM)
        scores = _scaled(tl.dot(k, q, input_precision="ieee"), scaling, softcap, SOFTCAP)
        scores = tl.where(((position >= first) & (position < past))[:, None], scores, float("-inf"))
        weights, factor, top, totals, products = _softmax_step(scores, top, totals, products, True)
        v = _values_by_channel(numbers_ptr, block, position < past, KEY_DIM, VALUE_DIM, BV, ITEM)
        acc = tl.dot(v, weights.to(v.dtype), acc * factor[None, :], input_precision="ieee")
        if NOTED:
            note_full(notes_ptr, note_row, page, REPEAT, weights, top, v)
    factor = _factor(before, top)
    return top, total * factor + tl.sum(totals, 0), weighted * factor + tl.sum(products, 0), acc


@triton.jit
def _quantised_run(
    rotated_ptr, top, total, weighted, acc, memory_ptr, table_ptr, offset, begin, end, first, scaling, softcap,
    KIND: tl.constexpr, DTYPE: tl.constexpr, REPEAT: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr, notes_ptr, note_row,
    NOTED: tl.constexpr,
):  # fmt: skip
    """The same of quantised pages. acc is rotated.

    A number is scale * (what `numbers_of` gives + centre) + low. A channel's scale goes into the query and a token's
    into its weight. What `numbers_of` gives lies around 0, so that acc stays small beside what is added to it.
    """
    BITS: tl.constexpr = bits_of(KIND)
    FIELDS: tl.constexpr = 8 // BITS
    t = tl.arange(0, PAGE)
    before = top
    totals = tl.zeros((PAGE, top.shape[0]), tl.float32)
    products = totals
    bases = totals  # what the lows of values add to all channels
    q = _fields_of_queries(rotated_ptr, BITS, KEY_DIM, top.shape[0], REPEAT)
    if is_turbo(KIND):
        sketch = _fields_of_queries(rotated_ptr + KEY_DIM, BITS, KEY_DIM, top.shape[0], REPEAT)
    block_id = tl.load(table_ptr + begin)
    for page in tl.range(begin, end, num_stages=3):
        block = tl.multiple_of(block_id - block_id % 256 + offset, 256)
        block_id = tl.load(table_ptr + tl.minimum(page + 1, end - 1))  # a page ahead: addresses come from it
        if is_turbo(KIND):
            scores = _turbo_scores(q, sketch, memory_ptr, block, KIND, DTYPE, KEY_DIM, VALUE_DIM)
            errors = tl.full((1, top.shape[0]), float("inf"), tl.float32)  # no bound
        else:
            scores, errors = _quantised_scores(q, memory_ptr, block, BITS, DTYPE, KEY_DIM, VALUE_DIM, ASM, NOTED)
        scores = _scaled(scores, scaling, softcap, SOFTCAP)
        if WINDOW > 0:  # else all tokens of quantised pages are seen
            position = page * PAGE + t
            scores = tl.where(position[:, None] >= first, scores, float("-inf"))
        weights, factor, top, totals, products = _softmax_step(scores, top, totals, products, WINDOW > 0)
        packed = quantised_values(memory_ptr, block, BITS, KEY_DIM, VALUE_DIM, BV)
        scale, low = value_scales(memory_ptr, block, t, KIND, KEY_DIM, VALUE_DIM)
        scaled = (weights * scale[:, None]).to(DTYPE)
        bases = bases * factor[None, :] + weights * (low + scale * centre(BITS))[:, None]
        acc = acc * factor[None, :]
        parts = fields_of(scaled, FIELDS)
        for i in tl.static_range(FIELDS):
            acc = tl.dot(numbers_of(packed, i, BITS, DTYPE, ASM), parts[i], acc, input_precision="ieee")
        if NOTED:
            e = tl.sum(errors, 0) * tl.abs(scaling)
            note_quantised(
                notes_ptr, note_row, page, REPEAT, weights, top, e, packed, memory_ptr, block, KIND, DTYPE, KEY_DIM,
                VALUE_DIM, ASM,
            )  # fmt: skip
    factor = _factor(before, top)
    acc += tl.sum(bases, 0)[None, :]
    return top, total * factor + tl.sum(totals, 0), weighted * factor + tl.sum(products, 0), acc


@triton.jit
def attend_pages(
    q_ptr, q_head, q_one, rotated_ptr, top, total, weighted, acc, memory_ptr, numbers_ptr, head_offsets_ptr, table_ptr,
    head, begin, end, first, past, scaling, softcap, KV_HEADS: tl.constexpr, REPEAT: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ITEM: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr, notes_ptr, note_row, NOTED: tl.constexpr,
):  # fmt: skip
    """Goes on with an online softmax over the pages [begin, end) of a sequence.

    q: the first of REPEAT queries, which lie q_head apart and their numbers q_one; rotated: what
    `rotate_queries_kernel` made of them. They see the keys [first, past). top, total [BM]: the highest score so far
    (times log2 e) and the sum of weights; weighted [BM]: sum of weight * score; acc [BV, BM]: sum of weight * value,
    zero in the beginning, rotated in the end if the number returned after it is 1. memory and numbers are the same
    bytes as uint8 and as the model's dtype. If NOTED, notes are taken of each page (`page_notes`).
    """
    page = begin
    rotated = begin * 0
    while page < end:
        ahead = page + tl.arange(0, AHEAD)
        inside = ahead < end
        formats = tl.load(table_ptr + ahead, mask=inside, other=0) % 256
        head_offsets = tl.load(head_offsets_ptr + formats * KV_HEADS + head, mask=inside, other=-1)
        head_offset = tl.load(head_offsets_ptr + tl.load(table_ptr + page) % 256 * KV_HEADS + head)
        stop = tl.min(tl.where(head_offsets == head_offset, page + AHEAD, ahead), 0)
        kind = head_offset % 256
        quantised = (kind != 16).to(tl.int32)
        if (quantised != rotated) & (page > begin):
            acc = rotate_columns(acc, VALUE_DIM)
        rotated = quantised
        if kind == 16:
            top, total, weighted, acc = _full_run(
                q_ptr, q_head, q_one, top, total, weighted, acc, numbers_ptr, table_ptr, head_offset - kind, page, stop,
                first, past, scaling, softcap, REPEAT, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, notes_ptr, note_row,
                NOTED,
            )  # fmt: skip
        for i in tl.static_range(QUANTISED_KINDS):
            if kind == quantised_kind(i):
                top, total, weighted, acc = _quantised_run(
                    rotated_ptr, top, total, weighted, acc, memory_ptr, table_ptr, head_offset - kind, page, stop,
                    first, scaling, softcap, quantised_kind(i), numbers_ptr.dtype.element_ty, REPEAT, KEY_DIM,
                    VALUE_DIM, BV, WINDOW, SOFTCAP, ASM, notes_ptr, note_row, NOTED,
                )  # fmt: skip
        page = stop
    return top, total, weighted, acc, rotated
