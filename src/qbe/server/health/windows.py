"""Numbers over the last answers."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """What a detector says.

    Attributes:
        value: None while it has seen too little.
        seen: answers that it looks back on.
    """

    value: float | None = None
    seen: int = 0


class Ratio:
    """A sum over another, of the last answers.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self._kept: deque[tuple[float, float, str]] = deque(maxlen=size)

    def add(self, part: float, whole: float = 1.0, teller: str = "") -> None:
        """One more answer.

        Args:
            teller: who says so, where it is somebody's word.
        """
        self._kept.append((part, whole, teller))

    def read(self, least: int) -> Reading:
        """The ratio; infinity where there is something over nothing. None with fewer than `least` answers.

        Of several tellers it is the lowest that is left without one of them, so that nobody alone raises it.
        """
        if len(self._kept) < least:
            return Reading(None, len(self._kept))
        tellers = {teller for *_, teller in self._kept}
        found = [self._without(teller) for teller in tellers] if len(tellers) > 1 else [self._without(None)]
        return Reading(min(found), len(self._kept))

    def _without(self, left_out: str | None) -> float:
        rest = [(part, whole) for part, whole, teller in self._kept if teller != left_out]
        part, whole = (math.fsum(column) for column in zip(*rest, strict=True))
        return part / whole if whole else math.inf if part else 0.0


class Shares:
    """Of what kinds the last answers were, against a reference: the population stability index.

    0.1 is little, 0.25 a shift, as credit scoring has it (Siddiqi, "Credit Risk Scorecards", 2006). Half a count is
    added to each kind, so that none has a share of 0.

    Args:
        size: how many.
        reference: kind -> count.
    """

    def __init__(self, size: int, reference: Mapping[str, int]) -> None:
        self._kept: deque[str] = deque(maxlen=size)
        self._reference = reference

    def add(self, kind: str) -> None:
        """One more answer."""
        self._kept.append(kind)

    def read(self, least: int) -> Reading:
        """The index; None with fewer than `least` answers."""
        if len(self._kept) < least:
            return Reading(None, len(self._kept))
        now = Counter(self._kept)
        kinds = {*now, *self._reference}
        total, before = (sum(c.values()) + len(kinds) / 2 for c in (now, self._reference))
        pairs = [((now[k] + 0.5) / total, (self._reference.get(k, 0) + 0.5) / before) for k in kinds]
        return Reading(math.fsum((p - q) * math.log(p / q) for p, q in pairs), len(self._kept))
