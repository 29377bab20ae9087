"""`qbe::paged_attention` written out: one sequence after the other, float32 (float64 stays), nothing clever."""

from __future__ import annotations

import torch


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
    """Arguments and result as those of `qbe.kernels.attention_ops.paged_attention`. It waits for the device."""
    page_size, kv_heads = keys.shape[1:3]
    repeat = query.shape[1] // kv_heads
    keys.flatten(0, 1)[slots] = key
    values.flatten(0, 1)[slots] = value
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = []
    for q, table, length in zip(query, tables, lengths.tolist(), strict=True):
        at = torch.arange(max(0, length - window) if window else 0, length, device=query.device)
        where = table[at // page_size].long() * page_size + at % page_size
        k, v = (m.flatten(0, 1)[where].transpose(0, 1).repeat_interleave(repeat, 0).to(wide) for m in (keys, values))
        scores = torch.einsum("hd,hkd->hk", q.to(wide), k) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        out.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), v))
    return torch.stack(out).to(query.dtype)
