"""Another blueprint while an answer is written: when the answer has become hard or easy to predict and stays so.

The sampler leaves the entropy of every token's distribution and the margin of its likeliest token. Every 32 tokens the
last 32 are looked at. Three such windows in a row that are hard, or easy, are cause for another blueprint; one that is
neither, or the other, begins the count anew, and so does a refresh. So there is one in 96 tokens at most, and text that
goes to and fro changes nothing. Both numbers can be set (`Pace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qbe.blueprint import Blueprint
from qbe.budget import Budget, check_pace
from qbe.refresh.thresholds import RUN, USUAL, WINDOW, Thresholds
from qbe.sites import SiteTable


@dataclass(frozen=True)
class Cause:
    """Why a blueprint is due.

    Attributes:
        kind: `hard` or `easy`.
        token: tokens of the answer that had been written.
        entropy, margin: means over the windows that gave cause, nats and logits.
    """

    kind: str
    token: int
    entropy: float
    margin: float


@dataclass(frozen=True)
class Refresh:
    """A blueprint that took another one's place.

    Attributes:
        kind, token, entropy, margin: as in `Cause`.
        score: of the query, from now on.
        bits_before, bits: average bits of the weights.
        kv_bits_before, kv_bits: of the KV cache's pages to come.
        key: `Blueprint.key` of the new one.
    """

    kind: str
    token: int
    entropy: float
    margin: float
    score: float
    bits_before: float
    bits: float
    kv_bits_before: float
    kv_bits: float
    key: str

    @classmethod
    def of(cls, cause: Cause, before: Blueprint, now: Blueprint, table: SiteTable, score: float) -> Refresh:
        return cls(
            **asdict(cause), score=score,
            bits_before=before.average_weight_bits(table), bits=now.average_weight_bits(table),
            kv_bits_before=before.average_kv_bits(table), kv_bits=now.average_kv_bits(table), key=now.key,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Pace:
    """How soon an answer can give cause.

    Attributes:
        interval: tokens of a window.
        count: windows of one kind in a row that are cause.

    Raises:
        QBEError: one of them is no whole number from 1 to 1 024.
    """

    interval: int = WINDOW
    count: int = RUN

    def __post_init__(self) -> None:
        for name, value in (("refresh_interval", self.interval), ("refresh_count", self.count)):
            check_pace(name, value)

    def asked(self, budget: Budget) -> Pace:
        """With what a request says of it."""
        return Pace(
            self.interval if budget.refresh_interval is None else budget.refresh_interval,
            self.count if budget.refresh_count is None else budget.refresh_count,
        )


class Monitor:
    """Watches the tokens of one answer.

    Args:
        thresholds: of the model, for windows of this pace; without them tokens are measured, and nothing else.
    """

    def __init__(self, thresholds: Thresholds | None, pace: Pace | None = None) -> None:
        self._thresholds, self._pace = thresholds, pace or Pace()
        self._looked = self._run = 0  # tokens; windows of one kind
        self._kind = USUAL

    def look(self, entropies: Sequence[float], margins: Sequence[float]) -> Cause | None:
        """Look at the tokens that came since the last call: a cause, if they are one.

        Args:
            entropies, margins: of all tokens of the answer so far.
        """
        cause, window, count = None, self._pace.interval, self._pace.count
        while self._thresholds is not None and self._looked + window <= len(entropies):
            self._looked += window
            means = (_mean(x[self._looked - window : self._looked]) for x in (entropies, margins))
            kind = self._thresholds.kind(*means)
            self._run = self._run + 1 if kind == self._kind else 1
            self._kind = kind
            if kind != USUAL and self._run == count:
                first = self._looked - count * window
                means = (_mean(x[first : self._looked]) for x in (entropies, margins))
                cause, self._run = Cause(kind, self._looked, *means), 0
        return cause


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
