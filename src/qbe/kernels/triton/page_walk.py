"""An online softmax over pages of mixed precision: what decode and prompt attention have in common.

It walks through runs of pages whose blocks of this head have the same bits: the branch on the precision is outside of
the loop over a run, whose loads can be pipelined.
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
def capped(scores, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap), through exp2 (no tanh in Triton's language)."""
    if SOFTCAP:
        e = tl.exp2(tl.abs(scores) * (-2 * LOG2E) / softcap)
        bent = softcap * (1 - e) / (1 + e)
        scores = tl.where(scores < 0, -bent, bent)
    return scores


@triton.jit
def attend_run(
    q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, offset, begin, end, lows, highs,
    written, scaling, softcap, BITS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, ITEM: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`attend_pages` for pages [begin, end) whose blocks lie `offset` bytes into them and have BITS bits."""
    ORIGIN: tl.constexpr = origin(q.dtype, BITS)
    t = tl.arange(0, PAGE)
    for page in tl.range(begin, end, num_stages=STAGES):
        entry = tl.load(table_ptr + page)
        block = tl.multiple_of(entry - entry % 256 + offset, 256)
        at = page * PAGE + t
        seen = (at[None, :] >= lows[:, None]) & (at[None, :] < highs[:, None])
        # A number is scale * (code - ORIGIN) + low. A channel's scale goes into the query, a token's into its weight:
        # codes are only unpacked. ORIGIN is taken off with the scaled query or weight as rounding left it.
        if BITS == 16:
            k = full_keys(numbers_ptr, block, at < written, KEY_DIM, BK, ITEM)
            scores = tl.dot(q, k, input_precision="ieee")
        else:
            codes, scale, lowest = sealed_keys(memory_ptr, halves_ptr, block, BITS, KEY_DIM, VALUE_DIM, BK)
            scaled = (q.to(tl.float32) * scale[None, :]).to(q.dtype)
            base = tl.sum(q.to(tl.float32) * lowest[None, :] - scaled.to(tl.float32) * ORIGIN, 1)
            scores = tl.dot(scaled, as_numbers(codes, q.dtype, BITS), input_precision="ieee") + base[:, None]
        scores = tl.where(seen, capped(scores * scaling, softcap, SOFTCAP) * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        factor = tl.exp2(top - finite)
        weights = tl.exp2(scores - finite[:, None])
        total = total * factor + tl.sum(weights, 1)
        weighted = weighted * factor + tl.sum(tl.where(seen, weights * scores, 0.0), 1)
        if BITS == 16:
            v = full_values(numbers_ptr, block, at < written, KEY_DIM, VALUE_DIM, BV, ITEM)
            acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            codes, scale, lowest = sealed_values(memory_ptr, halves_ptr, block, BITS, KEY_DIM, VALUE_DIM, BV)
            scaled = (weights * scale[None, :]).to(q.dtype)
            base = tl.sum(weights * lowest[None, :] - scaled.to(tl.float32) * ORIGIN, 1)
            product = tl.dot(scaled, as_numbers(codes, q.dtype, BITS), input_precision="ieee")
            acc = acc * factor[:, None] + product + base[:, None]
        top = higher
    return top, total, weighted, acc


@triton.jit
def attend_pages(
    q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, words_ptr, table_ptr, head, begin, end, lows,
    highs, written, scaling, softcap, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, ITEM: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Goes on with an online softmax over the pages [begin, end) of a sequence.

    q [BM, BK]; row m sees the keys [lows[m], highs[m]), and no key from `written` on is there. top, total [BM]: the
    highest score so far (times log2 e) and the sum of weights; weighted [BM]: sum of weight * score; acc [BM, BV]: sum
    of weight * value. memory, numbers and halves are the same bytes as uint8, as the model's dtype and as float16.
    """
    page = begin
    while page < end:
        ahead = page + tl.arange(0, AHEAD)
        inside = ahead < end
        formats = tl.load(table_ptr + ahead, mask=inside, other=0) % 256
        words = tl.load(words_ptr + formats * KV_HEADS + head, mask=inside, other=-1)
        word = tl.load(words_ptr + tl.load(table_ptr + page) % 256 * KV_HEADS + head)
        stop = tl.min(tl.where(words == word, page + AHEAD, ahead), 0)
        bits = word % 256
        if bits == 16:
            top, total, weighted, acc = attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, stop,
                lows, highs, written, scaling, softcap, 16, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        elif bits == 8:
            top, total, weighted, acc = attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, stop,
                lows, highs, written, scaling, softcap, 8, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        elif bits == 4:
            top, total, weighted, acc = attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, stop,
                lows, highs, written, scaling, softcap, 4, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        else:
            top, total, weighted, acc = attend_run(
                q, top, total, weighted, acc, memory_ptr, numbers_ptr, halves_ptr, table_ptr, word - bits, page, stop,
                lows, highs, written, scaling, softcap, 2, KEY_DIM, VALUE_DIM, BK, BV, ITEM, SOFTCAP, STAGES,
            )  # fmt: skip
        page = stop
    return top, total, weighted, acc
