"""Attention of a prompt's tokens on a CPU with AVX-512, in bfloat16 (prompt.c)."""

from __future__ import annotations

import ctypes

import torch

from qbe.format.kv_blocks import FORMATS, PAGE_SIZE, STRETCH, quantised_pages
from qbe.kernels.cpu import build
from qbe.kernels.cpu.attention.paged import checked_sinks

_threads = torch.get_num_threads


class _Shape(ctypes.Structure):
    """`PromptShape` of prompt.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "heads", "kv_heads", "key_dim", "value_dim", "rows", "start", "pages", "bytes", "stretch", "query_head",
            "query_row", "window",
        )),
        ("scaling", ctypes.c_float),
    )  # fmt: skip


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a sequence's tokens at positions `[start, start + count)`, which are in their pages already.

    A row's result is the same, bit for bit, however a prompt is cut into steps, if all values are numbers: what is none
    in a value may show in other rows of its page, too. Arguments and result as those of
    `qbe.kernels.triton.attention.prompt.prompt_attention`, where `qbe.kernels.cpu.dispatch.attends_prompts` allows it.

    Raises:
        RuntimeError: arguments that do not belong together, or a page outside of the memory.
        MemoryError: its working buffers find no room.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    (heads, count, key_dim), (kv_heads, own_dim, value_dim) = query.shape, shape
    pages = -(-(start + count) // PAGE_SIZE)
    if (
        key_dim != own_dim
        or heads % max(1, kv_heads)
        or count < 1
        or head_offsets.shape != (FORMATS, kv_heads)
        or block_ids.shape != (pages,)
        or staging_pages.shape != (pages - quantised_pages(start // PAGE_SIZE),)
    ):
        raise RuntimeError(
            f"query {list(query.shape)}, head_offsets {list(head_offsets.shape)}, {len(block_ids)} pages and "
            f"{len(staging_pages)} staging pages of {list(shape)} from token {start} on do not belong together"
        )
    head_offsets, block_ids, staging_pages = (
        head_offsets.contiguous(),
        block_ids.contiguous(),
        staging_pages.contiguous(),
    )
    sinks = checked_sinks(sinks, heads)
    out = torch.empty(count, heads, value_dim, dtype=query.dtype)
    about = _Shape(
        heads, kv_heads, key_dim, value_dim, count, start, pages, memory.shape[0], STRETCH, *query.stride()[:2], window,
        scaling,
    )  # fmt: skip
    failed = build.loaded().qbe_prompt_attention(
        query.data_ptr(), memory.data_ptr(), head_offsets.data_ptr(), block_ids.data_ptr(), staging_pages.data_ptr(),
        None if sinks is None else sinks.data_ptr(), out.data_ptr(), ctypes.addressof(about), _threads(),
    )  # fmt: skip
    if failed == -1:
        raise RuntimeError("a page lies outside of the KV cache's memory")
    if failed:
        raise MemoryError("the CPU kernel found no memory for its working buffers")
    return out
