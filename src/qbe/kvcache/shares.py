"""Decode steps on a GPU: which block of the attention kernels reads which pages, found once for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.kernels.ops import paged_attention as attention_ops
from qbe.kvcache.pages import PagePool


class Shares:
    """What `qbe.kernels.ops.paged_attention.share_pages` finds, for every layer of a pool.

    Args:
        pool: its pages.
        windows: per layer its sliding window, or None.

    Attributes:
        windows: per layer as attention ops take it; 0: all keys are seen.
        cuts: per layer int32 `[processors + 1, 2]`; None for a layer without attention.
    """

    def __init__(self, pool: PagePool, windows: Sequence[int | None]) -> None:
        from qbe.kernels.triton.attention.paged import processors

        self.windows = [window or 0 for window in windows]
        self.cuts: list[torch.Tensor | None] = [None] * len(self.windows)
        self._processors = processors(pool.device)
        self._alike: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for layers, head_offsets in pool.alike():
            layer_windows = torch.tensor([self.windows[i] for i in layers], dtype=torch.int32, device=pool.device)
            cuts = torch.zeros(len(layers), self._processors + 1, 2, dtype=torch.int32, device=pool.device)
            self._alike.append((head_offsets, layer_windows, cuts))
            for i, layer in enumerate(layers):
                self.cuts[layer] = cuts[i]

    def pay(self, rows: int, pages: int) -> bool:
        """Whether attention over tables int64 `[rows, pages]` takes any of it from here."""
        return any(self._shared(head_offsets, rows, pages) for head_offsets, _, _ in self._alike)

    def find(self, block_tables: torch.Tensor, lengths: torch.Tensor) -> None:
        """For these tables int64 `[rows, pages]` and lengths int64 `[rows]`, into `cuts`, as they are on the device."""
        for head_offsets, windows, cuts in self._alike:
            if self._shared(head_offsets, *block_tables.shape):
                attention_ops.share_pages(head_offsets, windows, block_tables, lengths, cuts)

    def _shared(self, head_offsets: torch.Tensor, rows: int, pages: int) -> bool:
        from qbe.kernels.cuda.decode_attention import shares

        return shares(head_offsets.device, rows, head_offsets.shape[2], pages, self._processors)
