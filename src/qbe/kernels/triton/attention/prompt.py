"""Attention of a prompt's tokens on a GPU to pages of any precision, those just before a token at 16 bits.

The pages before are read once, into a buffer at 16 bits. Reading them in place instead, as decode steps do, unpacks
each page once for every page of the prompt and every query head, which took four to nine times as long. A program
serves the tokens of one page for up to four of the query heads that share its keys.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.format.kv_blocks import PAGE_SIZE, STRETCH, quantised_pages
from qbe.kernels.triton.attention.page_walk import LOG2E, capped
from qbe.kernels.triton.kv_cache.blocks import PAGE, full_keys, full_values
from qbe.kernels.triton.kv_cache.pages import read_pages


@triton.jit
def _attend(
    q, k, v, top, total, acc, seen, scaling, softcap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One step of an online softmax of queries [M, BK] over keys [N, BK] and values [N, BV]; `seen` [M, N] if MASKED.

    top, total [M]: the highest score so far (times log2 e) and the sum of weights; acc [M, BV]: of weight * value.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        scores = capped(scores * scaling, softcap, SOFTCAP) * LOG2E
    else:
        scores *= scaling * LOG2E
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen nothing yet
    factor = tl.exp2(top - finite)
    weights = tl.exp2(scores - finite[:, None])
    total = total * factor + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _attend_before(
    q, position, keys_ptr, values_ptr, begin, top, total, acc, lows, scaling, softcap, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`_attend` for the N tokens from `position` on, at 16 bits in buffers that begin with position `begin`."""
    n = tl.arange(0, N)
    d = tl.arange(0, BK)
    dv = tl.arange(0, BV)
    row = (position - begin + n).to(tl.int64)
    k = tl.load(keys_ptr + row[:, None] * KEY_DIM + d[None, :], mask=(d < KEY_DIM)[None, :], other=0.0)
    v = tl.load(values_ptr + row[:, None] * VALUE_DIM + dv[None, :], mask=(dv < VALUE_DIM)[None, :], other=0.0)
    seen = (position + n)[None, :] >= lows[:, None]
    return _attend(q, k, v, top, total, acc, seen, scaling, softcap, WINDOW > 0, SOFTCAP)


