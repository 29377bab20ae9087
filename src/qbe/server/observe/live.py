"""Who is served now and what the last minute brought, for the console. Whoever asks sees its own requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qbe.blueprint import Blueprint
from qbe.explain.palette import colour
from qbe.records.ledger import UNIT
from qbe.server.keys import Client
from qbe.server.settings import TIER_NAMES
from qbe.sites import SiteTable

if TYPE_CHECKING:
    from qbe.server.exchange import Exchange

WINDOW_S = 60
_ENDED = 10  # requests that have ended and are still shown
_SCALE = (4, 6, 8, 16)  # bits whose colours the console explains
_STRIPS = 512  # that are remembered


@dataclass
class _Sum:
    """Of a key and tier within a second."""

    tokens: int = 0
    bits: float = 0.0  # times tokens
    joules: float = 0.0
    cost: float = 0.0
    requests: int = 0


@dataclass
class _Second:
    at: int
    sums: dict[tuple[str, str], _Sum] = field(default_factory=dict)


class LiveView:
    """Requests and sums. Threads may share it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._running: dict[str, Exchange] = {}
        self._ended: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_ENDED)
        self._seconds: deque[_Second] = deque()
        self._strips: dict[str, list[tuple[float, str]]] = {}

    def began(self, exchange: Exchange) -> None:
        """A request was taken."""
        self._running[exchange.id] = exchange

    def ended(self, exchange: Exchange, finish: str) -> None:
        """All of its answers have ended."""
        self._end(exchange, finish)
        self._add(exchange.asked.client.name, exchange.asked.terms.tier, _Sum(requests=1))

    def refused(self, exchange: Exchange) -> None:
        """The engine did not take it: it is shown, and is in no sum."""
        self._end(exchange, "refused", {"cost": 0.0})

    def _end(self, exchange: Exchange, state: str, more: dict[str, Any] | None = None) -> None:
        self._running.pop(exchange.id, None)
        self._ended.appendleft((exchange.asked.client.name, self._row(exchange) | {"state": state} | (more or {})))

    def wrote(self, key: str, tier: str, tokens: int, bits: float, joules: float) -> None:
        """Tokens have come, at so many bits on average."""
        self._add(key, tier, _Sum(tokens, bits * tokens, joules))

    def charged(self, key: str, tier: str, cost: float) -> None:
        """So much was booked."""
        self._add(key, tier, _Sum(cost=cost))

    def _add(self, key: str, tier: str, more: _Sum) -> None:
        second = int(self._clock())
        with self._lock:
            if not self._seconds or self._seconds[-1].at != second:
                self._seconds.append(_Second(second))
            while self._seconds[0].at <= second - WINDOW_S:
                self._seconds.popleft()
            sums = self._seconds[-1].sums.setdefault((key, tier), _Sum())
            sums.tokens += more.tokens
            sums.bits += more.bits
            sums.joules += more.joules
            sums.cost += more.cost
            sums.requests += more.requests

    def describe(self, client: Client) -> dict[str, Any]:
        """As JSON: of the last minute for each tier, then the requests, the newest first."""
        everyone = client.key is None or client.key.operator
        now, tiers = int(self._clock()), {tier: _Sum() for tier in TIER_NAMES}
        recent = 0
        with self._lock:
            for second in self._seconds:
                for (key, tier), sums in second.sums.items():
                    if second.at <= now - WINDOW_S or not (everyone or key == client.name):
                        continue
                    total = tiers[tier]  # type: ignore[index]
                    total.tokens += sums.tokens
                    total.bits += sums.bits
                    total.joules += sums.joules
                    total.cost += sums.cost
                    total.requests += sums.requests
                    recent += sums.tokens if now - 5 <= second.at < now else 0
        rows = [
            self._row(e) for e in reversed(self._running.values()) if everyone or e.asked.client.name == client.name
        ]
        rows += [row for key, row in self._ended if everyone or key == client.name]
        return {
            "tokens_per_s": recent / 5,
            "last_minute": {
                tier: {"requests": s.requests, "tokens": s.tokens, "cost": s.cost, "joules": s.joules,
                       "average_weight_bits": s.bits / s.tokens if s.tokens else None} for tier, s in tiers.items()
            },
            "requests": rows, "scale": [(bits, colour(bits)) for bits in _SCALE],
        }  # fmt: skip

    def _row(self, exchange: Exchange) -> dict[str, Any]:
        accounts = [job.account for job in exchange.jobs if job.account is not None]
        begun = any(a.first_at is not None for a in accounts)
        chosen = exchange.jobs[0].choice[1]
        return {
            "id": exchange.id, "key": exchange.asked.client.name, "tier": exchange.asked.terms.tier,
            "state": "running" if begun else "waiting", "seconds": round(time.monotonic() - exchange.came, 2),
            "prompt_tokens": sum(job.choice[1].prompt_tokens for job in exchange.jobs),
            "tokens": sum(sum(a.written) for a in accounts), "average_weight_bits": round(accounts[0].bits, 3),
            "cost": sum(a.cost for a in accounts) / UNIT, "currency": exchange.asked.terms.prices.currency,
            "strip": self._strip(chosen.blueprint, chosen.table),
        }  # fmt: skip

    def _strip(self, blueprint: Blueprint, table: SiteTable) -> list[tuple[float, str]]:
        """Average bits of each layer's weights, then of those outside of layers, with their colours."""
        if blueprint.linear_key not in self._strips:
            if len(self._strips) >= _STRIPS:
                self._strips.clear()
            sums: dict[int | None, list[int]] = {}
            for site, bits in zip(table.nested, blueprint.weight_bits, strict=True):
                total = sums.setdefault(site.layer, [0, 0])
                total[0] += site.parameters * bits
                total[1] += site.parameters
            order = sorted(sums, key=lambda layer: (layer is None, layer or 0))
            means = [sums[layer][0] / sums[layer][1] for layer in order]
            self._strips[blueprint.linear_key] = [(round(m, 2), colour(m)) for m in means]
        return self._strips[blueprint.linear_key]
