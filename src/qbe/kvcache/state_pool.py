"""The memory of recurrent layers: a slot for each sequence, as pages are for attention.

A slot is one run of bytes. Each layer's states (Mamba's and the delta rule's recurrent state, the last inputs of a
short convolution) have their place in it, which `StateLayout` says. Recurrent states are kept in the dtype of the
model's own code, or at fewer bits (`qbe.format.state_rows`); the inputs of a convolution are the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from qbe.blueprint import StateBits
from qbe.format.state_rows import state_bytes
from qbe.kernels.reference.state_rows import dequantise_state, quantise_state
from qbe.kvcache.state_slots import StateSlot
from qbe.sites import STATE_FULL_BITS

_ALIGNED = 64  # bytes at a multiple of which each state begins


@dataclass(frozen=True)
class StateShape:
    """One state of one layer.

    Attributes:
        layer: its number.
        recurrent: whether it is a recurrent state; else the last inputs of a convolution.
        index: among those of its kind in the layer.
        size: numbers of one sequence, as the model's code has them.
        dtype: of a number.
    """

    layer: int
    recurrent: bool
    index: int
    size: tuple[int, ...]
    dtype: torch.dtype

    def nbytes(self, bits: int = STATE_FULL_BITS) -> int:
        """Bytes of one sequence at this precision."""
        return state_bytes(prod(self.size[:-1]), self.size[-1], bits, self.dtype.itemsize)


class StateLayout:
    """Where the states lie in a slot.

    Args:
        bits: of the recurrent states, by layer; None: all at full precision.

    Attributes:
        bits: of each state.
        offsets: bytes from the slot's beginning to each state.
        nbytes: of a slot.
    """

    def __init__(self, shapes: Sequence[StateShape], bits: StateBits = None) -> None:
        self.bits = [STATE_FULL_BITS if bits is None or not shape.recurrent else bits[shape.layer] for shape in shapes]
        self.offsets, at = [], 0
        for shape, of_shape in zip(shapes, self.bits, strict=True):
            self.offsets.append(at)
            at += -(-shape.nbytes(of_shape) // _ALIGNED) * _ALIGNED
        self.nbytes = at


class StatePool:
    """The slots' memory, allocated once.

    Args:
        slots: how many at full precision there is room for, beside one that is nobody's, for trials.

    Attributes:
        shapes: of the states of a sequence.
        memory: uint8 `[bytes]`.
        nbytes: of it for sequences; behind them is
        trial: the slot that is nobody's.
    """

    def __init__(self, shapes: Sequence[StateShape], slots: int, device: torch.device) -> None:
        self.shapes = list(shapes)
        self.layout = functools.cache(lambda bits: StateLayout(self.shapes, bits))
        size = self.slot_bytes(None)
        self.nbytes = slots * size
        self.trial = StateSlot(self.nbytes, size)
        self.memory = torch.zeros(self.nbytes + size, dtype=torch.uint8, device=device)

    def slot_bytes(self, bits: StateBits) -> int:
        """Bytes of a slot whose recurrent states have these bits, by layer."""
        return self.layout(bits).nbytes

    def of_layer(self, layer: int) -> list[int]:
        """The numbers of a layer's states among `shapes`."""
        return [i for i, shape in enumerate(self.shapes) if shape.layer == layer]

    def place(self, state: int, slot: StateSlot) -> int:
        """Where a state of a slot begins in `memory`."""
        return slot.at + self.layout(slot.bits).offsets[state]

    def read(self, state: int, slots: Sequence[StateSlot]) -> torch.Tensor:
        """A state of these slots, `[slots, *size]`: the memory itself where they are at full precision and lie at even
        distances; what was made of it has to be `write`n."""
        shape, places = self.shapes[state], [self.place(state, slot) for slot in slots]
        steps = {b - a for a, b in pairwise(places)}
        if len(steps) <= 1 and all(self._bits(state, slot) == STATE_FULL_BITS for slot in slots):
            numbers, width = self.memory.view(shape.dtype), shape.dtype.itemsize
            one = numbers[places[0] // width :][: prod(shape.size)].view(shape.size)
            step = next(iter(steps), 0) // width
            return one.as_strided((len(slots), *shape.size), (step, *one.stride()), places[0] // width)
        return torch.stack([self._one(state, slot) for slot in slots])

    def write(self, state: int, slots: Sequence[StateSlot], numbers: torch.Tensor, positions: Sequence[int]) -> None:
        """Keep `numbers` `[slots, *size]` as this state of these slots, after the tokens at `positions`."""
        for slot, of_slot, position in zip(slots, numbers, positions, strict=True):
            if (bits := self._bits(state, slot)) != STATE_FULL_BITS:
                stored = quantise_state(of_slot, bits, position)
                at = self.place(state, slot)
                self.memory[at : at + len(stored)] = stored
            elif of_slot.data_ptr() != (kept := self._one(state, slot)).data_ptr():
                kept.copy_(of_slot)

    def _bits(self, state: int, slot: StateSlot) -> int:
        return self.layout(slot.bits).bits[state]

    def _one(self, state: int, slot: StateSlot) -> torch.Tensor:
        shape, bits, at = self.shapes[state], self._bits(state, slot), self.place(state, slot)
        stored = self.memory[at : at + shape.nbytes(bits)]
        if bits == STATE_FULL_BITS:
            return stored.view(shape.dtype).view(shape.size)
        return dequantise_state(stored, shape.size, bits).to(shape.dtype)
