"""Which slices should be on the device: those that are read most, by counts that age. Numbers only, no tensors.

A slice delivers as many bits of precision to each token that reads it as it takes memory, whatever its site's size. So
its worth per byte is how often it is read, and the best set that fits is the most-read one, in order.

Counts halve every `HALF_LIFE` tokens, so that yesterday's traffic is forgotten. What is resident gives way only to what
has been read clearly more often (`_clearly_more`): counts of two slices that are equally likely cross all the time, and
exchanging them would move bytes for nothing.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

HALF_LIFE = 4096  # tokens
PRIOR = 64  # tokens that what was known at the start counts for
RATIO, LEAST = 1.5, 8.0  # what takes another's place was read so many times as often, and so many reads more
FAR = 64.0  # a read without a higher slice takes no longer, one without the lowest waits for the host's memory
IN_FLIGHT = 64  # fetches that are asked for at once: the order of later ones is decided when these are done

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Slice(NamedTuple):
    """A slice of a site; number 0 is its lowest one."""

    site: int
    number: int


class Moves(NamedTuple):
    """What to do, in order: give up the memory of some slices, then fetch others into it, the likeliest first."""

    dropped: list[Slice]
    fetched: list[Slice]


class Planner:
    """Keeps the books of what is resident and decides what should be.

    Args:
        sizes: int64 [sites, slices], bytes of each slice.
        budget: bytes that all slices above the floors may take together, those in flight included.
        use: float64 [sites], how often a token is expected to read each site.
        floors: int64 [sites], how many slices of each site never leave the device; None: the lowest one.

    Attributes:
        levels: int64 [sites], how many slices of each site are resident, from the lowest on.
        held: bytes of the slices above the floors that are resident or in flight.
    """

    def __init__(self, sizes: Counts, budget: int, use: Numbers, floors: Counts | None = None) -> None:
        self.sizes, self.budget = sizes, budget
        sites, slices = sizes.shape
        self.floors = np.ones(sites, np.int64) if floors is None else floors
        self.levels = self.floors.copy()
        self.held = 0
        self._coming = np.zeros(sites, bool)
        self._slices = slices
        # Reads by the highest slice that they asked for; nobody knows yet which gears will be: each as often.
        self._reads = np.repeat(use[:, None] * (PRIOR / slices), slices, axis=1).astype(np.float64)

    @property
    def heat(self) -> Numbers:
        """float64 [sites, slices], aged count of the reads that asked for each slice; it falls along a row.

        The lowest slice of a site that has no floor counts for more.
        """
        found = np.ascontiguousarray(self._reads[:, ::-1].cumsum(axis=1)[:, ::-1])
        found[self.floors == 0, 0] *= FAR
        return found

    @property
    def in_flight(self) -> int:
        """Slices that were asked for and are not there yet."""
        return int(self._coming.sum())

    def count(self, sites: Counts, levels: Counts, tokens: float | Numbers = 1.0) -> None:
        """Tokens have asked for the first `levels` slices of these sites; all of the same shape."""
        np.add.at(self._reads, (sites, levels - 1), tokens)

    def add(self, reads: Numbers) -> None:
        """Tokens have asked so often, [sites, slices], for as many slices of each site."""
        self._reads += reads

    def age(self, tokens: int) -> None:
        """So many tokens have gone through the model."""
        self._reads *= 0.5 ** (tokens / HALF_LIFE)

    def fill(self) -> list[Slice]:
        """The likeliest slices that fit, in order; they count as resident. For the start, when nothing else is."""
        heat, chosen = self.heat, []
        sites, indices = np.indices(self.sizes.shape)
        for at in np.lexsort((sites.ravel(), indices.ravel(), -heat.ravel())).tolist():
            site, index = divmod(at, self._slices)
            size = int(self.sizes[site, index])
            if index == self.levels[site] and self.held + size <= self.budget:
                self.levels[site] += 1
                self.held += size
                chosen.append(Slice(site, index))
        return chosen

    def moves(self) -> Moves:
        """What use says should be exchanged now. What is dropped is no longer resident, what is fetched is in flight
        until `arrived` or `failed`."""
        heat, moves = self.heat, Moves([], [])
        wanted = np.flatnonzero((self.levels < self._slices) & ~self._coming)
        hot = heat[wanted, self.levels[wanted]]
        order = np.lexsort((wanted, self.levels[wanted], -hot))[: max(0, IN_FLIGHT - self.in_flight)]
        if not len(order):
            return moves
        victims = _Victims(self, heat, reads=float(hot[order[0]]))
        for site, reads in zip(wanted[order].tolist(), hot[order].tolist(), strict=True):
            index = int(self.levels[site])
            size = int(self.sizes[site, index])
            taken = victims.for_room(size - (self.budget - self.held), reads)
            if taken is None:
                continue
            for one in taken:
                self._drop(one)
            self.held += size
            self._coming[site] = True
            moves.dropped.extend(taken)
            moves.fetched.append(Slice(site, index))
        return moves

    def require(self, sites: Counts, levels: Counts, pinned: npt.NDArray[np.bool_]) -> Moves | None:
        """What to do so that so many slices of these sites are resident at once; they count as that.

        Args:
            sites: int64 [n], each once. levels: int64 [n].
            pinned: [sites], those of which nothing may be dropped.

        Returns:
            None where they do not fit beside what is pinned; nothing has changed then.
        """
        missing = [
            Slice(site, index)
            for site, level in zip(sites.tolist(), levels.tolist(), strict=True)
            for index in range(self.levels[site], level)
        ]
        size = sum(int(self.sizes[s]) for s in missing)
        heat = self.heat
        taken = _Victims(self, heat, ~pinned).for_room(size - (self.budget - self.held), np.inf)
        if taken is None:
            return None
        for one in taken:
            self._drop(one)
        self.held += size
        self.levels[sites] = np.maximum(self.levels[sites], levels)
        return Moves(taken, missing)

    def arrived(self, one: Slice) -> None:
        """A slice that was in flight is on the device."""
        self._coming[one.site] = False
        self.levels[one.site] = one.number + 1

    def failed(self, one: Slice) -> None:
        """A slice that was in flight will not come; its memory is free."""
        self._coming[one.site] = False
        self.held -= int(self.sizes[one])

    def lost(self, one: Slice) -> None:
        """A slice that counts as resident is not there; those above it are not either."""
        while self.levels[one.site] > one.number:
            self._drop(Slice(one.site, int(self.levels[one.site]) - 1))

    def _drop(self, one: Slice) -> None:
        self.levels[one.site] -= 1
        self.held -= int(self.sizes[one])


class _Victims:
    """The resident slices that may be dropped, the least read first: of each site the highest one there.

    Args:
        free: [sites], those of which something may be dropped; None: all.
        reads: how often the most-read of what wants their room is read; those that it cannot replace are left out.
    """

    def __init__(
        self, planner: Planner, heat: Numbers, free: npt.NDArray[np.bool_] | None = None, reads: float = np.inf
    ) -> None:  # fmt: skip
        self._sizes, self._heat, self._floors = planner.sizes, heat, planner.floors
        self._tops = planner.levels - 1
        some = (planner.levels > planner.floors) & ~planner._coming
        if free is not None:
            some &= free
        sites = np.flatnonzero(some)
        sites = sites[_clearly_more(reads, heat[sites, self._tops[sites]])]
        tops = self._tops[sites]
        self._queue = list(zip(heat[sites, tops].tolist(), (-tops).tolist(), sites.tolist(), strict=True))
        heapq.heapify(self._queue)

    def for_room(self, size: int, reads: float) -> list[Slice] | None:
        """Slices of at least `size` bytes that something read so often may replace; None where there are not enough,
        and then all of them remain."""
        taken: list[Slice] = []
        while size > 0 and self._queue and _clearly_more(reads, self._queue[0][0]):
            _, negative, site = heapq.heappop(self._queue)
            if -negative != self._tops[site]:  # left over from a site whose slices were put back
                continue
            taken.append(Slice(site, -negative))
            size -= int(self._sizes[taken[-1]])
            self._tops[site] -= 1
            self._push(site)
        if size <= 0:
            return taken
        for one in reversed(taken):
            self._tops[one.site] += 1
            self._push(one.site)
        return None

    def _push(self, site: int) -> None:
        top = int(self._tops[site])
        if top >= self._floors[site]:
            heapq.heappush(self._queue, (float(self._heat[site, top]), -top, site))


def _clearly_more(reads: float, others: Any) -> Any:
    """Whether something is read so much more often; of numbers or of arrays of them."""
    return reads > RATIO * others + LEAST
