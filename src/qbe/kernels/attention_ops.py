"""The custom op of attention in a decode step: one new token for each sequence, read from pages.

All of its arguments keep their shapes while sequences grow, come and go and change their precision, so that one CUDA
graph, or one compiled step, serves every step of a batch size.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("qbe", "FRAGMENT")
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) memory, Tensor blocks, Tensor slots, "
    "Tensor tables, Tensor lengths, Tensor(b!) entropy, float scaling, int window, float softcap) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Writes each sequence's new key and value to its page, then lets its query attend to its own pages.

    Every page is read at its own precision; see `qbe.kernels.kv_blocks` for its layout, entries and words.

    Args:
        query: `[B, heads, key_dim]`; any strides, as for key and value.
        key: `[B, kv_heads, key_dim]`, of the new tokens; its dtype is that of pages of 16 bits.
        value: `[B, kv_heads, value_dim]`.
        memory: uint8, all pages; written at `slots`.
        blocks: int32 `[FORMATS, kv_heads]`, the words of one layer; format 0 has 16 bits everywhere.
        slots: int64 `[B]`, address of a page of format 0 | where in it the new token goes. Rows that pad a batch share
            one slot.
        tables: int64 `[B, P]`, entries of each sequence's pages; those past its length are not read.
        lengths: int64 `[B]`, tokens of each sequence with the new one, 1 or more.
        entropy: float32 `[B, heads]`; written: the entropy of each head's weights, in nats.
        scaling: factor of the scores.
        window: a query sees that many last tokens; 0 means all.
        softcap: scores s become softcap * tanh(s / softcap); 0 means they stay.

    Returns:
        `[B, heads, value_dim]` in query's dtype, contiguous; sums are taken in float32.
    """
    return torch.ops.qbe.paged_attention.default(
        query, key, value, memory, blocks, slots, tables, lengths, entropy, scaling, window, softcap
    )


@torch.library.register_fake("qbe::paged_attention", lib=_library)
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    from qbe.kernels.cpu.paged_attention import paged_attention as kernel

    return kernel(query, key, value, memory, blocks, slots, tables, lengths, entropy, scaling, window, softcap)


def _cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    entropy: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    from qbe.kernels.triton.paged_attention import paged_attention as kernel

    return kernel(query, key, value, memory, blocks, slots, tables, lengths, entropy, scaling, window, softcap)


on_cpu = torch.library.Library("qbe", "IMPL")  # `qbe.kernels.cpu.native` may take its place
on_cpu.impl("paged_attention", _cpu, "CPU")
_library.impl("paged_attention", _cuda, "CUDA")
