"""The average bits of a tier when too much waits or too many joules are spent, and when there are some to spare."""

from __future__ import annotations

from qbe.server.settings import Tier


def tier_bits(tier: Tier, lowered: float, raised: float = 0.0) -> tuple[float, float]:
    """The range of average bits of a tier.

    Args:
        lowered: how far both ends sink to the floor, 0 to 1: the brownout, or the energy governor's shift below 0.
        raised: how far the lower end rises to the higher one, 0 to 1: the governor's shift above 0.
    """
    floor = tier.bits[0] if tier.floor is None else tier.floor
    low, high = (b if tier.floor is None else b - lowered * (b - floor) for b in tier.bits)
    return low + raised * (high - low), high
