"""What keys have used today and this month, and whether a request fits into what they may use.

Sums begin with what the ledger has and go on with what is booked. A request counts with the most that it may come to
until it has ended, so that many at once do not exceed a budget together.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from qbe.records.ledger import UNIT, Ledger
from qbe.server.errors import APIError
from qbe.server.keys import Client


@dataclass(frozen=True)
class Use:
    """Tokens of prompts and answers, and what they cost in the ledger's units."""

    tokens: int = 0
    cost: int = 0


class Quotas:
    """Sums by key. Threads may share it.

    Args:
        clock: the time, UTC.
    """

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._used: Counter[tuple[str, str, str]] = Counter()  # of a period, a key, a unit
        self._reserved: Counter[tuple[str, str]] = Counter()

    def load(self, ledger: Ledger) -> None:
        """Begin with what is booked. Raises QBEError where the ledger cannot be read."""
        used: Counter[tuple[str, str, str]] = Counter()
        for period, since in self._periods().items():
            for key, tokens, cost in ledger.used(since.isoformat(timespec="milliseconds")):
                used[period, key, "tokens"], used[period, key, "cost"] = tokens, cost
        with self._lock:
            self._used = used

    def add(self, key: str, use: Use) -> None:
        """So much more was booked."""
        with self._lock:
            periods = self._periods()
            for old in [k for k in self._used if k[0] not in periods]:
                del self._used[old]
            for period in periods:
                self._used[period, key, "tokens"] += use.tokens
                self._used[period, key, "cost"] += use.cost

    def reserve(self, client: Client, use: Use) -> None:
        """Count the most that a request may come to; `release` it when it has ended.

        Raises:
            APIError: that is more than the key has left.
        """
        with self._lock:
            for (period, since), name in zip(self._periods().items(), ("day", "month"), strict=True):
                for unit, more in (("tokens", use.tokens), ("cost", use.cost)):
                    most = getattr(client.key, f"{unit}_per_{name}", None)
                    if most is None:
                        continue
                    scale = UNIT if unit == "cost" else 1
                    left = most - (self._used[period, client.name, unit] + self._reserved[client.name, unit]) / scale
                    if more / scale > left:
                        raise self._over(name, since, unit, most, left, more / scale)
            self._change(client, use, 1)

    def release(self, client: Client, use: Use) -> None:
        """It has ended, and what it came to is booked or was not charged."""
        with self._lock:
            self._change(client, use, -1)

    def _change(self, client: Client, use: Use, sign: int) -> None:
        self._reserved[client.name, "tokens"] += sign * use.tokens
        self._reserved[client.name, "cost"] += sign * use.cost

    def _over(self, name: str, since: datetime, unit: str, most: float, left: float, more: float) -> APIError:
        allowed = f"{most:g} tokens" if unit == "tokens" else f"{most:g} in cost"
        next_one = (since + timedelta(days=1 if name == "day" else 32)).replace(hour=0, minute=0, second=0)
        next_one = next_one if name == "day" else next_one.replace(day=1)
        return APIError(
            429, f"this key may use {allowed} a {name} (UTC): {max(0.0, left):.6g} are left, and this request may take "
            f"{more:.6g}: lower max_tokens, or wait", code="insufficient_quota",
            retry_after=(next_one - self._clock()).total_seconds(),
        )  # fmt: skip

    def _periods(self) -> dict[str, datetime]:
        """Today and this month, with when they began."""
        day = self._clock().replace(hour=0, minute=0, second=0, microsecond=0)
        return {day.strftime("%Y-%m-%d"): day, day.strftime("%Y-%m"): day.replace(day=1)}
