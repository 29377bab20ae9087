"""Attention of a prompt's tokens: those of one step to each other and to the pages before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from qbe.format.kv_blocks import quantised_pages
from qbe.kernels.cpu import dispatch
from qbe.kernels.cpu.attention import prompt as on_cpu
from qbe.kvcache import latent
from qbe.kvcache.allocator import Page, PageFormat
from qbe.kvcache.pages import PAGE_SIZE, PagePool, block_ids_of, pages_for


@dataclass
class PromptSpan:
    """A sequence's tokens at positions `[start, start + count)`, in rows `[row, row + count)` of a step.

    block_ids: int64 `[P]`, its pages as they are after the step.
    staging_pages: int64, those of its pages that the step's tokens see at 16 bits, from page `first_staging_page` on.
    formats: of its pages.
    """

    row: int
    count: int
    start: int
    block_ids: torch.Tensor
    staging_pages: torch.Tensor
    formats: frozenset[PageFormat]

    @classmethod
    def of(cls, row: int, count: int, start: int, pages: Sequence[Page], device: torch.device) -> PromptSpan:
        """A sequence with these pages."""
        end = start + count
        used = pages[: pages_for(end)]
        block_ids = block_ids_of(used, quantised_pages(end // PAGE_SIZE))
        staging_pages = block_ids_of(used[quantised_pages(start // PAGE_SIZE) :], 0)
        both = torch.tensor(block_ids + staging_pages).to(device)
        return cls(row, count, start, both[: len(used)], both[len(used) :], frozenset(p.format for p in used))

    @property
    def end(self) -> int:
        """Tokens in the cache after this step."""
        return self.start + self.count

    @property
    def first_staging_page(self) -> int:
        """The first page that the first token sees at 16 bits."""
        return quantised_pages(self.start // PAGE_SIZE)


def attend_prompt(
    pool: PagePool,
    layer: int,
    prompt: PromptSpan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of `count` tokens, `[1, count, heads, value_dim]`; all of them are in their pages already.

    Args:
        query, key, value: `[1, heads or kv_heads, count, dim]` of these tokens.
        window: a query at position p sees keys at p - window + 1 .. p.
        sinks: float32 `[heads]` or None (`qbe.kernels.ops.paged_attention.paged_attention`).
    """
    shape, head_offsets = pool.shapes[layer], pool.head_offsets[layer]
    assert shape is not None
    assert head_offsets is not None
    if shape.latent:
        return latent.attend_prompt(pool, layer, prompt, query, scaling, window, softcap, sinks)
    about = (
        query[0],
        pool.memory,
        head_offsets,
        prompt.block_ids,
        prompt.staging_pages,
        prompt.start,
        shape.sizes,
        scaling,
        window or 0,
    )
    if dispatch.attends_prompts(query, softcap or 0.0):
        return on_cpu.prompt_attention(*about, sinks)[None]
    lowered = any(f.lowered(layer) for f in prompt.formats)
    written_out = sinks is not None and has_kernel(query)  # a GPU has something better
    if prompt.start == 0 and (window is None or prompt.count <= window) and not lowered and not written_out:
        own = key + key * 0  # infinite keys as their pages have them
        return attend(query, own, value, None, scaling, softcap, sinks)
    if has_kernel(query):
        from qbe.kernels.triton.attention.prompt import prompt_attention

        return prompt_attention(*about, softcap or 0.0, sinks)[None]
    if lowered:
        return attend_by_page(pool, layer, prompt, query, scaling, window, softcap, sinks)
    first = _first_key(prompt.start, window)
    page = first // PAGE_SIZE
    keys, values = (t[:, :, first - page * PAGE_SIZE : prompt.end - page * PAGE_SIZE]
                    for t in pool.read(layer, prompt.block_ids[page:]))  # fmt: skip
    return attend(query, keys, values, window, scaling, softcap, sinks)


def has_kernel(query: torch.Tensor) -> bool:
    """Whether a GPU's kernel reads pages for tokens that see some before theirs."""
    return query.is_cuda


def attend_by_page(
    pool: PagePool,
    layer: int,
    prompt: PromptSpan,
    query: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_prompt` where pages are below 16 bits, by torch's own attention: the tokens of one page after the other.

    From the last of them on, so that pages may be left at 16 bits: no token before sees them otherwise.
    """
    begin = _first_key(prompt.start, window) // PAGE_SIZE
    seen = pool.read(layer, prompt.block_ids[begin:])
    exact = pool.read(layer, prompt.staging_pages)
    parts = []
    for page in range((prompt.end - 1) // PAGE_SIZE, prompt.start // PAGE_SIZE - 1, -1):
        start, end = max(prompt.start, page * PAGE_SIZE), min(prompt.end, (page + 1) * PAGE_SIZE)
        first = _first_key(start, window)
        for p in range(max(begin, quantised_pages(page)), page + 1):
            page_columns, staging_page = (
                slice((p - n) * PAGE_SIZE, (p - n + 1) * PAGE_SIZE) for n in (begin, prompt.first_staging_page)
            )
            for t, e in zip(seen, exact, strict=True):
                t[:, :, page_columns] = e[:, :, staging_page]
        keys, values = (t[:, :, first - begin * PAGE_SIZE : end - begin * PAGE_SIZE] for t in seen)
        rows = query[:, :, start - prompt.start : end - prompt.start]
        parts.append(attend(rows, keys, values, window, scaling, softcap, sinks))
    return torch.cat(parts[::-1], 1)


def _first_key(start: int, window: int | None) -> int:
    """Position of the first key that a query at `start` sees."""
    return 0 if window is None else max(0, start - window + 1)


def _causal_mask(rows: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool `[rows, keys]`, True where a query sees a key; the queries are those of the last keys."""
    positions = torch.arange(keys, device=device)
    query_positions = positions[keys - rows :, None]
    mask = positions <= query_positions
    return mask if window is None else mask & (positions > query_positions - window)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens to all, with grouped heads (Ainslie et al. 2023), optional soft cap
    (Gemma 2, section 2) and optional sinks (gpt-oss).

    query `[1, heads, Q, key_dim]`, key and value `[1, kv_heads, K, dim]`, the queries those of the last Q keys; gives
    `[1, Q, heads, value_dim]`.
    """
    n, heads, rows, _ = query.shape
    keys, repeat = key.shape[2], heads // key.shape[1]
    causal = rows == keys and (window is None or rows <= window)
    mask = None if causal else _causal_mask(rows, keys, window, query.device)
    plain = softcap is None and sinks is None
    if rows == 1 and plain:
        # The queries of a group become the rows of its one key head, and nothing is repeated: in bfloat16 on the CPU
        # 25 us against 118 us with enable_gqa (SmolLM2's heads, 128 keys, 1 thread).
        packed = query.reshape(n, key.shape[1], repeat, query.shape[-1])
        out = scaled_dot_product_attention(packed, key, value, mask, scale=scaling)
        return out.reshape(n, 1, heads, value.shape[-1])
    grouped = repeat > 1 and plain and (mask is None or query.device.type == "cpu")
    if repeat > 1 and not grouped:
        # CUDA has no fused kernel for grouped heads with a mask.
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    if plain:
        out = scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=grouped)
    else:
        out = _attend_written_out(query, key, value, mask, causal, scaling, softcap, sinks)
    return out.transpose(1, 2)


def _attend_written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention whose scores no fused kernel caps, and whose sinks none counts; key and value have a head for every
    query's."""
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        own = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores.float(), own], -1).softmax(-1)[..., :-1].to(query.dtype) @ value
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
