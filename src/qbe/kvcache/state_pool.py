"""The memory of recurrent layers: a slot for each sequence, as pages are for attention.

A slot is one run of bytes. Each layer's states (Mamba's and the delta rule's recurrent state, the last inputs of a
short convolution) have their place in it, which `StateLayout` says. All states have the dtype now that the model's own
code keeps them in; a slot whose layers have fewer bits would be another layout of the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

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

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence."""
        return prod(self.size) * self.dtype.itemsize


class StateLayout:
    """Where the states lie in a slot.

    Attributes:
        offsets: bytes from the slot's beginning to each state.
        nbytes: of a slot.
    """

    def __init__(self, shapes: Sequence[StateShape]) -> None:
        self.offsets, at = [], 0
        for shape in shapes:
            self.offsets.append(at)
            at += -(-shape.nbytes // _ALIGNED) * _ALIGNED
        self.nbytes = at


class StatePool:
    """The slots' memory, allocated once.

    Attributes:
        shapes: of the states of a sequence.
        memory: uint8 `[slots + 1, bytes of a slot]`; the last one is nobody's, for trials.
        states: a view of it for each shape, `[slots + 1, *size]`.
    """

    def __init__(self, shapes: Sequence[StateShape], slots: int, device: torch.device) -> None:
        self.shapes, self.slots = list(shapes), slots
        layout = StateLayout(shapes)
        self.memory = torch.zeros(slots + 1, layout.nbytes, dtype=torch.uint8, device=device)
        self.states = [
            self.memory[:, at : at + shape.nbytes].view(shape.dtype).unflatten(1, shape.size)
            for shape, at in zip(shapes, layout.offsets, strict=True)
        ]

    def of_layer(self, layer: int) -> list[tuple[StateShape, torch.Tensor]]:
        """The states of a layer and their views."""
        return [(s, t) for s, t in zip(self.shapes, self.states, strict=True) if s.layer == layer]
