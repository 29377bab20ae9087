"""Memory for the nested codes of a model, of which only what is resident takes any.

A matrix keeps its address and its shape, so that kernels, plans and compiled steps know nothing of residency: it is
reserved as address space, a slice that is fetched fills its part, and one that is dropped gives its pages back to the
system. What was dropped must not be read; the plan sees to that (`qbe.store.read_limits`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from qbe.errors import QBEError


class Arena:
    """The codes of one matrix, or of the same matrix of every expert of a layer, in main memory.

    Args:
        shape: of the tensor of codes.

    Attributes:
        codes: uint8 of this shape.

    Raises:
        QBEError: the system has no room for it in its address space.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        size = int(np.prod(shape))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._map = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise QBEError(
                f"{size / 1e6:.1f} MB of address space for the model's weights were refused ({error.strerror}): raise "
                "the limit (ulimit -v), or leave device_memory out"
            ) from error
        self._bytes = memoryview(self._map)
        self.codes = torch.frombuffer(self._map, dtype=torch.uint8).view(tuple(shape))

    def part(self, start: int, size: int) -> memoryview:
        """These bytes, to be filled."""
        return self._bytes[start : start + size]

    def drop(self, start: int, size: int) -> None:
        """Gives the memory of these bytes back, in whole pages: the first and the last may belong to a neighbour."""
        first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
