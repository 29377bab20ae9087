"""What a benchmark gives: rows with our value, a peer's and the physical limit, and the conditions they hold under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qbe.bench.measure import Failed, Outcome, Timing

HIGHER_IS_BETTER = ("tokens/s", "requests/s", "answers")
COUNT = "graphs"  # a unit that is counted, not compared
PAIRED = "median and quartiles of the differences of pairs, not the difference of the medians"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: the work, e.g. `qkv` or `decode`.
        size: of the work, e.g. `6144x4096`.
        case: under which conditions, e.g. `M 16, group 64`: what the rows of one table or panel share.
        bits: of the weights as QBE read them: a number, or the mixture as text (`4+6+8`).
        ours: None when there was nothing to measure; `note` says why.
        peer: whom we are set beside.
        theirs: what it took, or why it is missing.
        unit: of all values; times are better when lower, those of `HIGHER_IS_BETTER` when higher, `graphs` are counted.
        limit: the value at the physical limit, in the same unit; None where there is none.
        note: what the reader must know about this row.
        added: in the same unit, what the compared action costs more than without it, measured pair by pair (`PAIRED`).
    """

    what: str
    size: str
    case: str
    bits: float | str
    ours: Timing | None
    peer: str
    theirs: Timing | Failed
    unit: str
    limit: float | None = None
    note: str = ""
    added: Timing | None = None

    @property
    def shape(self) -> str:
        return ", ".join(s for s in (self.size, self.case) if s)

    @property
    def shown_bits(self) -> str:
        return self.bits if isinstance(self.bits, str) else f"{self.bits:g}"

    @property
    def work(self) -> tuple[str, str, float | str]:
        """What the rows of all peers of one comparison share."""
        return self.what, self.shape, self.bits

    @property
    def peer_value(self) -> float | None:
        return None if isinstance(self.theirs, Failed) else self.theirs.median

    @property
    def ratio(self) -> float | None:
        """How many times better QBE is than the peer; below 1 it is worse. None without a peer."""
        return None if self.ours is None else self._over_peer(self.ours.median)

    @property
    def limit_ratio(self) -> float | None:
        """The ratio that QBE would have if it ran at the physical limit and the peer as it was measured."""
        return None if self.limit is None else self._over_peer(self.limit)

    @property
    def ratio_spread(self) -> tuple[float, float] | None:
        """The ratio where both sides are at the quartiles that are worst for QBE, and at those that are best."""
        if self.ours is None or isinstance(self.theirs, Failed):
            return None
        ours, theirs = self.ours, self.theirs
        ends = ((theirs.low, ours.high), (theirs.high, ours.low))
        if self.unit in HIGHER_IS_BETTER:
            ends = ((ours.low, theirs.high), (ours.high, theirs.low))
        (low, least), (high, most) = ends
        return (low / least, high / most) if least and most else None

    @property
    def better(self) -> bool | None:
        """Whether QBE is better than the peer, or the action quicker than none; None within the quartiles."""
        if self.added is not None:
            low, high = -self.added.high, -self.added.low
        elif self.ratio_spread is not None:
            low, high = (end - 1 for end in self.ratio_spread)
        else:
            return None
        return None if low <= 0 <= high else low > 0

    def _over_peer(self, value: float) -> float | None:
        if self.peer_value is None:
            return None
        above, below = (value, self.peer_value) if self.unit in HIGHER_IS_BETTER else (self.peer_value, value)
        return above / below if below else None

    def describe(self) -> dict[str, Any]:
        """The row as JSON. A spread is [lower quartile, upper quartile]."""
        ours, theirs = self.ours, None if isinstance(self.theirs, Failed) else self.theirs
        reason = self.theirs.reason if isinstance(self.theirs, Failed) else ""
        described = {
            "what": self.what,
            "shape": self.shape,
            "bits": self.bits,
            "ours": None if ours is None else ours.median,
            "spread": None if ours is None else [ours.low, ours.high],
            "peer": self.peer,
            "peer_value": self.peer_value,
            "peer_spread": None if theirs is None else [theirs.low, theirs.high],
            "ratio": self.ratio,
            "limit": self.limit,
            "limit_ratio": self.limit_ratio,
            "unit": self.unit,
            "rounds": 0 if ours is None else ours.rounds,
            "note": "; ".join(n for n in (reason, self.note) if n),
        }
        if self.added is not None:
            spread = [self.added.low, self.added.high]
            described |= {"added": self.added.median, "added_spread": spread, "added_statistic": PAIRED}
        return described


@dataclass(frozen=True)
class BenchmarkReport:
    """The result of one benchmark.

    Attributes:
        benchmark: its name, as the command takes it.
        hardware: the machine, its versions, its load and its measured bandwidth.
        conditions: how it was measured: seed, rounds, sizes.
    """

    benchmark: str
    hardware: dict[str, Any]
    conditions: dict[str, Any]
    rows: list[Row]

    def describe(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "hardware": self.hardware,
            "conditions": self.conditions,
            "rows": [row.describe() for row in self.rows],
        }


def rows_beside(
    peers: Mapping[str, Outcome],
    part: str,
    factor: float,
    *,
    what: str,
    size: str,
    case: str,
    bits: float | str,
    ours: Timing | None,
    unit: str,
    limit: float | None,
    notes: Mapping[str, str],
) -> list[Row]:
    """A row for every peer, the missing ones included.

    Args:
        peers, ours: as measured.
        factor: from what was measured to `unit`, for both.
        notes: peer -> note.
    """
    rows = []
    mine = None if ours is None else ours.times(factor)
    for name, outcome in peers.items():
        theirs = outcome if isinstance(outcome, Failed) else outcome.get(part, Failed(f"it does not measure {part}"))
        scaled = theirs if isinstance(theirs, Failed) else theirs.times(factor)
        rows.append(Row(what, size, case, bits, mine, name, scaled, unit, limit, notes.get(name, "")))
    return rows
