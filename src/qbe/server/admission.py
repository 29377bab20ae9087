"""Who may come in: bounded queues for each key, its limits, and how hard the queues press on each tier."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from qbe.server.errors import APIError
from qbe.server.keys import ANYONE, Client
from qbe.server.rates import Bucket, Rates
from qbe.server.settings import TIER_NAMES, Limits, TierName
from qbe.server.tier_order import Range, TierOrder

__all__ = ["Admission", "Bucket"]

_MINUTE = 60.0
_STEPS = 4  # steps of the brownout, so that similar requests share blueprints


class Admission:
    """Counts the answers that are inside and lets in no more than may run and wait.

    Args:
        running: answers that are written at once.
        clock: seconds.
        rates: what keys may ask a minute.
    """

    def __init__(
        self, running: int, clock: Callable[[], float] = time.monotonic, rates: Rates | None = None
    ) -> None:  # fmt: skip
        self.running, self._clock = running, clock
        self._inside: Counter[tuple[TierName, str]] = Counter()  # of each tier and key
        self._left: deque[float] = deque(maxlen=64)  # when the last answers ended
        self.rates = Rates(clock) if rates is None else rates
        self.order = TierOrder()

    @property
    def inside(self) -> int:
        """Answers that are written or wait."""
        return self._inside.total()

    @property
    def spare(self) -> int:
        """Places that nobody has or waits for."""
        return max(0, self.running - self.inside)

    @property
    def waiting(self) -> int:
        """Answers that wait, at least."""
        return max(0, self.inside - self.running)

    def queued(self, tier: TierName, key: str | None = None) -> int:
        """Answers of a tier, or of a key in it, that wait, at most: the others may have taken every place that they
        can fill."""
        inside = sum(n for (t, k), n in self._inside.items() if t == tier and key in (None, k))
        return max(0, inside - max(0, self.running - (self.inside - inside)))

    def enter(self, count: int, limits: Limits, tier: TierName = "default", client: Client = ANYONE) -> None:
        """Let `count` answers in, which `leave` one by one. Each key has a queue of its own in each tier, so that
        nobody can lock the others out.

        Raises:
            APIError: there is no room.
        """
        most = self.running + limits.queue
        if count > most:
            raise APIError(400, f"n is {count} in all, but this server holds {most} answers: ask for fewer", param="n")
        at_once = None if client.key is None else client.key.concurrent
        inside = sum(n for (_, key), n in self._inside.items() if key == client.name)
        if at_once is not None and inside + count > at_once:
            if count > at_once:
                raise APIError(400, f"n is {count} in all, but this key may have {at_once} answers at once", param="n")
            raise APIError(
                429, f"this key has {inside} answers that run or wait and may have {at_once}: try again later",
                code="rate_limit_exceeded", retry_after=self._retry_after(inside + count - at_once),
            )  # fmt: skip
        queued = self.queued(tier, client.name)
        self._inside[tier, client.name] += count
        over = self.queued(tier, client.name) - limits.queue
        if over > 0:
            self._inside[tier, client.name] -= count
            raise APIError(
                429, f"{queued} answers of tier '{tier}' wait already: try again later", code="queue_full",
                retry_after=self._retry_after(over),
            )  # fmt: skip

    def leave(
        self, count: int = 1, tier: TierName = "default", ended: int | None = None, client: Client = ANYONE,
        within: Range | None = None,
    ) -> None:  # fmt: skip
        """Answers are not inside any more.

        Args:
            ended: how many of them were written, which says how fast places become free; the others were refused or
                never began. None: all of them.
            within: the range of bits with which they are in `order`.
        """
        if within is not None:
            self.order.leave(tier, within, count)
        self._inside[tier, client.name] -= count
        if self._inside[tier, client.name] <= 0:
            del self._inside[tier, client.name]
        self._left.extend([self._clock()] * (count if ended is None else ended))

    def _retry_after(self, count: int) -> float:
        """Seconds in which `count` answers end at the pace of the last minute, 1 to 60."""
        return min(_MINUTE, max(1.0, self.wait(count) or 0.0))

    def wait(self, count: int) -> float | None:
        """Seconds in which `count` answers end at the pace of the last minute; None when there was none."""
        recent = [t for t in self._left if self._clock() - t < _MINUTE]
        if len(recent) < 2 or recent[-1] == recent[0]:
            return None
        return count * (recent[-1] - recent[0]) / (len(recent) - 1)

    def charge(self, client: Client, tokens: int) -> None:
        """Count a request of so many tokens for its key. Raises APIError when a limit is reached."""
        self.rates.charge(client, tokens)

    def refund(self, client: Client, tokens: int) -> None:
        """Tokens that were charged and not used."""
        self.rates.refund(client, tokens)

    def brownout(self, limits: Limits, tier: TierName = TIER_NAMES[0]) -> float:
        """How far a tier with a floor has sunk to it, 0 to 1: what waits of this tier and of dearer ones presses it, so
        that the cheapest sinks first and furthest."""
        level = TIER_NAMES.index(tier)
        inside = sum(n for (t, _), n in self._inside.items() if TIER_NAMES.index(t) >= level)
        filled = min(1.0, max(0, inside - self.running) / limits.queue)
        return math.ceil(max(0.0, (filled - limits.brownout) / (1 - limits.brownout)) * _STEPS) / _STEPS