@triton.jit(
    do_not_specialize=[
        "start", "end", "begin", "first_staging_page", "rows", "scaling", "softcap", "staging_pages_ptr",
    ]
)  # fmt: skip
def prompt_attention_kernel(
    q_ptr, keys_ptr, values_ptr, numbers_ptr, head_offsets_ptr, staging_pages_ptr, sinks_ptr, out_ptr, q_head, q_row,
    q_one, start, end, begin, first_staging_page, rows, scaling, softcap, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    TOGETHER: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ITEM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    STRETCH: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = TOGETHER * PAGE
    query_page = tl.cdiv(end, PAGE) - 1 - tl.program_id(0)  # the page of these tokens; those that see most come first
    first_head = tl.program_id(1) * TOGETHER
    kv_head = first_head // (HEADS // KV_HEADS)
    keys_ptr += kv_head.to(tl.int64) * rows * KEY_DIM
    values_ptr += kv_head.to(tl.int64) * rows * VALUE_DIM
    m = tl.arange(0, M)
    d = tl.arange(0, BK)
    dv = tl.arange(0, BV)
    head = first_head + m // PAGE
    position = query_page * PAGE + m % PAGE
    ok = (position >= start) & (position < end)
    row = (position - start).to(tl.int64)
    q_rows = q_ptr + head * q_head + row * q_row
    q = tl.load(q_rows[:, None] + d[None, :] * q_one, mask=ok[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    lows = tl.zeros((M,), tl.int32)
    first = 0
    if WINDOW > 0:
        lows = tl.maximum(position - WINDOW + 1, 0)
        first = tl.maximum(tl.maximum(start, query_page * PAGE) - WINDOW + 1, 0) // PAGE * PAGE
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if sinks_ptr is not None:  # the sum begins with the sink, whose value is zero
        top = tl.load(sinks_ptr + head) * LOG2E
        total = tl.where(top > float("-inf"), 1.0, 0.0)
    acc = tl.zeros((M, BV), tl.float32)
    exact = query_page - (query_page % STRETCH != 0).to(tl.int32)  # the first page that these tokens see at 16 bits
    last = tl.maximum(exact * PAGE, first)
    if (last - first) % STEP != 0:  # STEP is one page or two
        top, total, acc = _attend_before(
            q, first, keys_ptr, values_ptr, begin, top, total, acc, lows, scaling, softcap, PAGE, KEY_DIM, VALUE_DIM,
            BK, BV, WINDOW, SOFTCAP,
        )  # fmt: skip
        first += PAGE
    for before in tl.range(first, last, STEP, num_stages=STAGES):
        top, total, acc = _attend_before(
            q, before, keys_ptr, values_ptr, begin, top, total, acc, lows, scaling, softcap, STEP, KEY_DIM, VALUE_DIM,
            BK, BV, WINDOW, SOFTCAP,
        )  # fmt: skip
    head_offset = tl.load(head_offsets_ptr + kv_head)  # of format 0
    for page in tl.range(last // PAGE, query_page + 1):
        staging_page = tl.load(staging_pages_ptr + page - first_staging_page)
        block = tl.multiple_of(staging_page - staging_page % 256 + head_offset - head_offset % 256, 256)
        page_at = page * PAGE + tl.arange(0, PAGE)
        k = full_keys(numbers_ptr, block, page_at < end, KEY_DIM, BK, ITEM)
        v = full_values(numbers_ptr, block, page_at < end, KEY_DIM, VALUE_DIM, BV, ITEM)
        seen = (page_at[None, :] <= position[:, None]) & (page_at[None, :] >= lows[:, None])
        top, total, acc = _attend(q, k, v, top, total, acc, seen, scaling, softcap, True, SOFTCAP)
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = out_ptr + (row * HEADS + head)[:, None] * VALUE_DIM + dv[None, :]
    tl.store(to, mean.to(out_ptr.dtype.element_ty), mask=ok[:, None] & (dv < VALUE_DIM)[None, :])


def prompt_attention(
    query: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    block_ids: torch.Tensor,
    staging_pages: torch.Tensor,
    start: int,
    shape: tuple[int, int, int],
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a sequence's tokens at positions `[start, start + count)`, which are in their pages already.

    Args:
        query: `[heads, count, key_dim]`, any strides, of the dtype of pages of 16 bits.
        memory: uint8, all pages.
        head_offsets: int32 `[FORMATS, kv_heads]`, of the layer.
        block_ids: int64 `[P]`, its pages as they are after the step.
        staging_pages: int64, those that `query`'s tokens see at 16 bits.
        shape: kv_heads, key_dim, value_dim.
        window, softcap: 0 for none.
        sinks: float32 `[heads]` or None, as in `qbe.kernels.ops.paged_attention.paged_attention`.

    Returns:
        `[count, heads, value_dim]` in query's dtype.
    """
    heads, count, key_dim = query.shape
    kv_heads, _, value_dim = shape
    end = start + count
    first = max(0, start - window + 1) // PAGE_SIZE if window else 0
    keys, values = read_pages(
        memory, head_offsets, block_ids[first : quantised_pages((end - 1) // PAGE_SIZE)], shape, query.dtype
    )
    out = torch.empty(count, heads, value_dim, dtype=query.dtype, device=query.device)
    pages = -(-end // PAGE_SIZE) - start // PAGE_SIZE
    wide = query.element_size() < 4  # float32 would need twice the shared memory
    repeat = heads // kv_heads
    small = wide and max(key_dim, value_dim) <= 128
    together = 4 if small and repeat % 4 == 0 else 2 if wide and repeat % 2 == 0 else 1
    prompt_attention_kernel[(pages, heads // together)](
        query, keys, values, memory.view(query.dtype), head_offsets, staging_pages,
        None if sinks is None else sinks.contiguous(), out, query.stride(0), query.stride(1), query.stride(2),
        start, end, first * PAGE_SIZE,
        quantised_pages(start // PAGE_SIZE), keys.shape[1], scaling, softcap,
        HEADS=heads, KV_HEADS=kv_heads, TOGETHER=together, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        ITEM=query.element_size(), BK=max(16, triton.next_power_of_2(key_dim)),
        BV=max(16, triton.next_power_of_2(value_dim)), WINDOW=window, SOFTCAP=softcap != 0,
        STEP=PAGE_SIZE * 2 if small else PAGE_SIZE,
        STAGES=3 if small and together == 2 else 2, num_warps=4 if together == 1 else 8, STRETCH=STRETCH,
    )  # fmt: skip
    return out
