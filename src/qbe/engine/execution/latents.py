"""Attention modules whose cache holds latents leave them unexpanded while the engine's steps run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from qbe.kvcache.cache import PagedCache
from qbe.kvcache.latent import ABSORBED
from qbe.store.latent import AbsorbedWeight, latent_modules

_Pair = tuple[torch.Tensor, torch.Tensor]


def keep_latents(model: nn.Module, cache: PagedCache) -> None:
    """Let attention meet the latents as they lie in pages. Outside of steps the model expands them as before.

    Raises:
        QBEError: a module that expands them in a way of its own.
    """
    for module in latent_modules(model):
        setattr(module, ABSORBED, AbsorbedWeight(module))
        expand = functools.partial(type(module).expand_kv, module)  # type: ignore[attr-defined]
        module.expand_kv = functools.partial(_unexpanded, cache, expand)  # type: ignore[assignment]


def _unexpanded(cache: PagedCache, expand: Callable[..., _Pair], latent: torch.Tensor, rotary: torch.Tensor) -> _Pair:
    return expand(latent, rotary) if cache.layout is None else (latent, rotary)
