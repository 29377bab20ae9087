"""Tiers keep their order: of two answers inside the dearer tier's never reads fewer bits for the same query."""

from __future__ import annotations

from collections import Counter

from qbe.server.settings import TIER_NAMES, TierName

Range = tuple[float, float]  # of average bits, that a query's score chooses among


class TierOrder:
    """The ranges of the answers that are inside, and what they leave to one that comes.

    Pressure sinks tiers and they rise again while answers are written. Whoever comes gets at least what a cheaper
    tier's answer inside has, and at most what a dearer one's has; both hold at once because they held before.
    """

    def __init__(self) -> None:
        self._inside: dict[TierName, Counter[Range]] = {tier: Counter() for tier in TIER_NAMES}

    def within(self, tier: TierName, wanted: Range, most: float) -> Range:
        """The range of an answer that comes now.

        Args:
            wanted: what its tier has under the present pressure.
            most: the high end of the tier's bits, to which both ends may be raised.
        """
        level = TIER_NAMES.index(tier)
        below = [r for name in TIER_NAMES[:level] for r in self._inside[name]]
        above = [r for name in TIER_NAMES[level + 1 :] for r in self._inside[name]]
        low, high = (
            max(wanted[end], min(most, max((r[end] for r in below), default=0.0))) for end in (0, 1)
        )  # fmt: skip
        low, high = (min(bits, *(r[end] for r in above)) if above else bits for end, bits in ((0, low), (1, high)))
        return low, high

    def enter(self, tier: TierName, range_: Range, count: int) -> None:
        """So many answers of this range come in."""
        self._inside[tier][range_] += count

    def leave(self, tier: TierName, range_: Range, count: int) -> None:
        """They are gone."""
        self._inside[tier][range_] -= count
        if self._inside[tier][range_] <= 0:
            del self._inside[tier][range_]
