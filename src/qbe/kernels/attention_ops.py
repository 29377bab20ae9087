"""The custom op of attention in a decode step: one new token for each sequence, read from pages.

All of its arguments keep their shapes while sequences grow, come and go, so that one CUDA graph, or one compiled step,
serves every step of a batch size.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("qbe", "FRAGMENT")
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
    "Tensor tables, Tensor lengths, float scaling, int window, float softcap) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Writes each sequence's new key and value to its page, then lets its query attend to its own pages.

    Args:
        query: `[B, heads, key_dim]`; any strides, as for key and value.
        key: `[B, kv_heads, key_dim]`, of the new tokens.
        value: `[B, kv_heads, value_dim]`.
        keys: `[pages, page_size, kv_heads, key_dim]`, one layer's memory; written at `slots`.
        values: `[pages, page_size, kv_heads, value_dim]`; written.
        slots: int64 `[B]`, page * page_size + offset of the new tokens. Rows that pad a batch share one slot.
        tables: int32 `[B, P]`, pages of each sequence; entries past its length are not read.
        lengths: int64 `[B]`, tokens of each sequence with the new one, 1 or more.
        scaling: factor of the scores.
        window: a query sees that many last tokens; 0 means all.
        softcap: scores s become softcap * tanh(s / softcap); 0 means they stay.

    Returns:
        `[B, heads, value_dim]` in query's dtype, contiguous; sums are taken in float32.
    """
    return torch.ops.qbe.paged_attention.default(
        query, key, value, keys, values, slots, tables, lengths, scaling, window, softcap
    )


@torch.library.register_fake("qbe::paged_attention", lib=_library)
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    from qbe.kernels.cpu.paged_attention import paged_attention as kernel

    return kernel(query, key, value, keys, values, slots, tables, lengths, scaling, window, softcap)


def _cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    from qbe.kernels.triton.paged_attention import paged_attention as kernel

    return kernel(query, key, value, keys, values, slots, tables, lengths, scaling, window, softcap)


on_cpu = torch.library.Library("qbe", "IMPL")  # `qbe.kernels.cpu.native` may take its place
on_cpu.impl("paged_attention", _cpu, "CPU")
_library.impl("paged_attention", _cuda, "CUDA")
