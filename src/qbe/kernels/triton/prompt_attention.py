"""Attention of a prompt's tokens on a GPU when pages before theirs have less than 16 bits: read in place, one launch.

A program serves the tokens of one page and one query head. They see earlier pages as they are sealed and their own page
at 16 bits, from its frame.
"""

# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qbe.kernels.kv_blocks import PAGE_SIZE
from qbe.kernels.triton.kv_blocks import PAGE
from qbe.kernels.triton.page_walk import attend_pages, attend_run


@triton.jit(do_not_specialize=["start", "end", "scaling", "softcap", "table_ptr", "frames_ptr"])
def prompt_attention_kernel(
    q_ptr, memory_ptr, numbers_ptr, words_ptr, table_ptr, frames_ptr, out_ptr, rotated_ptr, q_head, q_row, q_one, start,
    end, scaling, softcap, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ITEM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    own = start // PAGE + tl.program_id(0)  # the page of these tokens
    head = tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    dv = tl.arange(0, BV)
    at = own * PAGE + tl.arange(0, PAGE)
    ok = (at >= start) & (at < end)
    row = (at - start).to(tl.int64)
    q_rows = q_ptr + head * q_head + row * q_row
    rotated_rows = rotated_ptr + (row * HEADS + head) * 2 * KEY_DIM
    lows = tl.zeros((PAGE,), tl.int32)
    first = 0
    if WINDOW > 0:
        lows = tl.maximum(at - WINDOW + 1, 0)
        first = tl.maximum(tl.maximum(start, own * PAGE) - WINDOW + 1, 0)
    top = tl.full((PAGE,), float("-inf"), tl.float32)
    total = tl.zeros((PAGE,), tl.float32)
    weighted = tl.zeros((PAGE,), tl.float32)
    acc = tl.zeros((BV, PAGE), tl.float32)
    top, total, weighted, acc = attend_pages(
        q_rows, ok, q_one, rotated_rows, top, total, weighted, acc, memory_ptr, numbers_ptr, words_ptr, table_ptr,
        kv_head, first // PAGE, own, lows, at + 1, end, scaling, softcap, KV_HEADS, KEY_DIM, VALUE_DIM, BK, BV, ITEM,
        WINDOW, SOFTCAP, STAGES, ASM, None, 0, 0,
    )  # fmt: skip
    open_word = tl.load(words_ptr + kv_head)  # of format 0
    top, total, weighted, acc = attend_run(
        q_rows, ok, q_one, top, total, weighted, acc, memory_ptr, numbers_ptr, frames_ptr - start // PAGE,
        open_word - open_word % 256, own, own + 1, lows, at + 1, end, scaling, softcap, 16, KEY_DIM, VALUE_DIM, BK, BV,
        ITEM, WINDOW, SOFTCAP, STAGES, ASM, None, 0, 0,
    )  # fmt: skip
    mean = acc / tl.where(total > 0, total, 1.0)[None, :]
    to = out_ptr + (row[None, :] * HEADS + head) * VALUE_DIM + dv[:, None]
    tl.store(to, mean.to(out_ptr.dtype.element_ty), mask=ok[None, :] & (dv < VALUE_DIM)[:, None])


def prompt_attention(
    query: torch.Tensor,
    memory: torch.Tensor,
    blocks: torch.Tensor,
    entries: torch.Tensor,
    frames: torch.Tensor,
    start: int,
    shape: tuple[int, int, int],
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of a sequence's tokens at positions `[start, start + count)`, which are in their pages already.

    Args:
        query: `[heads, count, key_dim]`, any strides, of the dtype of pages of 16 bits.
        memory: uint8, all pages.
        blocks: int32 `[FORMATS, kv_heads]`, the words of the layer.
        entries: int64 `[P]`, its pages; those of `query`'s tokens are not read.
        frames: int64, the pages of `query`'s tokens at 16 bits.
        shape: kv_heads, key_dim, value_dim.
        window, softcap: 0 for none.

    Returns:
        `[count, heads, value_dim]` in query's dtype.
    """
    heads, count, key_dim = query.shape
    kv_heads, _, value_dim = shape
    out = torch.empty(count, heads, value_dim, dtype=query.dtype, device=query.device)
    pages = -(-(start + count) // PAGE_SIZE) - start // PAGE_SIZE
    prompt_attention_kernel[(pages, heads)](
        query, memory, memory.view(query.dtype), blocks, entries, frames, out,
        torch.empty(count, heads, 2, key_dim, dtype=query.dtype, device=query.device),
        query.stride(0), query.stride(1), query.stride(2), start, start + count, scaling, softcap,
        HEADS=heads, KV_HEADS=kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, ITEM=query.element_size(),
        BK=max(16, triton.next_power_of_2(key_dim)), BV=max(16, triton.next_power_of_2(value_dim)), WINDOW=window,
        SOFTCAP=softcap != 0, STAGES=2, ASM=query.is_cuda, num_warps=4,
    )  # fmt: skip
    return out
