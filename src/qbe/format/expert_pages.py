"""How the codes of an expert's matrix are cut into pages, so that its slices may lie anywhere in memory.

A part (`qbe.format.layout`) is row after row of one width. A page holds whole rows of one part, as many as fit, and
every page of a model has the same size: any free page takes any piece of any slice, and memory is never fragmented.
The pages of a matrix are numbered part after part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from qbe.format.layout import SliceLayout

LEAST = 1 << 16  # bytes; smaller pages would be thousands for each expert


class PartPages(NamedTuple):
    """The pages of one part.

    Attributes:
        first: number of its first page within the matrix.
        pages: how many there are.
        rows: of the matrix in each; the last page may have fewer.
        row_bytes: of one row of this part.
        start: of its first byte in the canonical buffer of the matrix.
        slice: number of the slice that it belongs to.
    """

    first: int
    pages: int
    rows: int
    row_bytes: int
    start: int
    slice: int

    def aligned(self, size: int) -> bool:
        """Whether all of its pages begin at multiples of `size` bytes in a buffer that does."""
        return self.start % size == 0 and self.rows * self.row_bytes % size == 0


def part_pages(layout: SliceLayout, outputs: int, plane: int, page_bytes: int) -> tuple[PartPages, ...]:
    """The pages of every part of a matrix.

    Args:
        outputs: rows of the matrix.
        plane: bytes of one bit of all of its codes.
        page_bytes: at least those of a row of the widest part.
    """
    found, at = [], 0
    for first, width, needed_by in layout.needed_parts:
        row_bytes = plane * width // outputs
        rows = page_bytes // row_bytes
        count = -(-outputs // rows)
        found.append(PartPages(at, count, rows, row_bytes, first * plane, needed_by))
        at += count
    return tuple(found)


def page_bytes_of(layout: SliceLayout, matrices: Iterable[tuple[int, int]]) -> int:
    """Bytes of a page that suits all matrices of these outputs and planes: the greatest common divisor of their parts,
    which leaves no page half empty; or, where that is too small, the smallest part."""
    parts = [(plane * width, plane * width // outputs) for outputs, plane in matrices for _, width in layout.parts]
    common = math.gcd(*(size for size, _ in parts))
    smallest, longest = min(size for size, _ in parts), max(row for _, row in parts)
    if common >= min(LEAST, smallest) and all(common % row == 0 for _, row in parts):
        return common
    return max(smallest, longest)
