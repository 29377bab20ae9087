"""The custom op of attention in a decode step: one new token for each sequence, read from pages.

All of its arguments keep their shapes while sequences grow, come and go and change their precision, so that one CUDA
graph, or one compiled step, serves every step of a batch size.
"""

from __future__ import annotations

import torch

from qbe.kernels.ops.register import register

_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, Tensor(a!) memory, Tensor head_offsets, Tensor slots, "
    "Tensor block_tables, Tensor lengths, Tensor(b!) entropy, float scaling, int window, float softcap"
)
_SINKS = ", Tensor? sinks=None"


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _fake_share(*tensors: torch.Tensor) -> None:
    pass


PAGED = register(
    f"paged_attention({_ATTENTION}{_SINKS}) -> Tensor",
    cpu="qbe.kernels.cpu.attention.paged:paged_attention",
    cuda="qbe.kernels.cuda.dispatch:paged_attention",
    fake=_fake,
)
SHARED = register(
    f"shared_attention({_ATTENTION}, Tensor cuts{_SINKS}) -> Tensor",
    cuda="qbe.kernels.cuda.dispatch:shared_attention",
    fake=_fake,
)
BATCH_INVARIANT = register(
    f"batch_invariant_attention({_ATTENTION}{_SINKS}) -> Tensor",
    cuda="qbe.kernels.cuda.dispatch:batch_invariant_attention",
    fake=_fake,
)
SHARE_PAGES = register(
    "share_pages(Tensor head_offsets, Tensor windows, Tensor block_tables, Tensor lengths, Tensor(a!) cuts) -> ()",
    cuda="qbe.kernels.cuda.decode_attention:share",
    fake=_fake_share,
)


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
) -> torch.Tensor:
    """Writes each sequence's new key and value to its page, then lets its query attend to its own pages.

    Every page is read at its own precision; see `qbe.format.kv_blocks` for its layout, block ids and head offsets.

    Args:
        query: `[B, heads, key_dim]`; any strides, as for key and value.
        key: `[B, kv_heads, key_dim]`, of the new tokens; its dtype is that of pages of 16 bits.
        value: `[B, kv_heads, value_dim]`.
        memory: uint8, all pages; written at `slots`.
        head_offsets: int32 `[FORMATS, kv_heads]`, of one layer; format 0 has 16 bits everywhere.
        slots: int64 `[B]`, address of a page of format 0 | where in it the new token goes. Rows that pad a batch share
            one slot.
        block_tables: int64 `[B, P]`, entries of each sequence's pages; those past its length are not read.
        lengths: int64 `[B]`, tokens of each sequence with the new one, 1 or more.
        entropy: float32 `[B, heads]`; written: the entropy of each head's weights, in nats.
        scaling: factor of the scores.
        window: a query sees that many last tokens; 0 means all.
        softcap: scores s become softcap * tanh(s / softcap); 0 means they stay.
        sinks: float32 `[heads]`: for each query head one more score, of nothing: it takes its part of the weights and
            has no value (gpt-oss), and counts in the entropy. -infinity: this head has none; None: no head has.

    Returns:
        `[B, heads, value_dim]` in query's dtype, contiguous; sums are taken in float32.
    """
    return torch.ops.qbe.paged_attention.default(
        query, key, value, memory, head_offsets, slots, block_tables, lengths, entropy, scaling, window, softcap, sinks
    )


def share_pages(
    head_offsets: torch.Tensor,
    windows: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    cuts: torch.Tensor,
) -> None:
    """On a GPU: which pages each block of a decode step's attentions will read, for all layers of one shape.

    Pages are shared out by what they cost to read, whatever the lengths of sequences and the precisions of their heads
    and pages. Without this every block of every layer finds it out for itself, before it has anything to read.

    Args:
        head_offsets: int32 `[layers, FORMATS, kv_heads]`, theirs.
        windows: int32 `[layers]`; 0 means all keys are seen.
        block_tables, lengths: as in `paged_attention`; of all layers.
        cuts: int32 `[layers, processors + 1, 2]`, written: where each block's pages begin.
    """
    torch.ops.qbe.share_pages.default(head_offsets, windows, block_tables, lengths, cuts)


def shared_attention(
    *arguments: torch.Tensor | float, cuts: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """On a GPU: `paged_attention` with what `share_pages` wrote for this layer, from these tables and lengths.

    Args:
        arguments: of `paged_attention`, in its order, up to `softcap`.
        cuts: int32 `[processors + 1, 2]`.
        sinks: as in `paged_attention`.
    """
    return torch.ops.qbe.shared_attention.default(*arguments, cuts, sinks)


def batch_invariant_attention(*arguments: torch.Tensor | float, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """On a GPU: `paged_attention` in which a row comes out the same, bit for bit, whatever rows are beside it.

    Its pages are cut into parts by what a table has room for, which makes long contexts slower where rows are many.

    Args:
        arguments: of `paged_attention`, in its order, up to `softcap`.
        sinks: as in `paged_attention`.
    """
    return torch.ops.qbe.batch_invariant_attention.default(*arguments, sinks)
