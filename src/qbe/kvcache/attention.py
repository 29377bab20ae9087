"""Attention over pages, as an attention function of transformers (`AttentionInterface`).

A step packs the tokens of many sequences into one row of tokens `[1, T]`. The model's own code computes queries, keys
and values for all T at once; `PagedCache.update` writes the keys and values to pages, and `paged_attention` lets every
sequence attend to its own pages only. What belongs to whom is in the layout that the runner gives the cache for a step.

A token sees its own page at 16 bits, within a stretch of pages the one before, too (`kv_blocks.quantised_pages`), and
all others at the precision they are quantised at. What it sees depends on its position alone: not on how a prompt was
cut into steps, on who shares its pages, or on preemption.

In bounded mode that holds for every token by itself: its attention says which pages it reads again at 16 bits. The
tokens of a bounded prompt therefore run as those of decode steps do, each as a row with pages of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface

from qbe.errors import QBEError
from qbe.format.kv_blocks import NO_ORIGINAL, quantised_pages
from qbe.kernels.ops import bounded_attention as bounded_ops
from qbe.kernels.ops import paged_attention as attention_ops
from qbe.kernels.ops.kv_pages import write_rows
from qbe.kvcache import latent
from qbe.kvcache.allocator import Page
from qbe.kvcache.pages import PAGE_SIZE, block_ids_of, in_runs, newly_quantised, pages_for
from qbe.kvcache.prompt import PromptSpan, attend_prompt
from qbe.kvcache.step_op import step_attention

if TYPE_CHECKING:
    from qbe.kvcache.cache import PagedCache
    from qbe.kvcache.shares import Shares

ATTENTION = "qbe_paged"  # the name under which transformers finds `paged_attention`
# After the attention of a layer: its number, what it found [n, heads, value_dim], the entropy float32 [n, heads] and
# lengths int64 [n] of its rows, and their numbers in the step int64 [n] (None: the first n). What is returned goes on
# in the place of what it found.
Observe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
CACHE = "qbe_cache"  # the attribute of an attention module that holds its `PagedCache`

# Things some models ask of attention that are not built here; silently dropping one would give wrong text.
_NOT_HONOURED = ("position_bias", "sinks", "head_mask")


@dataclass
class Span:
    """One sequence's part of a step: rows `[row, row + count)` hold its tokens `[start, start + count)`.

    limit: of bounded attention (`Sequence.kv_limit`); infinity for none.
    """

    row: int
    count: int
    start: int
    pages: list[Page]
    limit: float = math.inf

    @property
    def end(self) -> int:
        """Tokens of the sequence in the cache after this step."""
        return self.start + self.count


@dataclass
class Bounds:
    """What bounded attention has more than the plain one: see `qbe.kernels.ops.bounded_attention`."""

    originals: torch.Tensor
    limits: torch.Tensor
    counts: torch.Tensor


@dataclass
class DecodeLayout:
    """A step of one new token for each sequence, in tensors whose shapes do not change from step to step.

    slots, block_tables, lengths: see `qbe.kernels.ops.paged_attention.paged_attention`.
    entropy: per layer what that op writes there; None for a layer without attention.
    bounds: None when no sequence of the step is bounded.
    several: whether any sequence has several rows, one after the other, the later of which see the earlier ones' keys.
    observe: called after the attention of each layer, within the step; None: nobody asks.
    rows: int64 `[n]`, their numbers in the step; None: all of them, in order.
    shares: found before the step by who runs it; None: each attention finds out for itself.
    batch_invariant: on a GPU a row comes out the same whatever rows are beside it (`qbe.kernels.ops.paged_attention`).
    """

    cache: PagedCache
    slots: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor
    entropy: list[torch.Tensor | None]
    bounds: Bounds | None = None
    several: bool = False
    observe: Observe | None = None
    rows: torch.Tensor | None = None
    shares: Shares | None = None
    batch_invariant: bool = False


@dataclass
class OpenLayout:
    """Stands for any `StepLayout` while a step is compiled: attention is an op that finds the real one (`step_op`)."""

    cache: PagedCache


@dataclass
class StepLayout:
    """What a step's rows are.

    slots: int64 `[T]` on the device, where each row's key and value go: address of a staging_page | offset in it.
    filled: what `PagePool.quantise` takes: the pages that are quantised once prompts have run in this step.
    observe: of the rows in `single`, as in `DecodeLayout`.
    prompts: spans of several tokens. single: rows int64 `[n]` of those of one, then of those of several that are
        bounded, and their layout as of a decode step.
    """

    cache: PagedCache
    spans: list[Span]
    slots: torch.Tensor
    observe: Observe | None = None
    filled: torch.Tensor | None = field(init=False)
    prompts: list[PromptSpan] = field(init=False)
    single: tuple[torch.Tensor, DecodeLayout] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        pool, device = self.cache.pool, self.slots.device
        several = [s for s in self.spans if s.count > 1 and s.pages]
        self.filled = pool.to_quantise([p for s in several for p in newly_quantised(s.pages, s.start, s.end)])
        self.prompts = [PromptSpan.of(s.row, s.count, s.start, s.pages, device) for s in several if s.limit == math.inf]
        alone = [s for s in self.spans if s.count == 1 and s.pages] + [s for s in several if s.limit < math.inf]
        if alone:
            width = max(pages_for(s.end) for s in alone)
            numbers = torch.cat([_rows(s, width, self.cache.slides) for s in alone]).to(device)
            block_tables, originals, lengths, rows = numbers.split([width, width, 1, 1], 1)
            entropy = [torch.empty(len(rows), heads, device=device) if heads else None for heads in self.cache.heads]
            bounds = None
            if self.bounded:
                limits = torch.tensor([s.limit for s in alone for _ in range(s.count)]).to(device)
                bounds = Bounds(originals, limits, torch.zeros(len(rows), 3, dtype=torch.long, device=device))
            slots, lengths = self.slots[rows[:, 0]], lengths[:, 0].contiguous()
            sequences = rows[:, 0].contiguous()
            decode = DecodeLayout(
                self.cache, slots, block_tables, lengths, entropy, bounds, observe=self.observe, rows=sequences
            )
            self.single = sequences, decode

    @property
    def bounded(self) -> bool:
        """Whether any span is."""
        return any(s.limit < math.inf for s in self.spans)

    def counted(self) -> list[list[int]]:
        """After the step, for each span what `bounded_ops` counted for its tokens; zeros where nothing is bounded."""
        if self.single is None or self.single[1].bounds is None:
            return [[0, 0, 0] for _ in self.spans]
        rows, layout = self.single
        assert layout.bounds is not None
        counts = torch.zeros(len(self.slots), 3, dtype=torch.long, device=rows.device)
        counts[rows] = layout.bounds.counts
        return [counts[s.row : s.row + s.count].sum(0).tolist() for s in self.spans]


def _rows(span: Span, width: int, slides: bool) -> torch.Tensor:
    """For each token of a span its table and its table of originals, `width` entries each, its length and its row.

    int64 `[count, 2 * width + 2]`. Pages that a token sees quantised are, or will be before its attention.
    """
    pages, rest = span.pages[: pages_for(span.end)], [0] * (width - pages_for(span.end))
    if span.count == 1:
        pages = in_runs(pages, quantised_pages(span.start // PAGE_SIZE), slides)
    kept = [
        p.original if p.original is not None else NO_ORIGINAL if p.staging_page is None else p.staging_page
        for p in pages
    ]
    quantised, exact, originals = torch.tensor([block_ids_of(pages, len(pages)) + rest, block_ids_of(pages, 0) + rest,
                                             kept + rest])  # fmt: skip
    positions = torch.arange(span.start, span.end)
    page = torch.arange(width)
    first_exact = torch.tensor([quantised_pages(p) for p in (positions // PAGE_SIZE).tolist()])[:, None]
    block_tables = torch.where(page < first_exact, quantised, exact)
    originals = torch.where(page < first_exact, originals, NO_ORIGINAL)
    rows = torch.arange(span.row, span.row + span.count)
    return torch.cat([block_tables, originals, positions[:, None] + 1, rows[:, None]], 1)


@contextmanager
def step(layout: StepLayout | DecodeLayout | OpenLayout) -> Iterator[None]:
    """Makes `layout` the one that `paged_attention` and its cache use inside the block."""
    layout.cache.layout = layout
    try:
        yield
    finally:
        layout.cache.layout = None


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
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sequence of the step to its own pages.

    Args:
        query: `[1, heads, T, key_dim]`.
        key, value: `[1, kv_heads, T, dim]` of this step; `PagedCache.update` has written them to pages already.
        sliding_window: a query at position p sees keys at p - window + 1 .. p.
        softcap: scores s become `softcap * tanh(s / softcap)`.
        s_aux: `[heads]`, the sinks of `qbe.kernels.ops.paged_attention.paged_attention`.

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
    own = int(module.layer_idx)  # type: ignore[arg-type]
    layer = cache.sources.get(own, own)
    shape = cache.pool.shapes[layer]
    if shape is None:
        raise QBEError(f"layer {own} ({type(module).__name__}) reads another layer's keys: QBE cannot run this model")
    if (key.shape[1], key.shape[3], value.shape[3]) != shape.sizes:
        raise QBEError(f"{type(module).__name__} expands its keys after caching them: QBE cannot run this model")
    absorbed: latent.Absorbed | None = getattr(module, latent.ABSORBED, None)
    window = sliding_window if sliding_window is not None else cache.windows[layer]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    query = query if absorbed is None else absorbed.absorb(query)
    numbers = scaling, window, softcap, sinks
    if isinstance(layout, DecodeLayout):
        out = attend_decode(layout, layer, query, key, value, *numbers, watched=layer == own)[None]
    elif isinstance(layout, OpenLayout):
        out = step_attention(query, key, value, own, scaling, window or 0, softcap or 0.0, sinks)
    else:
        cache.heads[layer], cache.calls[layer] = query.shape[1], numbers
        out = attend_step(layout, layer, query, key, value, *numbers, watched=layer == own)
    return out if absorbed is None else absorbed.expand(out), None


def attend_step(
    layout: StepLayout,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    watched: bool = True,
) -> torch.Tensor:
    """Attention of a step with prompts, `[1, T, heads, value_dim]`; its keys and values are in their pages already.

    watched: whether its entropy is noted and the layout's observer called; not for a layer that reads another's pages.
    """
    cache, parts = layout.cache, []
    for prompt in layout.prompts:
        q, k, v = (t.narrow(2, prompt.row, prompt.count) for t in (query, key, value))
        parts.append(attend_prompt(cache.pool, layer, prompt, q, k, v, scaling, window, softcap, sinks))
    if layout.single is None and len(parts) == 1:
        return parts[0]
    dim = (key if query.shape[3] > key.shape[3] else value).shape[3]  # of latents, where they are attended to
    out = query.new_empty(1, query.shape[2], query.shape[1], dim)
    for prompt, part in zip(layout.prompts, parts, strict=True):
        out[:, prompt.row : prompt.row + prompt.count] = part
    if layout.single is not None:
        rows, decode = layout.single
        q, k, v = (t.index_select(2, rows) for t in (query, key, value))
        out[0, rows] = attend_decode(decode, layer, q, k, v, scaling, window, softcap, sinks, watched)
    return out


def attend_decode(
    layout: DecodeLayout,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    watched: bool = True,
) -> torch.Tensor:
    """Attention of a decode step, `[B, heads, value_dim]`; it writes the new keys and values, too.

    watched: as of `attend_step`.
    """
    pool = layout.cache.pool
    head_offsets = pool.head_offsets[layer]
    assert head_offsets is not None
    entropy = layout.entropy[layer] if layout.entropy and watched else None
    if entropy is None:  # nobody's, or the first step of all
        entropy = torch.empty(query.shape[2], query.shape[1], dtype=torch.float32, device=query.device)
    new = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    where = pool.memory, head_offsets, layout.slots, layout.block_tables, layout.lengths, entropy
    numbers = scaling, window or 0, softcap or 0.0
    if layout.several and key.is_cuda:  # all rows run at once there; a CPU writes before any row attends
        write_rows(*new[1:], pool.memory, head_offsets, layout.slots)
    bounds, shares, shape = layout.bounds, layout.shares, pool.shapes[layer]
    cuts = None if shares is None or shares.windows[layer] != (window or 0) else shares.cuts[layer]
    if shape is not None and shape.latent:
        out = latent.attend_decode(pool, layer, new, *where[2:], *numbers, sinks)
    elif bounds is None and layout.batch_invariant:
        out = attention_ops.batch_invariant_attention(*new, *where, *numbers, sinks=sinks)
    elif bounds is None and cuts is not None:
        out = attention_ops.shared_attention(*new, *where, *numbers, cuts=cuts, sinks=sinks)
    elif bounds is None:
        out = attention_ops.paged_attention(*new, *where, *numbers, sinks)
    else:
        noted = bounds.originals, bounds.limits, bounds.counts
        out = bounded_ops.bounded_attention(*new, *where, *noted, *numbers, sinks)
    if layout.observe is not None and watched:
        out = layout.observe(layer, out, entropy, layout.lengths, layout.rows)
    return out


AttentionInterface.register(ATTENTION, paged_attention)
