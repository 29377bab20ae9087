"""Keeps power or carbon within a budget by shifting the default tier's bits between its floor and its high end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from qbe.server.energy.intensity import Intensity
from qbe.server.energy.spending import Spending
from qbe.server.settings import Energy, Tier

_STEP = 0.25  # of the way, at each look; the same four steps as a brownout's, so that requests share blueprints
_LOW = 0.75  # part of the budget below which there is room for more precision


class Governor:
    """Looks at the average power once in a while and moves one step.

    Args:
        settings: those in use now.
        clock: seconds.

    Attributes:
        shift: -1: the default tier is at its floor, 0: as its settings have it, 1: at the high end of its bits.
        watts: average power between the last two looks; None before.
        intensity: of carbon.
    """

    def __init__(self, settings: Callable[[], Energy], clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self.shift, self.intensity = 0.0, Intensity(clock)
        self.watts: float | None = None
        self._mark: tuple[float, float] | None = None
        self._asked: tuple[float | str | None, str] = (None, "")
        self._asked_at = -float("inf")

    async def look(self, spending: Spending | None) -> None:
        """Called often; does something as often as the settings say."""
        settings, now = self._settings(), self._clock()
        asked = settings.intensity, settings.intensity_field
        late = settings.intensity is not None and now - self._asked_at >= settings.refresh_s
        if late or asked != self._asked:
            self._asked, self._asked_at = asked, now
            await asyncio.to_thread(self.intensity.renew, *asked)
            now = self._clock()  # seconds may have passed, and what is spent in them is counted
        if spending is None or (self._mark is not None and now - self._mark[0] < settings.window_s):
            return
        joules = spending.counter()
        if self._mark is not None:
            self.watts = max(0.0, joules - self._mark[1]) / (now - self._mark[0])
            self._move(settings)
        self._mark = now, joules

    def used(self, settings: Energy) -> float | None:
        """What part of the budget is used, of two the larger; None without a budget or a measurement."""
        parts = []
        if self.watts is not None and settings.power_w is not None:
            parts.append(self.watts / settings.power_w)
        if self.watts is not None and settings.carbon_g_per_h is not None and self.intensity.now is not None:
            parts.append(self.watts / 1e3 * self.intensity.now / settings.carbon_g_per_h)
        return max(parts, default=None)

    def _move(self, settings: Energy) -> None:
        used = self.used(settings)
        if used is None:
            self.shift = 0.0
        elif used > 1:
            self.shift = max(-1.0, self.shift - _STEP)
        elif used < _LOW:
            self.shift = min(1.0, self.shift + _STEP)


def tier_bits(tier: Tier, lowered: float, raised: float = 0.0) -> tuple[float, float]:
    """The range of average bits of a tier.

    Args:
        lowered: how far both ends sink to the floor, 0 to 1: the brownout, or the energy governor's shift below 0.
        raised: how far the lower end rises to the higher one, 0 to 1: the governor's shift above 0.
    """
    floor = tier.bits[0] if tier.floor is None else tier.floor
    low, high = (b if tier.floor is None else b - lowered * (b - floor) for b in tier.bits)
    return low + raised * (high - low), high
