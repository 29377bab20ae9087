"""What the engine's steps did: tokens, bytes of weights, changes of the plan, preemptions."""

from __future__ import annotations

from dataclasses import dataclass

from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.sites import SiteTable

_KEPT = 256  # sets of blueprints whose bytes are remembered


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        tokens, rows: that went through the model, and the answers they belong to.
        weight_bytes: of weights and scales, each read once at the highest precision that a row reads; experts by the
            chance that a token uses them.
        switched: whether its rows had other blueprints than those of the step before.
        preempted: answers that gave their pages up.
        shares: ids of its answers with their tokens times the bytes of weights that one of them alone would read at
            the bits that the step reads for it.
        fetched_bytes: of slices that came to the device since the step before.
    """

    tokens: int
    rows: int
    weight_bytes: int
    switched: bool
    preempted: int
    shares: list[tuple[str, int]]
    fetched_bytes: int = 0


class StepObserver:
    """Looks at the engine after each of its steps.

    Args:
        core: of the engine.
    """

    def __init__(self, core: Core) -> None:
        self._core, self._preempted, self._fetched = core, 0, 0
        self._rows: tuple[tuple[str, int], ...] = ()  # blueprints of the last step, and their tokens where these matter
        self._alone: list[int] = []  # bytes that each of its rows would read alone
        self._together = 0
        self._bytes: dict[
            tuple[frozenset[str], int], int
        ] = {}  # that rows with these blueprints read in so many tokens
        self._shared = not core.table.reads.partial  # whether all tokens read the same weights

    def last(self) -> Step | None:
        """The step that has just run; None when it did nothing."""
        scheduler = self._core.scheduler
        work, scheduler.last = scheduler.last, []
        if not work:
            return None
        rows = tuple((w.blueprint.linear_key, 1 if self._shared else w.count) for w in work)
        switched = [key for key, _ in rows] != [key for key, _ in self._rows]
        if rows != self._rows or self._core.plan.limits is not None:  # which change by themselves
            read = self._core.plan.read([w.blueprint for w in work])
            self._rows, self._together = rows, self._bytes_of(read, sum(count for _, count in rows))
            self._alone = [self._bytes_of([b], 1) for b in read]
        shares = [(w.sequence.request_id, w.count * alone) for w, alone in zip(work, self._alone, strict=True)]
        preempted, self._preempted = scheduler.preempted - self._preempted, scheduler.preempted
        before, residency = self._fetched, self._core.residency
        self._fetched = 0 if residency is None else residency.numbers.fetched_bytes
        tokens, fetched = sum(w.count for w in work), self._fetched - before
        return Step(tokens, len(work), self._together, switched, preempted, shares, fetched)

    def _bytes_of(self, blueprints: list[Blueprint], tokens: int) -> int:
        key = frozenset(b.linear_key for b in blueprints), 1 if self._shared else tokens
        if key not in self._bytes:
            if len(self._bytes) == _KEPT:
                self._bytes.clear()
            self._bytes[key] = bytes_of_step(self._core.table, blueprints, key[1])
        return self._bytes[key]


def bytes_of_step(table: SiteTable, blueprints: list[Blueprint], tokens: int = 1) -> int:
    """Bytes of weights and scales of a step with these rows, each site read once at the highest of its gears."""
    highest = tuple(map(max, zip(*(b.weight_bits for b in blueprints), strict=True)))
    return table.reads.nbytes(highest, tokens)
