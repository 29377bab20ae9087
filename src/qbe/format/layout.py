"""How the bits of a code are cut into slices, and where each slice lies in memory.

A weight's code has `total_bits` bits, most significant first. A slice is a run of those bits; the precisions of the
store are the running sums of the slices (`qbe.format.gears`).

In memory every slice is one or more parts of 4, 2 or 1 bits (3 = 2 + 1), so that kernels meet three cases only.
The codes of 64 consecutive inputs of one output form a block. A part of width w stores a block in 8w bytes: field j
of byte u (bits [j*w, j*w+w) of it) belongs to input 8w*j + u. One shift and one mask therefore yield 8w consecutive
inputs, and a broadcast with a shift per lane yields the whole block in order in one 512-bit register.

All parts of a matrix lie one after the other in one buffer, most significant first: a read at b bits touches the
first b/8 of it and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from qbe.errors import QBEError
from qbe.format.gears import DEFAULT_SLICES, check_slices, gears

BLOCK = 64  # inputs per block; group sizes are multiples of it
MAX_GROUP = 1024


class BitPlanes(NamedTuple):
    """A physical run of `width` bits that starts `first` bits below the most significant one."""

    first: int
    width: int


@dataclass(frozen=True)
class SliceLayout:
    """The slices of a store, most significant first.

    Raises:
        QBEError: no slice, a slice below 1 bit, or more than 8 bits in all.
    """

    slices: tuple[int, ...] = DEFAULT_SLICES

    def __post_init__(self) -> None:
        check_slices(self.slices)

    @classmethod
    def of(cls, slices: Sequence[int]) -> SliceLayout:
        """The layout with these widths. Raises QBEError for what is no sequence of whole numbers, or no layout."""
        try:
            widths = tuple(map(operator.index, slices))
        except TypeError:
            raise QBEError(f"slices {slices!r} are not a tuple of whole numbers; give (4, 2, 2) for example") from None
        return cls(widths)

    @cached_property
    def total_bits(self) -> int:
        return sum(self.slices)

    @cached_property
    def precisions(self) -> tuple[int, ...]:
        """The widths that can be read, ascending."""
        return gears(self.slices)

    @cached_property
    def parts(self) -> tuple[BitPlanes, ...]:
        """The physical parts in memory order; those of a precision b are the ones with first < b."""
        out, first = [], 0
        for s in self.slices:
            while s:
                width = 4 if s >= 4 else 2 if s >= 2 else 1
                out.append(BitPlanes(first, width))
                first += width
                s -= width
        return tuple(out)

    @cached_property
    def needed_parts(self) -> tuple[tuple[int, int, int], ...]:
        """First bit and width of every part, and the index of the lowest precision that needs it."""
        return tuple((f, w, next(i for i, p in enumerate(self.precisions) if p > f)) for f, w in self.parts)

    def index(self, bits: int) -> int:
        """Position of the precision that serves a request for `bits`: the highest one not above it, else the lowest."""
        fits = [i for i, p in enumerate(self.precisions) if p <= bits]
        return fits[-1] if fits else 0


def padded(in_features: int, group_size: int) -> int:
    """Inputs after padding to whole groups (and so to whole blocks)."""
    return -(-in_features // group_size) * group_size


def check_group_size(group_size: int) -> None:
    """Raises QBEError unless `group_size` is a multiple of 64 from 64 to 1024."""
    if not isinstance(group_size, int) or not BLOCK <= group_size <= MAX_GROUP or group_size % BLOCK:
        raise QBEError(f"group size {group_size!r} is not supported: give a multiple of {BLOCK} up to {MAX_GROUP}")
