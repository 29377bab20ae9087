"""The gears of a nested store: which bits of a weight's code can be read without the rest.

A slice is a run of the code's bits, most significant first; the gears are the running sums of the slices. Slices
(4, 2, 2) give 4, 6 and 8 bits; (4, 1, 1, 2) add a gear of 5; (3, 1, 1, 1, 2) gives 3, 4, 5, 6, 8. `qbe quantize
--slices` takes them; kernels read any of them, since a slice is stored as parts of 4, 2 or 1 bits
(`qbe.format.layout`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qbe.errors import QBEError

DEFAULT_SLICES = (4, 2, 2)
MAX_BITS = 8


def gears(slices: Sequence[int]) -> tuple[int, ...]:
    """The bits that can be read, ascending."""
    return tuple(itertools.accumulate(slices))


def check_slices(slices: Sequence[int]) -> None:
    """Raises QBEError for no slice, a slice below 1 bit, or more than 8 bits in all."""
    if not slices or min(slices) < 1 or sum(slices) > MAX_BITS:
        raise QBEError(f"slices {tuple(slices)} are not a layout: give widths of at least 1 that add up to at most 8")
