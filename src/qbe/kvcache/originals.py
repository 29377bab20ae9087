"""16-bit originals of quantised pages, in host memory: what bounded attention reads again
(`qbe.kernels.ops.bounded_attention`).

An original is a copy of a page's staging_page, made when the page is quantised and kept as long as the page is. Memory
is taken in slabs as it is needed, pinned where the device is a GPU, whose kernels then read it in place.
"""

from __future__ import annotations

import warnings

import torch

from qbe.format.kv_blocks import ALIGN
from qbe.hardware import free_memory
from qbe.kvcache.pages import PagePool

SLAB_BYTES = 1 << 26
MOST_OF_FREE = 0.5  # of the host memory that is free when a slab is taken


class Originals:
    """The originals of a pool's pages.

    Attributes:
        refused: whether the host had no memory for one. It stays so: bounded mode is off from then on.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool, self.refused = pool, False
        self._staging_pages = pool.memory.view(-1, pool.page_bytes) if pool.page_bytes else pool.memory[:0]
        self._at: dict[int, torch.Tensor] = {}  # entry -> its bytes, uint8 [page_bytes]
        self._free: list[int] = []

    def keep(self, staging_page: int) -> int | None:
        """Copies a staging page, without waiting for the device; the entry of the copy, or None where there is no
        memory.

        Args:
            staging_page: its address in the pool's memory; whatever is written there later comes after the copy.
        """
        if not self._free and not self._grow():
            return None
        block_id = self._free.pop()
        self._at[block_id].copy_(self._staging_pages[staging_page // self.pool.page_bytes], non_blocking=True)
        return block_id

    def drop(self, block_id: int) -> None:
        """The page of this original is gone."""
        self._free.append(block_id)

    def refuse(self) -> None:
        """Bounded mode is off from now on; one warning says so, and each request is told."""
        if not self.refused:
            self.refused = True
            warnings.warn(
                f"the host has no memory left for 16-bit originals of KV pages ({len(self._at)} are kept): no kv_error "
                "can be kept from now on",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip

    def _grow(self) -> bool:
        """Whether there is one slab more."""
        pages = max(1, (SLAB_BYTES - ALIGN) // self.pool.page_bytes)
        size = pages * self.pool.page_bytes + ALIGN
        if self.refused or size > MOST_OF_FREE * free_memory(torch.device("cpu")):
            return False
        try:
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=self.pool.device.type == "cuda")
        except (RuntimeError, MemoryError):  # what torch raises for memory it cannot have or cannot pin
            return False
        # Addresses count from the pool's memory, in multiples of ALIGN.
        base = slab.data_ptr() - self.pool.memory.data_ptr()
        begin = -base % ALIGN
        for i in reversed(range(pages)):
            offset = begin + i * self.pool.page_bytes
            self._at[base + offset] = slab[offset : offset + self.pool.page_bytes]
            self._free.append(base + offset)
        return True
