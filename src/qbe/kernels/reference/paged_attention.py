"""`qbe::paged_attention` written out: one sequence after the other, float32 (float64 stays), nothing clever."""

from __future__ import annotations

import torch

from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kernels.reference.kv_pages import read_pages, write_rows


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
    """Arguments and result as those of `qbe.kernels.ops.paged_attention.paged_attention`. It waits for the device."""
    write_rows(key, value, memory, head_offsets, slots)
    heads, shape = query.shape[1], (key.shape[1], key.shape[2], value.shape[2])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = []
    for row, (q, length) in enumerate(zip(query, lengths.tolist(), strict=True)):
        first = max(0, length - window) if window else 0
        page = first // PAGE_SIZE
        block_ids = block_tables[row, page : -(-length // PAGE_SIZE)]
        seen = slice(first - page * PAGE_SIZE, length - page * PAGE_SIZE)
        pages = read_pages(memory, head_offsets, block_ids, shape, key.dtype, wide)
        k, v = (t[:, seen].repeat_interleave(heads // shape[0], 0) for t in pages)
        scores = torch.einsum("hd,hkd->hk", q.to(wide), k) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        weights = weights_of(scores, sinks)
        entropy[row, :heads] = -torch.special.xlogy(weights, weights).sum(-1)
        out.append(torch.einsum("hk,hkd->hd", weights[:, : length - first], v))
    return torch.stack(out).to(query.dtype)


def weights_of(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Of scores `[heads, keys]` the weights; one more column, that of the sinks `[heads]`, where there are some."""
    return (scores if sinks is None else torch.cat([scores, sinks.to(scores.dtype)[:, None]], 1)).softmax(-1)
