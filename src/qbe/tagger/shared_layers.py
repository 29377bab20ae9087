"""Layers that attend to the keys and values of another layer (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from torch import nn


def shared_layers(model: nn.Module) -> dict[int, int]:
    """Number of each layer that keeps no keys of its own, and of the layer whose keys it reads: the last one of its
    kind that does."""
    attention = [m for m in model.modules() if hasattr(m, "is_kv_shared_layer")]
    kept = {m.layer_type: m.layer_idx for m in attention if m.store_full_length_kv}
    return {m.layer_idx: kept[m.layer_type] for m in attention if m.is_kv_shared_layer}  # type: ignore[misc]
