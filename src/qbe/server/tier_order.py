"""Tiers keep their order: of two answers inside the dearer tier's never reads fewer bits for the same query."""

from __future__ import annotations

from collections import Counter

from qbe.budget import averages
from qbe.policies.allocate import TOLERANCE
from qbe.server.settings import TIER_NAMES, TierName

Range = tuple[float, float]  # of average bits, that a query's score chooses among


class TierOrder:
    """The ranges of the answers that are inside, and what they leave to one that comes.

    Pressure sinks tiers and they rise again while answers are written. Whoever comes gets at least what a cheaper
    tier's answer inside has, and at most what a dearer one's has; both hold at once because they held before. A
    conversation that keeps its bits has a range with nothing else in it.
    """

    def __init__(self) -> None:
        self._inside: dict[TierName, Counter[Range]] = {tier: Counter() for tier in TIER_NAMES}

    def within(self, tier: TierName, wanted: Range, most: float) -> Range:
        """The range of an answer that comes now.

        Args:
            wanted: what its tier has under the present pressure.
            most: the high end of the tier's bits, to which both ends may be raised.
        """
        below, above = self._beside(tier)
        low, high = (
            max(wanted[end], min(most, max((r[end] for r in below), default=0.0))) for end in (0, 1)
        )  # fmt: skip
        low, high = (min(bits, *(r[end] for r in above)) if above else bits for end, bits in ((0, low), (1, high)))
        return low, high

    def keep(self, tier: TierName, found: Range, average: float, count: int) -> Range | None:
        """Let so many answers that are inside read what their conversation has, whatever their score; their range then.

        None, and nothing is done, where a cheaper tier's answer inside may read more, or a dearer one's less.

        Args:
            found: their range so far.
            average: bits of the conversation's blueprint, which is up to `TOLERANCE` below what it was made for.
        """
        bits = averages(average, average + TOLERANCE)[-1]
        below, above = self._beside(tier)
        if any(averages(*r)[-1] > bits for r in below) or any(averages(*r)[0] < bits for r in above):
            return None
        self.leave(tier, found, count)
        self.enter(tier, (bits, bits), count)
        return bits, bits

    def _beside(self, tier: TierName) -> tuple[list[Range], list[Range]]:
        """The ranges of cheaper tiers' answers, and of dearer ones'."""
        level = TIER_NAMES.index(tier)
        below, above = TIER_NAMES[:level], TIER_NAMES[level + 1 :]
        return [r for t in below for r in self._inside[t]], [r for t in above for r in self._inside[t]]

    def enter(self, tier: TierName, range_: Range, count: int) -> None:
        """So many answers of this range come in."""
        self._inside[tier][range_] += count

    def leave(self, tier: TierName, range_: Range, count: int) -> None:
        """They are gone."""
        self._inside[tier][range_] -= count
        if self._inside[tier][range_] <= 0:
            del self._inside[tier][range_]
