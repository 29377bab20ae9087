"""Attention of a prompt's tokens: those of one step to each other and to the pages before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from qbe.kvcache.allocator import Format, Page
from qbe.kvcache.pages import PAGE_SIZE, PagePool, pages_for


@dataclass
class Prompt:
    """A sequence's tokens at positions `[start, start + count)`, in rows `[row, row + count)` of a step.

    entries: int64 `[P]`, its pages as they are once the step's tokens are written and the full ones are sealed.
    frames: int64, those of its pages that the step writes to, from that of `start` on, at 16 bits.
    formats: of its pages.
    """

    row: int
    count: int
    start: int
    entries: torch.Tensor
    frames: torch.Tensor
    formats: frozenset[Format]

    @classmethod
    def of(cls, row: int, count: int, start: int, pages: Sequence[Page], device: torch.device) -> Prompt:
        """A sequence with these pages."""
        end = start + count
        used = pages[: pages_for(end)]
        entries = [p.sealed_entry if (i + 1) * PAGE_SIZE <= end else p.entry for i, p in enumerate(used)]
        frames = [p.entry for p in used[start // PAGE_SIZE :]]
        both = torch.tensor(entries + frames).to(device)
        return cls(row, count, start, both[: len(used)], both[len(used) :], frozenset(p.format for p in used))

    @property
    def end(self) -> int:
        """Tokens in the cache after this step."""
        return self.start + self.count


def attend_prompt(
    pool: PagePool,
    layer: int,
    prompt: Prompt,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of `count` tokens, `[1, count, heads, value_dim]`; all of them are in their pages already.

    Args:
        query, key, value: `[1, heads or kv_heads, count, dim]` of these tokens.
        window: a query at position p sees keys at p - window + 1 .. p.
    """
    lowered = any(f.lowered(layer) for f in prompt.formats)
    if prompt.start == 0 and (window is None or prompt.count <= window) and not lowered:
        return attend(query, key, value, None, True, scaling, softcap)
    if has_kernel(query):
        from qbe.kernels.triton.prompt_attention import prompt_attention

        shape, words = pool.shapes[layer], pool.words[layer]
        assert shape is not None
        assert words is not None
        return prompt_attention(
            query[0], pool.memory, words, prompt.entries, prompt.frames, prompt.start, shape.sizes, scaling,
            window or 0, softcap or 0.0,
        )[None]  # fmt: skip
    if lowered:
        return attend_by_page(pool, layer, prompt, query, scaling, window, softcap)
    first = _first_key(prompt.start, window)
    page = first // PAGE_SIZE
    keys, values = (t[:, :, first - page * PAGE_SIZE : prompt.end - page * PAGE_SIZE]
                    for t in pool.read(layer, prompt.entries[page:]))  # fmt: skip
    mask = _causal_mask(prompt.start, prompt.end, first, window, query.device)
    return attend(query, keys, values, mask, False, scaling, softcap)


def has_kernel(query: torch.Tensor) -> bool:
    """Whether there is a kernel for tokens that see pages before theirs."""
    return query.is_cuda


def attend_by_page(
    pool: PagePool,
    layer: int,
    prompt: Prompt,
    query: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """`attend_prompt` where pages are below 16 bits, by torch's own attention: the tokens of one page after the other.

    Each page in turn is read at 16 bits and then as it is sealed.
    """
    page = _first_key(prompt.start, window) // PAGE_SIZE
    begin = page * PAGE_SIZE
    seen = pool.read(layer, prompt.entries[page:])
    own = pool.read(layer, prompt.frames)
    parts = []
    for i in range(len(prompt.frames)):
        start = max(prompt.start, (prompt.start // PAGE_SIZE + i) * PAGE_SIZE)
        end = min(prompt.end, (start // PAGE_SIZE + 1) * PAGE_SIZE)
        first = _first_key(start, window)
        at = slice(start // PAGE_SIZE * PAGE_SIZE - begin, (start // PAGE_SIZE + 1) * PAGE_SIZE - begin)
        sealed = [t[:, :, at].clone() for t in seen]
        for t, o in zip(seen, own, strict=True):
            t[:, :, at] = o[:, :, i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
        keys, values = (t[:, :, first - begin : end - begin] for t in seen)
        mask = _causal_mask(start, end, first, window, query.device)
        rows = query[:, :, start - prompt.start : end - prompt.start]
        parts.append(attend(rows, keys, values, mask, False, scaling, softcap))
        for t, s in zip(seen, sealed, strict=True):
            t[:, :, at] = s
    return torch.cat(parts, 1)


def _first_key(start: int, window: int | None) -> int:
    """Position of the first key that a query at `start` sees."""
    return 0 if window is None else max(0, start - window + 1)


def _causal_mask(start: int, end: int, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool `[end - start, end - first]`, True where the query at `start + row` sees the key at `first + column`."""
    at = torch.arange(first, end, device=device)
    query_at = torch.arange(start, end, device=device)[:, None]
    mask = at <= query_at
    return mask if window is None else mask & (at > query_at - window)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Scaled dot-product attention with grouped heads (Ainslie et al. 2023) and optional soft cap (Gemma 2, section 2).

    query `[n, heads, Q, key_dim]`, key and value `[n, kv_heads, K, dim]`, mask broadcastable to `[n, heads, Q, K]`;
    gives `[n, Q, heads, value_dim]`.
    """
    n, heads, rows, _ = query.shape
    repeat = heads // key.shape[1]
    if rows == 1 and softcap is None:
        # The queries of a group become the rows of its one key head, and nothing is repeated: in bfloat16 on the CPU
        # 25 us against 118 us with enable_gqa (SmolLM2's heads, 128 keys, 1 thread).
        packed = query.reshape(n, key.shape[1], repeat, query.shape[-1])
        out = scaled_dot_product_attention(packed, key, value, mask, scale=scaling)
        return out.reshape(n, 1, heads, value.shape[-1])
    grouped = repeat > 1 and softcap is None and (mask is None or query.device.type == "cpu")
    if repeat > 1 and not grouped:
        # CUDA has no fused kernel for grouped heads with a mask.
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    if softcap is None:
        out = scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scaling, enable_gqa=grouped)
    else:
        out = _attend_softcap(query, key, value, mask, causal, scaling, softcap)
    return out.transpose(1, 2)


def _attend_softcap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention written out, because no fused kernel caps its scores; key and value have a head for every query's."""
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
