"""Pages of the KV cache: who owns which, and the tensors that hold them.

A page holds the keys and values of `PAGE_SIZE` consecutive tokens of one sequence, at every layer (paged attention,
Kwon et al. 2023, section 4.1). Its precision is data: `PagePool.kv_bits` is the plan's table of KV precisions.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from qbe.sites import FULL_BITS

PAGE_SIZE = 16


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // PAGE_SIZE)


class PageAllocator:
    """Free list and reference counts of `num_pages` pages; pure Python.

    A page is owned from `allocate` until as many `release` calls as it has owners; `share` adds an owner.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # ascending
        self._owners = [0] * num_pages

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, or None when fewer are free.

        Consecutive pages are preferred: attention reads a run of pages as a view, without a copy.
        """
        if count > len(self._free):
            return None
        start = self._find_run(count)
        pages = self._free[start : start + count]
        del self._free[start : start + count]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of these pages.

        Raises:
            ValueError: a page that nobody owns.
        """
        for page in pages:
            if not self._owners[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take away one owner from each of these pages; a page without owners becomes free.

        Raises:
            ValueError: a page that is already free.
        """
        for page in pages:
            if not self._owners[page]:
                raise ValueError(f"page {page} is freed twice")
            self._owners[page] -= 1
            if not self._owners[page]:
                insort(self._free, page)

    def _find_run(self, count: int) -> int:
        """Index in the free list of the first `count` consecutive pages, or 0 when there is no such run."""
        start = 0
        for i, page in enumerate(self._free):
            if i and page != self._free[i - 1] + 1:
                start = i
            if i - start + 1 == count:
                return start
        return 0


@dataclass(frozen=True)
class KVShape:
    """What one layer stores for a token: `kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers stored for a token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


class PagePool:
    """The pages' memory, allocated once.

    Attributes:
        keys: per layer a tensor `[num_pages + 1, PAGE_SIZE, kv_heads, key_dim]` of the model's dtype; None for a layer
            without attention.
        values: per layer `[num_pages + 1, PAGE_SIZE, kv_heads, value_dim]`.
        kv_bits: int8 `[layers, kv_heads, num_pages]`, the precision of each page and head (16 everywhere for now).
            This is the plan's `kv_bits` (DESIGN section 1); layers with fewer heads use the first rows.
        spare: number of one page more, which no sequence owns: rows that pad a batch write there.
    """

    def __init__(
        self, shapes: Sequence[KVShape | None], num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def memory(shape: KVShape | None, dim: int) -> torch.Tensor | None:
            if shape is None:
                return None
            return torch.zeros(num_pages + 1, PAGE_SIZE, shape.kv_heads, dim, dtype=dtype, device=device)

        self.num_pages, self.spare = num_pages, num_pages
        self.keys = [memory(s, s.key_dim if s else 0) for s in shapes]
        self.values = [memory(s, s.value_dim if s else 0) for s in shapes]
        heads = max((s.kv_heads for s in shapes if s), default=0)
        self.kv_bits = torch.full((len(shapes), heads, num_pages), FULL_BITS, dtype=torch.int8, device=device)

    def clear(self, pages: Sequence[int]) -> None:
        """Fill these pages with zeros.

        Attention may read the unused rest of a page and give it weight 0, but 0 times NaN is NaN: pages must never be
        handed on with anything but finite numbers in them.
        """
        index = torch.tensor(pages, dtype=torch.long, device=self.kv_bits.device)
        for memory in (*self.keys, *self.values):
            if memory is not None:
                memory.index_fill_(0, index, 0)
