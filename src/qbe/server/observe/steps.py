"""What the engine's steps did: tokens, bytes of weights, changes of the plan, preemptions."""

from __future__ import annotations

from dataclasses import dataclass

from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.sites import FULL_BITS, SiteTable

_KEPT = 256  # sets of blueprints whose bytes are remembered


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        tokens, rows: that went through the model, and the answers they belong to.
        weight_bytes: of weights and scales, each read once at the highest precision that a row asks for.
        switched: whether its rows had other blueprints than those of the step before.
        preempted: answers that gave their pages up.
        shares: ids of its answers with their tokens times the bytes of weights that one of them alone would read.
    """

    tokens: int
    rows: int
    weight_bytes: int
    switched: bool
    preempted: int
    shares: list[tuple[str, int]]


class Steps:
    """Looks at the engine after each of its steps.

    Args:
        core: of the engine.
    """

    def __init__(self, core: Core) -> None:
        self._core, self._before, self._preempted = core, tuple[str, ...](), 0
        self._bytes: dict[frozenset[str], int] = {}  # of weights that such rows read together

    def last(self) -> Step | None:
        """The step that has just run; None when it did nothing."""
        scheduler = self._core.scheduler
        work, scheduler.last = scheduler.last, []
        if not work:
            return None
        blueprints = {w.sequence.blueprint.linear_key: w.sequence.blueprint for w in work}
        rows = tuple(w.sequence.blueprint.linear_key for w in work)
        alone = {name: self._bytes_of([blueprint]) for name, blueprint in blueprints.items()}
        shares = [(w.sequence.request_id, w.count * alone[w.sequence.blueprint.linear_key]) for w in work]
        preempted, self._preempted = scheduler.preempted - self._preempted, scheduler.preempted
        switched, self._before = rows != self._before, rows
        together = self._bytes_of(list(blueprints.values()))
        return Step(sum(w.count for w in work), len(work), together, switched, preempted, shares)

    def _bytes_of(self, blueprints: list[Blueprint]) -> int:
        key = frozenset(b.linear_key for b in blueprints)
        if key not in self._bytes:
            if len(self._bytes) == _KEPT:
                self._bytes.clear()
            self._bytes[key] = bytes_of_step(self._core.table, blueprints)
        return self._bytes[key]


def bytes_of_step(table: SiteTable, blueprints: list[Blueprint]) -> int:
    """Bytes of weights and scales of a step with these rows, each site read once at the highest of its gears."""
    highest = [max(gears) for gears in zip(*(b.weight_bits for b in blueprints), strict=True)]
    gears, total = iter(highest), 0
    for site in table:
        gear = next(gears) if site.nested else FULL_BITS
        total += site.bytes_at.get(gear, site.parameters * gear // 8)
    return total
