"""What was used least recently goes first, within a bound in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLRU(Generic[K, V]):
    """A cache bounded in bytes. Threads may share it.

    Args:
        most: bytes; what has more by itself is not kept.

    Attributes:
        nbytes: of all that is kept.
        hits, misses: of `get`.
    """

    def __init__(self, most: int) -> None:
        self.most, self.nbytes, self.hits, self.misses = most, 0, 0, 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """What is kept under this key; it counts as used."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Keep it, and let go of what no longer fits beside it."""
        with self._lock:
            self._drop(key)
            if nbytes > self.most:
                return
            self._kept[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self.most:
                self._drop(next(iter(self._kept)))

    def drop(self, key: K) -> None:
        """Let go of it."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: K) -> None:
        found = self._kept.pop(key, None)
        self.nbytes -= 0 if found is None else found[1]
