"""What a model keeps for a token and for a sequence, found by running one token.

The model's own code decides it (grouped heads, latent attention, sizes that differ between layers, the dtype of a
state), so asking it is safer than reading configurations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from qbe.errors import QBEError
from qbe.kvcache.cache import cache_argument, decoder_config
from qbe.kvcache.pages import KVShape
from qbe.kvcache.state_pool import StateShape


@dataclass(frozen=True)
class Mixer:
    """A module that carries a state from token to token.

    Attributes:
        name: in the model.
        layer: the number of the layer whose states it has.
        width: of the hidden states `[B, T, width]` that it takes, and returns as many of, without another tensor that
            says what its tokens are. None: it does otherwise, so that sequences cannot share a forward of it.
    """

    name: str
    layer: int
    width: int | None


@dataclass(frozen=True)
class Kept:
    """What a model keeps.

    Attributes:
        kv: keys and values that each layer stores for a token.
        dtype: of their numbers.
        states: of each sequence, of all recurrent layers.
        mixers: the modules that these belong to.
    """

    kv: list[KVShape | None]
    dtype: torch.dtype
    states: list[StateShape] = field(default_factory=list)
    mixers: list[Mixer] = field(default_factory=list)

    @property
    def packs(self) -> bool:
        """Whether tokens of different sequences can share a forward, as far as recurrent layers go."""
        return all(mixer.width is not None for mixer in self.mixers)


class _WatchedCache(DynamicCache):
    """Notes in which module's forward a layer's states are updated."""

    def __init__(self, config: PretrainedConfig, running: list[str]) -> None:
        super().__init__(config=config)
        self._running = running
        self.owners: dict[int, str] = {}

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.owners[layer_idx] = self._running[-1]
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.owners[layer_idx] = self._running[-1]
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


@contextmanager
def _watching(model: nn.Module, running: list[str], widths: dict[str, int | None]) -> Iterator[None]:
    """Inside, `running` holds the names of the modules whose forward runs, the innermost last; `widths` gets the
    `Mixer.width` that each would have."""

    def begin(name: str) -> Any:
        return lambda *_: running.append(name)

    def end(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        alike = len(given) == 1 and isinstance(output, torch.Tensor) and output.shape == given[0].shape
        widths[running.pop()] = given[0].shape[2] if alike and given[0].dim() == 3 else None

    handles = [m.register_forward_pre_hook(begin(name)) for name, m in model.named_modules()]
    handles += [m.register_forward_hook(end, with_kwargs=True) for m in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def probe(model: nn.Module) -> Kept:
    """Runs a token through the model.

    Raises:
        QBEError: a kind of attention layer that QBE has not.
    """
    config = decoder_config(model)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise QBEError(f"{type(model).__name__} has chunked attention: QBE cannot run this model")
    running, widths = list[str](), dict[str, int | None]()
    cache = _WatchedCache(config, running)
    device = next(model.parameters()).device
    with torch.inference_mode(), _watching(model, running, widths):
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            **{cache_argument(model): cache},
            use_cache=True,
        )
    kv, dtype = _kv_shapes(model, cache)
    mixers = [Mixer(name, layer, widths[name]) for layer, name in sorted(cache.owners.items())]
    return Kept(kv, dtype, list(_state_shapes(cache)), mixers)


def _kv_shapes(model: nn.Module, cache: DynamicCache) -> tuple[list[KVShape | None], torch.dtype]:
    latents = {getattr(m, "layer_idx", None) for m in model.modules() if hasattr(m, "expand_kv")}
    shapes: list[KVShape | None] = []
    dtype = next(model.parameters()).dtype
    for number, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.numel() == 0:
            shapes.append(None)
        elif keys.shape[1] != values.shape[1] or hasattr(layer, "update_indexer"):
            raise QBEError(f"{type(model).__name__} has {type(layer).__name__}s: QBE cannot run this model")
        else:
            latent = number in latents and keys.shape[1] == 1
            shapes.append(KVShape(keys.shape[1], keys.shape[3], values.shape[3], latent))
            dtype = keys.dtype
    return shapes, dtype


def _state_shapes(cache: DynamicCache) -> Iterator[StateShape]:
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for recurrent, states in ((False, layer.conv_states), (True, layer.recurrent_states)):
            for index, state in states.items():
                if state is not None:
                    yield StateShape(number, recurrent, index, tuple(state.shape[1:]), state.dtype)
