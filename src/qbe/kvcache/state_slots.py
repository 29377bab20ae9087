"""Which sequence has which bytes of the state pool. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from qbe.blueprint import StateBits


@dataclass(frozen=True, order=True)
class StateSlot:
    """What holds the recurrent and convolution states of one sequence at every layer (`qbe.kvcache.state_pool`).

    Attributes:
        at: its first byte in the pool's memory.
        nbytes: how many it has.
        bits: of its states, as `Blueprint.state_bits`.
    """

    at: int
    nbytes: int
    bits: StateBits = None


class StateSlots:
    """Gives out slots, whose sizes follow the bits of their states.

    The first gap that is wide enough is given, so that slots of the running sequences lie beside each other and a step
    reads and writes them where they are.

    Args:
        nbytes: of the pool.
        slot_bytes: of a slot for states of these bits.
    """

    def __init__(self, nbytes: int, slot_bytes: Callable[[StateBits], int]) -> None:
        self.nbytes, self.slot_bytes = nbytes, slot_bytes
        self._taken: list[StateSlot] = []  # in the order of their places

    @property
    def free(self) -> int:
        """Slots of states at full precision that there is room for."""
        size = self.slot_bytes(None)
        return sum((end - begin) // size for begin, end in self._gaps())

    def _gaps(self) -> list[tuple[int, int]]:
        ends = [0, *(slot.at + slot.nbytes for slot in self._taken)]
        return list(zip(ends, [*(slot.at for slot in self._taken), self.nbytes], strict=True))

    def fits(self, bits: StateBits) -> bool:
        """Whether there is room for a slot of such states."""
        return any(end - begin >= self.slot_bytes(bits) for begin, end in self._gaps())

    def take(self, bits: StateBits = None) -> StateSlot:
        """A slot for states of these bits. Raises IndexError where there is no room for it."""
        size = self.slot_bytes(bits)
        for begin, end in self._gaps():
            if end - begin >= size:
                slot = StateSlot(begin, size, bits)
                insort(self._taken, slot, key=lambda s: s.at)
                return slot
        raise IndexError(f"no {size} bytes of the state pool lie free beside each other")

    def give(self, slot: StateSlot) -> None:
        """Take a slot back; what it holds is nobody's."""
        self._taken.remove(slot)
