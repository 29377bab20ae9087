"""Attention over pages, as an attention function of transformers (`AttentionInterface`).

A step packs the tokens of many sequences into one row of tokens `[1, T]`. The model's own code computes queries, keys
and values for all T at once; `PagedCache.update` writes the keys and values to pages, and `paged_attention` lets every
sequence attend to its own pages only. What belongs to whom is in the layout that the runner gives the cache for a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from qbe.errors import QBEError
from qbe.kernels import attention_ops
from qbe.kvcache.pages import PAGE_SIZE, pages_for

if TYPE_CHECKING:
    from qbe.kvcache.cache import PagedCache

ATTENTION = "qbe_paged"  # the name under which transformers finds `paged_attention`
CACHE = "qbe_cache"  # the attribute of an attention module that holds its `PagedCache`

# Things some models ask of attention that are not built here; silently dropping one would give wrong text.
_NOT_HONOURED = ("s_aux", "position_bias", "sinks", "head_mask")


@dataclass
class Span:
    """One sequence's part of a step: rows `[row, row + count)` hold its tokens at positions `[start, start + count)`.

    `pages` is its block table, int64 on the model's device; `run` is its first page when the pages are consecutive
    (their memory is then one view), else None.
    """

    row: int
    count: int
    start: int
    pages: torch.Tensor
    run: int | None

    @property
    def end(self) -> int:
        """Tokens of the sequence in the cache after this step."""
        return self.start + self.count


@dataclass
class Group:
    """Spans of one token that are attended in one call, and what of their pages is read.

    rows: int64 `[n]`, their rows in the step. pages: int64 `[n, P]`. mask: bool `[n, 1, 1, P * PAGE_SIZE]`, True where
    a key is seen.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    mask: torch.Tensor


