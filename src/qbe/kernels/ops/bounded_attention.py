"""The custom op of bounded attention: what reading pages at few bits can have changed is bounded, and pages that can
have changed too much are read again, at 16 bits, from host memory, in the same call.
"""

from __future__ import annotations

import torch

from qbe.kernels.ops.register import register


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


OP = register(
    "bounded_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) memory, Tensor head_offsets, Tensor slots, "
    "Tensor block_tables, Tensor lengths, Tensor(b!) entropy, Tensor originals, Tensor limits, Tensor(c!) counts, "
    "float scaling, int window, float softcap, Tensor? sinks=None) -> Tensor",
    cpu="qbe.kernels.cpu.attention.paged:bounded_attention",
    cuda="qbe.kernels.triton.attention.bounded:bounded_attention",
    fake=_fake,
)


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
    """`qbe.kernels.ops.paged_attention.paged_attention` whose error is bounded; only what is different is said here.

    The bound and its proof are in `qbe.kernels.reference.bounded_attention`. Nothing waits for the device.

    Args:
        originals: int64 `[B, P]`, entries of the same pages at 16 bits, in host memory that the device can read
            (addresses count from the beginning of `memory`, so they may lie before it or beyond its end) or in
            staging_pages; `NO_ORIGINAL` for a page that has none or needs none.
        limits: float32 `[B]`: by how much a head's output may differ, in the Euclidean norm, from what pages of 16 bits
            give, as a part of that output's norm. Infinity: as much as it may.
        counts: int64 `[B, 3]`; added to: pages below 16 bits that were read, those of them that were read again, and
            the bytes of these. A page counts once for each key head.

    Returns:
        `[B, heads, value_dim]` in query's dtype, contiguous.
    """
    return torch.ops.qbe.bounded_attention.default(
        query, key, value, memory, head_offsets, slots, block_tables, lengths, entropy, originals, limits, counts,
        scaling, window, softcap, sinks,
    )  # fmt: skip
