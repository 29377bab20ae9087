"""Launch of `qbe::bounded_attention` on a GPU: a walk over the pages, the pages to read again, and the walk again.

The second walk's programs leave at once where nothing is read again. Originals are read in place, from pinned host
memory: to a kernel it is memory like any other.
"""

from __future__ import annotations

import torch
import triton

from qbe.format.kv_blocks import FULL_BITS, head_layout
from qbe.kernels.triton.attention.page_notes import NOTES
from qbe.kernels.triton.attention.paged import Noted, walk
from qbe.kernels.triton.attention.raise_pages_kernel import raise_pages_kernel

MOST_ROWS = 256


def bounded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    originals: torch.Tensor,
    limits: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `qbe.kernels.ops.bounded_attention.bounded_attention`. Long batches (prompts) go in parts: the notes need
    room."""
    parts = []
    for first in range(0, query.shape[0], MOST_ROWS):
        rows = slice(first, first + MOST_ROWS)
        parts.append(_attend(
            query[rows], key[rows], value[rows], memory, head_offsets, slots[rows], block_tables[rows], lengths[rows],
            entropy[rows], originals[rows], limits[rows], counts[rows], scaling, window, softcap, sinks,
        ))  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    originals: torch.Tensor,
    limits: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    batch, heads, key_dim = query.shape
    kv_heads, value_dim = value.shape[1:]
    pages = block_tables.shape[1]
    wide = max(16, triton.next_power_of_2(pages))
    notes = torch.empty(batch, heads, NOTES.value, pages + 1, dtype=torch.float32, device=query.device)
    again = torch.empty(batch, kv_heads, pages, dtype=torch.int64, device=query.device)
    raised = torch.empty(batch, kv_heads, dtype=torch.int32, device=query.device)
    out = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
    where = memory, head_offsets, slots
    numbers = scaling, window, softcap
    walk(query, key, value, *where, block_tables, lengths, entropy, *numbers, sinks, out, Noted(notes=notes))
    raise_pages_kernel[(batch * kv_heads,)](
        notes, pages + 1, out, head_offsets, block_tables, block_tables.stride(0), originals, originals.stride(0),
        lengths, limits, counts, None if sinks is None else sinks.contiguous(), again, raised,
        head_layout(FULL_BITS, key_dim, value_dim, key.element_size()).nbytes,
        KV_HEADS=kv_heads, REPEAT=heads // kv_heads, VALUE_DIM=value_dim, BV=max(16, triton.next_power_of_2(value_dim)),
        BP=wide, WINDOW=window, num_warps=min(16, max(4, wide // 512)),
    )  # fmt: skip
    walk(query, key, value, *where, again, lengths, entropy, *numbers, sinks, out, Noted(raised=raised))
    return out
