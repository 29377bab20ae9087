"""Which sequence has which slot of the state pool. No torch."""

from __future__ import annotations

import heapq


class StateSlots:
    """A slot holds the recurrent and convolution states of one sequence at every layer (`qbe.kvcache.state_pool`).

    The lowest free one is given first, so that those of the running sequences lie beside each other and a step reads
    and writes them where they are.

    Attributes:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))  # a heap

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot. Raises IndexError where none is."""
        return heapq.heappop(self._free)

    def give(self, slot: int) -> None:
        """Take a slot back; what it holds is nobody's."""
        heapq.heappush(self._free, slot)
