"""The cache object that transformers' model code talks to: pages for attention, states for recurrent layers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from qbe.errors import QBEError
from qbe.kernels.ops.kv_pages import write_rows
from qbe.kvcache.allocator import Page
from qbe.kvcache.attention import CACHE, DecodeLayout, OpenLayout, StepLayout
from qbe.kvcache.pages import PAGE_SIZE, PagePool
from qbe.sites import KVSite
from qbe.tagger.shared_layers import shared_layers


def decoder_config(model: nn.Module) -> PretrainedConfig:
    """The configuration of the language model inside `model` (a vision-language model has several)."""
    config: PretrainedConfig = model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    return config


def is_recurrent(config: PretrainedConfig) -> bool:
    """Whether any layer carries a state from token to token."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def cache_argument(model: nn.Module) -> str:
    """The name under which the model's forward takes its cache."""
    names = inspect.signature(model.forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache_params"


def _longest(layout: StepLayout | DecodeLayout | OpenLayout | None) -> int:
    """Tokens in the cache before this step; a decode step of fixed shapes must not depend on them and says 0."""
    return max((span.start for span in layout.spans), default=0) if isinstance(layout, StepLayout) else 0


class _PagedLayer(CacheLayerMixin):
    """Stands for a layer whose keys and values are in pages. transformers asks it for lengths only."""

    is_sliding = False

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self.is_initialized = True
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("PagedCache.update writes the pages")

    def get_seq_length(self) -> int:
        """Tokens in the cache before this step; of the longest sequence when several are packed."""
        return _longest(self._cache.layout)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) as the mask builders of transformers count them."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self) -> int:
        """-1: the scheduler bounds lengths, not the layer."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in transformers before 5.20."""
        return -1


class PagedCache(Cache):
    """transformers' cache over a `PagePool`.

    Attributes:
        pool: the pages.
        windows: per layer its sliding window in tokens, or None.
        heads: per layer its query heads, once a step has run.
        calls: per layer scaling, window, soft cap and sinks of its attention, once a step has run.
        sources: of each layer that keeps nothing of its own the one whose pages it reads (Gemma 3n), once attached.
        layout: what the rows of the step that runs now are (`qbe.kvcache.attention.step`), or None.
    """

    layout: StepLayout | DecodeLayout | OpenLayout | None

    def __init__(self, config: PretrainedConfig, pool: PagePool) -> None:
        self.pool, self.layout, self.sources = pool, None, dict[int, int]()
        # DynamicCache leaves out layers at the end that keep nothing of their own.
        layers: dict[int, Any] = dict(enumerate(DynamicCache(config=config).layers))
        self.windows: list[int | None] = [
            layers[i].sliding_window if getattr(layers.get(i), "is_sliding", False) else None
            for i in range(len(pool.shapes))
        ]
        self.heads = [0] * len(pool.shapes)
        self.calls: list[tuple[float, int | None, float | None, torch.Tensor | None] | None] = [None] * len(pool.shapes)
        # Recurrent layers are transformers' own; whose states they hold changes as a step runs
        # (`qbe.engine.execution.mixers`).
        recurrent = {i: layer for i, layer in layers.items() if isinstance(layer, LinearAttentionCacheLayerMixin)}
        super().__init__(layers=[recurrent.get(i) or _PagedLayer(self) for i in range(len(pool.shapes))])

    @property
    def slides(self) -> bool:
        """Whether any layer has a sliding window, by the configuration or by what its attention was called with."""
        return any(w is not None for w in self.windows) or any(c is not None and c[1] is not None for c in self.calls)

    def sites(self) -> tuple[KVSite, ...]:
        """Every key head, by layer; once a step has run."""
        return tuple(
            KVSite(layer, head, heads // shape.kv_heads, shape.key_dim + shape.value_dim)
            for layer, (shape, heads) in enumerate(zip(self.pool.shapes, self.heads, strict=True))
            if shape is not None
            for head in range(shape.kv_heads)
        )

    def attach(self, model: nn.Module) -> None:
        """Let the attention of `model` find this cache."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, CACHE, self)
        self.sources = shared_layers(model)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's keys and values `[1, kv_heads, T, dim]` to their pages and hand them back.

        Pages that a prompt fills are quantised here: its own later tokens see them as any other sequence would.
        """
        layout = self.layout
        if layout is None or self.pool.head_offsets[layer_idx] is None:
            raise QBEError(f"layer {layer_idx} has no pages: it is not an attention layer of this engine's model")
        if isinstance(layout, StepLayout):  # the attention of a decode step, or of a compiled one, writes them
            self.write(layout, layer_idx, key_states, value_states)
        return key_states, value_states

    def write(self, layout: StepLayout, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """`update` of a step with this layout."""
        head_offsets = self.pool.head_offsets[layer]
        assert head_offsets is not None
        write_rows(key[0].transpose(0, 1), value[0].transpose(0, 1), self.pool.memory, head_offsets, layout.slots)
        self.pool.quantise(layout.filled, layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache before this step; of the longest sequence when several are packed."""
        return _longest(self.layout)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, offset) as the mask builders of transformers count them."""
        return self.get_seq_length() + int(query_length), 0


def slot_of(pages: list[Page], position: int) -> int:
    """Where the token at `position` of a sequence with these pages is written: address of a staging_page | offset in
    it."""
    return pages[position // PAGE_SIZE].block_id | position % PAGE_SIZE
