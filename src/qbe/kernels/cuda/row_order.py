"""Rows of several precisions, sorted so that each tile of rows has one: what a kernel reads that has one a tile."""

from __future__ import annotations

import torch


def places_for(rows: int, tile: int, precisions: int) -> int:
    """Places that any mix of precisions fits into: each begins a tile of its own."""
    kinds = min(rows, precisions)
    return ((rows - kinds) // tile + kinds) * tile


def row_order(
    precision_words: torch.Tensor, tile: int, precisions: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row goes. Nothing waits for the device, so that a CUDA graph serves every mix.

    Args:
        precision_words: int32 [R]; what a weight lacks is served by the highest below it, or by the lowest.
        tile: rows of a tile.
        precisions: ascending.

    Returns:
        int32 [places]: the row at each place, -1 where there is none; and int64 [R]: the place of each row.
    """
    bits = precision_words & 255
    kind = torch.zeros_like(bits)
    for p in precisions[1:]:
        kind += bits >= p
    is_kind = (kind[:, None] == torch.arange(len(precisions), device=precision_words.device)).int()
    before = is_kind.cumsum(0, dtype=torch.int32)  # of the same kind, this one counted
    tiles = (before[-1] + (tile - 1)) // tile
    first = (tiles.cumsum(0, dtype=torch.int32) - tiles) * tile
    place = ((first + before - 1) * is_kind).sum(1)
    order = torch.full(
        (places_for(len(precision_words), tile, len(precisions)),), -1, dtype=torch.int32, device=precision_words.device
    )
    order.scatter_(0, place, torch.arange(len(precision_words), dtype=torch.int32, device=precision_words.device))
    return order, place
