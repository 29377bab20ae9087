"""What of a model's nested store is on the device, within a bound, while requests run.

Between two steps the engine calls `settle`: slices that a thread has fetched meanwhile are published. A row reads at
most what is published, so nobody waits for a slice. Every few steps, while a GPU is busy with one, the planner says
what comes next. Where exact bits are wanted (`miss="wait"`), they are fetched before they are read, and the thread has
nothing to do. All that is a device's own is in its `Slices`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from qbe.blueprint import Blueprint
from qbe.errors import QBEError
from qbe.progress import bar
from qbe.residency.counted_reads import CountedReads
from qbe.residency.device_slices import DeviceSlices
from qbe.residency.fetcher import Fetcher
from qbe.residency.planner import Counts, Numbers, Planner, Slice
from qbe.residency.routed_reads import Pass, RoutedReads
from qbe.residency.slices import Slices, StoredSlices
from qbe.residency.transfer import CudaTransfer
from qbe.sites import SiteTable
from qbe.store.plan import Plan

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


def slices_on(
    device: torch.device, model: nn.Module, folder: Path, table: SiteTable, waits: bool, progress: bool
) -> Slices:
    """A model's codes, taken over from the store in `folder`; the device's form of them."""
    if device.type == "cuda":
        return DeviceSlices(model, folder, table, CudaTransfer(device), progress)
    return StoredSlices(model, folder, table, waits, progress)


class Residency:
    """Holds the slices of one model; `start` before its first request.

    Args:
        model: as `StoredSlices` or `DeviceSlices` take it, which own its codes from here on.
        table: its sites.
        folder: of its store.
        device: where its kernels run.
        miss: one of `MISS`.
        progress: show progress bars.

    Raises:
        QBEError: as these.
    """

    def __init__(
        self, model: nn.Module, table: SiteTable, folder: Path, device: torch.device, miss: str, progress: bool
    ) -> None:  # fmt: skip
        self.waits, self._table, self._progress = miss == "wait", table, progress
        self._slices = slices_on(device, model, folder, table, self.waits, progress)
        self._use: Numbers = np.array([s.use for s in table.nested], np.float64)
        self._planner = Planner(self._slices.sizes, 0, self._use, self._slices.floors)
        before = self._wait_for if self.waits else None
        self.reads = RoutedReads(model, table, self._slices.precisions, self._slices.floors, device, before)
        self._fetcher: Fetcher | None = None
        self._levels: dict[str, Counts] = {}
        self._steps, self._due = 0, False  # that have run, and whether the next look comes at once
        self._tokens = 0  # that were not counted yet
        self._counted: CountedReads | None = None  # what is on its way from the device
        self._pinned = np.zeros(len(self._use), bool)
        self._fetched = self._dropped = self._misses = 0
        self._failure: str | None = None

    @property
    def above_floors(self) -> int:
        """Bytes of all slices but those that never leave the device."""
        return int(self._above().sum())

    @property
    def least(self) -> int:
        """Bytes of these that must fit at least: none, or those that a step may have to wait for together."""
        if not self.waits:
            return 0
        above = self._above()
        return int(above[self.reads.dense].sum()) + max((int(above[s].sum()) for s in self.reads.layers), default=0)

    @property
    def absent(self) -> int:
        """Bytes of codes that are not on the device, nor on their way."""
        return self.above_floors - self._planner.held

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
        self._slices.start(plan, budget)
        first = self._planner.fill()
        with bar("placing slices", len(first), self._progress) as step:
            for one in first:
                try:
                    self._slices.load(one)
                except (OSError, MemoryError) as error:
                    raise QBEError(f"the nested store cannot be read ({error}): quantise the model again") from error
                step()
        self._publish()
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
        """Between two steps: publish what has come, and ask at once for what a new request wants."""
        if self._fetcher is None:
            return
        done = self._fetcher.done()
        for one, error in done:
            if error is not None:
                self._planner.failed(one)
                self._fail(error)
                continue
            self._planner.arrived(one)
            self._fetched += int(self._slices.sizes[one])
        if done:
            self._publish()
        if self._due:
            self._exchange()

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

    def finish(self) -> list[tuple[Counts, Numbers]]:
        """The step was launched: what the tokens of each pass read, misses and bits as `Reads` has them."""
        found = self.reads.finish()
        self._tokens += sum(len(one.misses) for one in found)
        if self._steps % _EVERY == 0:  # on a GPU the step is still running
            self._exchange()
        read = [one.on_host() for one in found]
        self._misses += sum(int(misses.sum()) for misses, _ in read)
        return read

    def close(self) -> None:
        """Ends the thread and closes the store's files."""
        self.reads.close()
        if self._fetcher is not None:
            self._fetcher.close()
        self._slices.close()

    def _above(self) -> Counts:
        """int64 [nested sites], bytes of the slices of each that may leave the device."""
        sizes = self._slices.sizes
        return (sizes * (np.arange(sizes.shape[1]) >= self._slices.floors[:, None])).sum(axis=1)

    def _publish(self) -> None:
        self._slices.publish(self._planner.levels)
        self.reads.publish(self._planner.levels)

    def _exchange(self) -> None:
        """Ask for what use wants now, in the place of what it does not."""
        if self._counted is None:
            self._counted, self._tokens = CountedReads(self.reads.counts(), self._tokens), 0
        if (counted := self._counted).there:
            self._planner.add(counted.numbers)
            self._planner.age(counted.tokens)
            self._counted = None
        self._due = False
        if self._failure is None and self._fetcher is not None:
            moves = self._planner.moves()
            if moves.dropped:
                self._publish()  # before any memory goes
            self._give_back(moves.dropped)
            self._fetcher.ask(moves.fetched)

    def _wait_for(self, sites: Counts, levels: Counts) -> None:
        """Have so many slices of these sites on the device now."""
        pinned = self._pinned.copy()
        pinned[sites] = True
        moves = self._planner.require(sites, levels, pinned)
        assert moves is not None, "the bound holds what a step needs"
        if not moves.fetched:
            return
        there = self._planner.levels.copy()
        for one in reversed(moves.fetched):
            there[one.site] = one.number
        self._slices.publish(there)  # before any memory goes
        self._give_back(moves.dropped)
        for number, one in enumerate(moves.fetched):
            try:
                self._slices.load(one)
            except (OSError, MemoryError) as error:
                for lost in moves.fetched[number:]:
                    self._planner.lost(lost)
                self._publish()
                self._fail(error)
                raise QBEError(str(self._failure)) from error
            self._fetched += int(self._slices.sizes[one])
        self._publish()

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
