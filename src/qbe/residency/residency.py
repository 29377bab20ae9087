"""What of a model's nested store is on the device, within a bound, while requests run.

Between two steps the engine calls `settle`: slices that a thread has fetched meanwhile are published, and the planner
says what comes next. A row reads at most what is published (`qbe.store.read_limits`), so nobody waits for a slice.
Where exact bits are wanted (`miss="wait"`), they are fetched before they are read, and the thread has nothing to do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from qbe.blueprint import Blueprint
from qbe.errors import QBEError
from qbe.progress import bar
from qbe.residency.fetcher import Fetcher
from qbe.residency.planner import Counts, Moves, Numbers, Planner, Slice
from qbe.residency.routed_reads import Pass, Reads, RoutedReads
from qbe.residency.slices import StoredSlices
from qbe.sites import SiteTable
from qbe.store.plan import Plan
from qbe.store.read_limits import ReadLimits

log = logging.getLogger(__name__)

MISS = ("lower", "wait")  # what a row does that asks for a slice which is not there: read fewer bits, or wait
_EVERY = 8  # steps between two looks at what should be exchanged
_KEPT = 256  # blueprints whose slices are remembered


def check_miss(miss: str) -> None:
    """Raises QBEError for what is none of `MISS`."""
    if miss not in MISS:
        raise QBEError(f"miss is {miss!r}, but must be {' or '.join(MISS)}")


@dataclass(frozen=True)
class ResidencyNumbers:
    """What is where, and what was moved, since the start.

    Attributes:
        resident_bytes: of nested codes on the device, the lowest slices included.
        stored_bytes: of nested codes in all.
        fetched_bytes, dropped_bytes: of slices that use brought and that gave way, what was there first not counted.
        misses: times that a token asked a site for more than was there.
        failure: why nothing is fetched any more, one line; None where all is well.
    """

    resident_bytes: int
    stored_bytes: int
    fetched_bytes: int
    dropped_bytes: int
    misses: int
    failure: str | None


class Residency:
    """Holds the slices of one model; `start` before its first request.

    Args:
        model: as `StoredSlices` takes it; its codes are in arenas from here on.
        table: its sites.
        folder: of its store.
        miss: one of `MISS`.
        progress: show progress bars.

    Raises:
        QBEError: as `StoredSlices`.
    """

    def __init__(self, model: nn.Module, table: SiteTable, folder: Path, miss: str, progress: bool) -> None:
        self.waits, self._table, self._progress = miss == "wait", table, progress
        self._slices = StoredSlices(model, folder, table, progress)
        self._use: Numbers = np.array([s.use for s in table.nested], np.float64)
        self._planner = Planner(self._slices.sizes, 0, self._use)
        self._limits = ReadLimits(self._read_bits())
        self.reads = RoutedReads(
            model, table, self._slices.precisions, lambda: self._planner.levels, self._wait_for if self.waits else None
        )
        self._fetcher: Fetcher | None = None
        self._levels: dict[str, Counts] = {}
        self._steps, self._due = 0, False  # that have run, and whether the next look comes at once
        self._pinned = np.zeros(len(self._use), bool)
        self._fetched = self._dropped = self._misses = 0
        self._failure: str | None = None

    @property
    def above_lowest(self) -> int:
        """Bytes of all slices but the lowest ones."""
        return int(self._slices.sizes[:, 1:].sum())

    @property
    def least(self) -> int:
        """Bytes of these that must fit at least: none, or those that a step may have to wait for together."""
        if not self.waits:
            return 0
        above = self._slices.sizes[:, 1:].sum(axis=1)
        return int(above[self.reads.dense].sum()) + max((int(above[s].sum()) for s in self.reads.layers), default=0)

    @property
    def absent(self) -> int:
        """Bytes of codes that are not on the device, nor on their way."""
        return self.above_lowest - self._planner.held

    @property
    def numbers(self) -> ResidencyNumbers:
        """As they are now."""
        stored = int(self._slices.sizes.sum())
        return ResidencyNumbers(stored - self.absent, stored, self._fetched, self._dropped, self._misses, self._failure)

    def start(self, plan: Plan, budget: int) -> None:
        """Place the likeliest slices, and let the plan's rows read what is there.

        Args:
            budget: bytes that slices above the lowest ones may take.

        Raises:
            QBEError: the store's files cannot be read.
        """
        self._planner.budget = budget
        first = self._planner.fill()
        with bar("placing slices", len(first), self._progress) as step:
            for one in first:
                try:
                    self._slices.load(one)
                except (OSError, MemoryError) as error:
                    raise QBEError(f"the nested store cannot be read ({error}): quantise the model again") from error
                step()
        plan.limits = self._limits
        self._limits.set(self._read_bits())
        if not self.waits:
            self._fetcher = Fetcher(self._slices.load)

    def levels_of(self, blueprint: Blueprint) -> Counts:
        """int64 [nested sites], how many slices a blueprint asks for."""
        known = self._levels.get(blueprint.linear_key)
        if known is None:
            if len(self._levels) == _KEPT:
                self._levels.clear()
            bits = np.asarray(blueprint.weight_bits, np.int64)
            known = np.maximum(1, np.searchsorted(self._slices.precisions, bits, side="right"))
            self._levels[blueprint.linear_key] = known
        return known

    def expect(self, blueprint: Blueprint, tokens: int) -> None:
        """A request comes whose prompt has so many tokens: what it will read is fetched beside it, at once.

        Raises:
            QBEError: exact bits cannot be had any more.
        """
        if self.waits and self._failure is not None:
            raise QBEError(self._failure)
        sites = np.arange(len(self._use))
        self._planner.count(sites, self.levels_of(blueprint), self._use * tokens)
        self._due = True

    def settle(self) -> None:
        """Between two steps: publish what has come, and ask for what use wants now."""
        if self._fetcher is None:
            return
        for one, error in self._fetcher.done():
            if error is not None:
                self._planner.failed(one)
                self._fail(error)
                continue
            self._planner.arrived(one)
            self._fetched += int(self._slices.sizes[one])
        moves = Moves([], [])
        if self._failure is None and (self._due or self._steps % _EVERY == 0):
            moves, self._due = self._planner.moves(), False
        self._limits.set(self._read_bits())  # before any memory goes
        self._give_back(moves.dropped)
        self._fetcher.ask(moves.fetched)

    def begin(self, passes: list[Pass]) -> None:
        """These passes come next, as one step.

        Raises:
            QBEError: exact bits are wanted and cannot be had.
        """
        self._steps += 1
        self.reads.begin(passes)
        if self.waits:
            dense = self.reads.dense
            self._pinned[:] = False
            self._wait_for(dense, np.max([p.wanted[:, dense].max(axis=0) for p in passes], axis=0))
            self._pinned[dense] = True

    def finish(self) -> list[Reads]:
        """The step is over: what the tokens of each pass read."""
        found = self.reads.finish(self._planner.count)
        self._planner.age(sum(len(one.misses) for one in found))
        self._misses += sum(int(one.misses.sum()) for one in found)
        return found

    def close(self) -> None:
        """Ends the thread and closes the store's files."""
        self.reads.close()
        if self._fetcher is not None:
            self._fetcher.close()
        self._slices.close()

    def _read_bits(self) -> Counts:
        """int64 [nested sites], what a row may read of each: all of it where it is waited for."""
        precisions = self._slices.precisions
        return np.full(len(self._use), precisions[-1]) if self.waits else precisions[self._planner.levels - 1]

    def _wait_for(self, sites: Counts, levels: Counts) -> None:
        """Have so many slices of these sites on the device now."""
        pinned = self._pinned.copy()
        pinned[sites] = True
        moves = self._planner.require(sites, levels, pinned)
        assert moves is not None, "the bound holds what a step needs"
        self._give_back(moves.dropped)
        for number, one in enumerate(moves.fetched):
            try:
                self._slices.load(one)
            except (OSError, MemoryError) as error:
                for lost in moves.fetched[number:]:
                    self._planner.lost(lost)
                self._fail(error)
                raise QBEError(str(self._failure)) from error
            self._fetched += int(self._slices.sizes[one])

    def _give_back(self, dropped: Sequence[Slice]) -> None:
        for one in dropped:
            self._slices.drop(one)
            self._dropped += int(self._slices.sizes[one])

    def _fail(self, error: Exception) -> None:
        """Say once that nothing is fetched any more."""
        if self._failure is None:
            instead = (
                "exact bits cannot be had any more: start again, or without miss=wait" if self.waits
                else "no further slices are fetched, what is on the device goes on serving"
            )  # fmt: skip
            self._failure = (
                f"a slice of the nested store could not be fetched ({str(error) or type(error).__name__}); {instead}"
            )
            log.warning("%s", self._failure)