@dataclass
class StepLayout:
    """What a step's rows are.

    slots: int64 `[T]`, where in the pages each row's key and value go.
    single: spans attended one by one.
    batched: spans of one token whose pages are copied side by side and attended in one call.
    """

    cache: PagedCache
    spans: list[Span]
    slots: torch.Tensor
    single: list[Span] = field(default_factory=list)
    batched: list[Span] = field(default_factory=list)
    _groups: dict[int | None, list[Group]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # On the CPU a call per sequence over a view of its pages is the fastest, and a batched one comes before a call
        # per sequence over a copy (8 sequences of 512 tokens, SmolLM2's heads, float32, 1 thread, one layer: 574, 743
        # and 923 us). A GPU wants one launch for all.
        on_gpu = self.slots.is_cuda
        for span in self.spans:
            batch = span.count == 1 and (span.run is None or (on_gpu and len(self.spans) > 1))
            (self.batched if batch else self.single).append(span)

    def groups(self, window: int | None) -> list[Group]:
        """`batched` in groups of similar length, for layers with this sliding window; made once a step."""
        if window not in self._groups:
            by_size: dict[int, list[Span]] = {}
            for span in self.batched:
                pages = pages_for(span.end) - _first_key(span, window) // PAGE_SIZE
                # Powers of two: padding to the longest of a group then at most doubles the work.
                by_size.setdefault((pages - 1).bit_length(), []).append(span)
            self._groups[window] = [_group(spans, window) for spans in by_size.values()]
        return self._groups[window]


@dataclass
class DecodeLayout:
    """A step of one new token for each sequence, in tensors whose shapes do not change from step to step.

    slots, tables, lengths: see `qbe.kernels.attention_ops.paged_attention`.
    """

    cache: PagedCache
    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor


@contextmanager
def step(layout: StepLayout | DecodeLayout) -> Iterator[None]:
    """Makes `layout` the one that `paged_attention` and its cache use inside the block."""
    layout.cache.layout = layout
    try:
        yield
    finally:
        layout.cache.layout = None


def _first_key(span: Span, window: int | None) -> int:
    """Position of the first key that the span's first query sees."""
    return 0 if window is None else max(0, span.start - window + 1)


def _group(spans: list[Span], window: int | None) -> Group:
    firsts = [_first_key(s, window) for s in spans]
    pages = pad_sequence(
        [s.pages[f // PAGE_SIZE : pages_for(s.end)] for s, f in zip(spans, firsts, strict=True)], batch_first=True
    )
    device = pages.device
    low = torch.tensor([f % PAGE_SIZE for f in firsts], device=device)
    high = torch.tensor([s.end - f // PAGE_SIZE * PAGE_SIZE for s, f in zip(spans, firsts, strict=True)], device=device)
    at = torch.arange(pages.shape[1] * PAGE_SIZE, device=device)
    mask = (at >= low[:, None]) & (at < high[:, None])
    return Group(torch.tensor([s.row for s in spans], device=device), pages, mask[:, None, None])


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sequence of the step to its own pages.

    Args:
        query: `[1, heads, T, key_dim]`.
        key, value: `[1, kv_heads, T, dim]` of this step; `PagedCache.update` has written them to pages already.
        sliding_window: a query at position p sees keys at p - window + 1 .. p.
        softcap: scores s become `softcap * tanh(s / softcap)`.

    Returns:
        `[1, T, heads, value_dim]` and None (attention weights are not kept).

    Raises:
        QBEError: no step is running, or the model asks for something that is not built here.
    """
    cache: PagedCache | None = getattr(module, CACHE, None)
    layout = None if cache is None else cache.layout
    if cache is None or layout is None:
        raise QBEError("this model belongs to an engine: call the engine, or load the model again to call it directly")
    for name in _NOT_HONOURED:
        if kwargs.get(name) is not None:
            raise QBEError(f"{type(module).__name__} needs attention with '{name}': QBE cannot run this model")
    if attention_mask is not None or kwargs.get("is_causal") is False:
        raise QBEError(f"{type(module).__name__} needs a mask that is not causal: QBE runs causal models")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    memory = cache.memory[layer]
    if memory is None:
        raise QBEError(f"layer {layer} ({type(module).__name__}) reads another layer's keys: QBE cannot run this model")
    keys, values = memory
    if key.shape[1::2] != keys.shape[1::2] or value.shape[1::2] != values.shape[1::2]:
        raise QBEError(f"{type(module).__name__} expands its keys after caching them: QBE cannot run this model")
    window = sliding_window if sliding_window is not None else cache.windows[layer]
    if isinstance(layout, DecodeLayout):
        return _attend_decode(layout, layer, query, key, value, scaling, window, softcap), None

    groups = layout.groups(window) if layout.batched else []
    if len(groups) == 1 and not layout.single:
        return _attend_group(cache, layer, groups[0], query, scaling, softcap).transpose(0, 1), None
    parts = []
    for span in layout.single:
        q = query if len(layout.spans) == 1 else query.narrow(2, span.row, span.count)
        if span.start == 0 and span.count > 1 and (window is None or span.count <= window):
            k, v = key.narrow(2, span.row, span.count), value.narrow(2, span.row, span.count)
            parts.append(attend(q, k, v, None, True, scaling, softcap))
        else:
            first = _first_key(span, window)
            mask = _causal_mask(span, first, window, q.device) if span.count > 1 else None
            k, v = (_read(cache, layer, part, span, first) for part in (0, 1))
            parts.append(attend(q, k, v, mask, False, scaling, softcap))
    if not groups:
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None

    out = query.new_empty(1, query.shape[2], query.shape[1], values.shape[-1])
    for span, part in zip(layout.single, parts, strict=True):
        out[:, span.row : span.row + span.count] = part
    for group in groups:
        queries = query.index_select(2, group.rows)
        out[0, group.rows] = _attend_group(cache, layer, group, queries, scaling, softcap).squeeze(1)
    return out, None


def _attend_decode(
    layout: DecodeLayout,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of a decode step, `[1, B, heads, value_dim]`; it writes the new keys and values, too."""
    pool = layout.cache.pool
    keys, values = pool.keys[layer], pool.values[layer]
    assert keys is not None
    assert values is not None
    out = attention_ops.paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        keys,
        values,
        layout.slots,
        layout.tables,
        layout.lengths,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window or 0,
        softcap or 0.0,
    )
    return out[None]


def _attend_group(
    cache: PagedCache, layer: int, group: Group, query: torch.Tensor, scaling: float | None, softcap: float | None
) -> torch.Tensor:
    """Attention of a group's tokens, query `[1, heads, n, key_dim]`; gives `[n, 1, heads, value_dim]`."""
    k, v = (_read_pages(memory[layer], group.pages) for memory in (cache.pool.keys, cache.pool.values))
    return attend(query.permute(2, 1, 0, 3), k, v, group.mask, False, scaling, softcap)


def _read(cache: PagedCache, layer: int, part: int, span: Span, first: int) -> torch.Tensor:
    """A sequence's keys (part 0) or values (1) from position `first` on, `[1, kv_heads, n, dim]`.

    A view if its pages are a run, else a copy.
    """
    if span.run is not None:
        return cache.memory[layer][part].narrow(2, span.run * PAGE_SIZE + first, span.end - first)  # type: ignore[index]
    page = first // PAGE_SIZE
    tokens = _read_pages(
        (cache.pool.keys, cache.pool.values)[part][layer], span.pages[None, page : pages_for(span.end)]
    )
    return tokens.narrow(2, first - page * PAGE_SIZE, span.end - first)


def _read_pages(memory: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
    """Copies pages `[n, P]` of memory `[num_pages, PAGE_SIZE, kv_heads, dim]`: `[n, kv_heads, P * PAGE_SIZE, dim]`."""
    assert memory is not None
    n, count = pages.shape
    return memory.index_select(0, pages.flatten()).view(n, count * PAGE_SIZE, *memory.shape[2:]).transpose(1, 2)


def _causal_mask(span: Span, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool `[count, end - first]`, True where the query of a row sees a key."""
    at = torch.arange(first, span.end, device=device)
    query_at = torch.arange(span.start, span.end, device=device)[:, None]
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


AttentionInterface.register(ATTENTION, paged_attention)
