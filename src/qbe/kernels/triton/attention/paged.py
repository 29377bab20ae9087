"""Launch of `qbe::paged_attention` on a GPU: flash-decoding (Dao et al. 2023) over pages, the sum over keys split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kernels.cuda import decode_attention
from qbe.kernels.triton.attention.paged_kernel import combine_kernel, decode_attention_kernel
from qbe.kernels.triton.kv_cache.rotation import rotate_queries_kernel

MOST_SPLITS = 64
PROGRAMS = 8  # of two warps, on a processor: two rounds of the four whose 255 registers a thread fit


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def splits_for(batch: int, kv_heads: int, tokens: int, processors: int) -> int:
    """Parts that a sequence's pages are cut into: eight programs a processor, none without a page.

    It depends on shapes alone (`tokens` is what a table has room for), never on how long the sequences are now.
    """
    return max(1, min(MOST_SPLITS, -(-tokens // PAGE_SIZE), PROGRAMS * processors // (batch * kv_heads)))


@dataclass(frozen=True)
class Noted:
    """What a walk of bounded attention has more than a plain one.

    notes: float32 `[B, heads, 4, P + 1]`, written (`qbe.kernels.triton.attention.page_notes`).
    raised: int32 `[B, kv_heads]`: heads with 0 there are left as they are.
    """

    notes: torch.Tensor | None = None
    raised: torch.Tensor | None = None


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """See `qbe.kernels.ops.paged_attention.paged_attention`. Any head sizes, any ratio of query to key heads up to 64.

    `batch_invariant` is `qbe.kernels.ops.paged_attention.batch_invariant_attention`.
    """
    out = torch.empty(query.shape[0], query.shape[1], value.shape[2], dtype=query.dtype, device=query.device)
    where = memory, head_offsets, slots, block_tables, lengths, entropy
    walk(query, key, value, *where, scaling, window, softcap, sinks, out, Noted(), batch_invariant)
    return out


def walk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    head_offsets: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    noted: Noted,
    batch_invariant: bool = False,
) -> None:
    """The attention of `paged_attention` into `out`; tables may be `[B, kv_heads, P]`, a table for each key head."""
    batch, heads, key_dim = query.shape
    kv_heads, value_dim = value.shape[1:]
    repeat = heads // kv_heads
    width, count = block_tables.shape[-1], processors(query.device)
    parts = (
        decode_attention.batch_invariant_splits(kv_heads, width, count) if batch_invariant
        else splits_for(batch, kv_heads, width * PAGE_SIZE, count)
    )  # fmt: skip
    means = torch.empty(batch, parts, heads, value_dim, dtype=torch.float32, device=query.device)
    sums = torch.empty(batch, parts, 3, heads, dtype=torch.float32, device=query.device)  # see `combine_kernel`
    rotated = torch.empty(batch, heads, 2, key_dim, dtype=query.dtype, device=query.device)
    wide = max(16, triton.next_power_of_2(key_dim))
    rotate_queries_kernel[(batch, heads)](
        query, rotated, query.stride(0), query.stride(1), query.stride(2), HEADS=heads, KEY_DIM=key_dim, BK=wide,
        num_warps=1,
    )  # fmt: skip
    decode_attention_kernel[(batch * kv_heads, parts)](
        query, key, value, memory, memory.view(key.dtype), head_offsets, slots, block_tables, lengths, means, sums,
        noted.notes, noted.raised, rotated, None if sinks is None else sinks.contiguous(), query.stride(0),
        query.stride(1), query.stride(2), key.stride(0), key.stride(1), key.stride(2), value.stride(0),
        value.stride(1), value.stride(2), block_tables.stride(0),
        block_tables.stride(1) if block_tables.dim() == 3 else 0, block_tables.shape[-1] + 1, scaling, softcap, parts,
        KV_HEADS=kv_heads, REPEAT=repeat, KEY_DIM=key_dim, VALUE_DIM=value_dim, ITEM=key.element_size(),
        BM=max(8, triton.next_power_of_2(repeat)), BK=wide, BV=max(16, triton.next_power_of_2(value_dim)),
        WINDOW=window, SOFTCAP=softcap != 0, ASM=query.is_cuda, num_warps=2 if noted.notes is None else 4,
    )  # fmt: skip
    combine(means, sums, out, entropy, noted.raised)


def combine(
    means: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, entropy: torch.Tensor, raised: torch.Tensor | None
) -> None:
    """The parts' means `[B, parts, heads, value_dim]` and sums `[B, parts, 3, heads]` become `out` and `entropy`."""
    batch, parts, heads, value_dim = means.shape
    combine_kernel[(batch * heads,)](
        means, sums, out, entropy, raised, entropy.stride(0), heads, parts, BS=triton.next_power_of_2(parts),
        REPEAT=heads // raised.shape[1] if raised is not None else 1, VALUE_DIM=value_dim,
        BV=max(16, triton.next_power_of_2(value_dim)), num_warps=4,
    )  # fmt: skip
