"""Blueprints in memory, by fingerprint: a bounded number of them, those least recently asked for go first.

Entries lie in cells of equal budget, cluster and score step. Within a cell they are grouped by the contexts that they
are for, of which policies tell two or three. A group keeps its fingerprints in one array, so that the nearest one is
found by an XOR and a population count over all of them: no list of candidates, no tables of bands, nothing is missed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qbe.blueprint import Blueprint
from qbe.cache.fingerprint import Cell, Fingerprint

GROUP_ENTRIES = 512  # of a group; the oldest is overwritten. Bounds the time of a look-up: 512 XORs are a microsecond
# Of 64 that a near hit may differ in, an angle of about 56 degrees. Unrelated queries differ in 32 on average; one pair
# in 500 of them is as near, and has the budget and score of its cell besides.
NEAR_BITS = 20


class CachedBlueprint(NamedTuple):
    """A blueprint and what it was chosen for.

    Attributes:
        cell, digest, bits: see `qbe.cache.fingerprint.Fingerprint`.
        first, last: the contexts, in tokens, that its policy does not tell from the one it was chosen for.
        blueprint: what the policy chose.
    """

    cell: Cell
    digest: bytes
    bits: int
    first: int
    last: int
    blueprint: Blueprint


class _Group:
    """The entries of a cell for the contexts from `first` to `last`."""

    __slots__ = ("bits", "blueprints", "by_digest", "digests", "first", "last", "next")

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.bits: npt.NDArray[np.uint64] = np.empty(4, np.uint64)
        self.blueprints: list[Blueprint] = []
        self.digests: list[bytes] = []
        self.by_digest: dict[bytes, int] = {}
        self.next = 0  # where the oldest is, once the group is full

    def add(self, entry: CachedBlueprint) -> int:
        """Returns by how many entries the group has grown: 0 or 1."""
        known = self.by_digest.get(entry.digest)
        if known is not None:
            self.blueprints[known] = entry.blueprint
            return 0
        n = len(self.blueprints)
        if n == GROUP_ENTRIES:
            slot, self.next = self.next, (self.next + 1) % GROUP_ENTRIES
            del self.by_digest[self.digests[slot]]
            self.blueprints[slot], self.digests[slot] = entry.blueprint, entry.digest
        else:
            slot = n
            if n == len(self.bits):
                self.bits = np.concatenate([self.bits, np.empty(n, np.uint64)])
            self.blueprints.append(entry.blueprint)
            self.digests.append(entry.digest)
        self.bits[slot] = entry.bits
        self.by_digest[entry.digest] = slot
        return int(n < GROUP_ENTRIES)

    def find(self, query: Fingerprint, near: bool) -> tuple[Blueprint, str] | None:
        """The blueprint of the same features (`exact`), or of the nearest ones within `NEAR_BITS` (`near`)."""
        slot = self.by_digest.get(query.digest)
        if slot is not None:
            return self.blueprints[slot], "exact"
        if not near:
            return None
        apart = np.bitwise_count(self.bits[: len(self.blueprints)] ^ np.uint64(query.bits))
        slot = int(apart.argmin())
        return (self.blueprints[slot], "near") if apart[slot] <= NEAR_BITS else None


class Memory:
    """Entries for one version of a model, store and policy. Not for several threads at once.

    Args:
        capacity: entries at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries = 0
        self._cells: OrderedDict[Cell, list[_Group]] = OrderedDict()

    def __contains__(self, cell: Cell) -> bool:
        """Whether entries of this cell were added (`open` counts) and have not been dropped since."""
        return cell in self._cells

    def get(self, query: Fingerprint, context: int, near: bool = True) -> tuple[Blueprint, str] | None:
        """The blueprint for a query, and `exact` or (unless `near` is false) `near`; None when there is none."""
        groups = self._cells.get(query.cell)
        if groups is None:
            return None
        self._cells.move_to_end(query.cell)
        for group in groups:
            if group.first <= context <= group.last:
                return group.find(query, near)
        return None

    def open(self, cell: Cell, entries: Iterable[CachedBlueprint] = ()) -> None:
        """Adds entries of one cell, which is then in memory even if there are none."""
        groups = self._cells.setdefault(cell, [])
        self._cells.move_to_end(cell)
        for entry in entries:
            group = next((g for g in groups if (g.first, g.last) == (entry.first, entry.last)), None)
            if group is None:
                group = _Group(entry.first, entry.last)
                groups.append(group)
            self.entries += group.add(entry)
        while self.entries > self.capacity and len(self._cells) > 1:
            _, dropped = self._cells.popitem(last=False)
            self.entries -= sum(len(g.blueprints) for g in dropped)
