"""Sums of the last moments, by key and tier, for the console."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass


@dataclass
class Sum:
    """Of a key and tier within a period. `bits` is summed over tokens."""

    tokens: int = 0
    bits: float = 0.0
    joules: float = 0.0
    cost: float = 0.0
    requests: int = 0

    def add(self, more: Sum) -> None:
        """So much more."""
        for name, value in vars(more).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def average_bits(self) -> float | None:
        """Of a token; None without tokens."""
        return self.bits / self.tokens if self.tokens else None


class Recent:
    """The last periods. Threads may share it.

    Args:
        clock: seconds.
        period_s: length of a period.
        periods: how many are kept, the one that runs among them.
    """

    def __init__(self, clock: Callable[[], float], period_s: int, periods: int) -> None:
        self._clock, self._period_s, self._periods = clock, period_s, periods
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, dict[tuple[str, str], Sum]]] = deque()

    def add(self, key: str, tier: str, more: Sum) -> None:
        """So much more, now."""
        now = self._now()
        with self._lock:
            if not self._kept or self._kept[-1][0] != now:
                self._kept.append((now, {}))
            while self._kept[0][0] <= now - self._periods:
                self._kept.popleft()
            self._kept[-1][1].setdefault((key, tier), Sum()).add(more)

    def read(self, key: str | None = None) -> Iterator[tuple[int, str, str, Sum]]:
        """How many periods ago (0: the one that runs), key, tier and sum; of one key or, with None, of all."""
        now = self._now()
        with self._lock:
            copies = [
                (now - at, name, tier, Sum(*astuple(total)))
                for at, sums in self._kept if at > now - self._periods
                for (name, tier), total in sums.items() if key in (None, name)
            ]  # fmt: skip
        yield from copies

    def _now(self) -> int:
        return int(self._clock() // self._period_s)
