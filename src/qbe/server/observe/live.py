"""Who is served now and what the last hour brought, for the console. Whoever asks sees its own requests."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qbe.blueprint import Blueprint
from qbe.explain.palette import colour
from qbe.records.ledger import UNIT
from qbe.server.keys import Client
from qbe.server.observe.recent import Recent, Sum
from qbe.server.settings import TIER_NAMES
from qbe.sites import SiteTable

if TYPE_CHECKING:
    from qbe.server.exchange import Exchange

_MINUTES = 60  # of the history
_ENDED = 200  # requests that have ended and are remembered
_SHOWN = 30  # of them, to one client
_REFUSALS_MIN = 5  # minutes that refusals are told for
_SCALE = (4, 6, 8, 16)  # bits whose colours the console explains
_STRIPS = 512  # that are remembered


class LiveView:
    """Requests and sums. Threads may share it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._minutes = Recent(clock, 1, 60), Recent(clock, 60, _MINUTES)
        self._refusals = Recent(clock, 60, _REFUSALS_MIN)
        self._running: dict[str, Exchange] = {}
        self._ended: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_ENDED)
        self._strips: dict[str, list[tuple[float, str]]] = {}

    def began(self, exchange: Exchange) -> None:
        """A request was taken."""
        self._running[exchange.id] = exchange

    def ended(self, exchange: Exchange, finish: str) -> None:
        """All of its answers have ended."""
        self._end(exchange, finish)
        self._add(exchange.asked.client.name, exchange.asked.terms.tier, Sum(requests=1))

    def refused(self, exchange: Exchange) -> None:
        """The engine did not take it: it is shown, and is in no sum."""
        self._end(exchange, "refused", {"cost": 0.0})

    def _end(self, exchange: Exchange, state: str, more: dict[str, Any] | None = None) -> None:
        self._running.pop(exchange.id, None)
        self._ended.appendleft(
            (exchange.asked.client.name, self._row(exchange) | {"state": state, "ended": time.time()} | (more or {}))
        )

    def wrote(self, key: str, tier: str, tokens: int, bits: float, joules: float) -> None:
        """Tokens have come, at so many bits on average."""
        self._add(key, tier, Sum(tokens, bits * tokens, joules))

    def charged(self, key: str, tier: str, cost: float) -> None:
        """So much was booked."""
        self._add(key, tier, Sum(cost=cost))

    def turned_away(self, status: int, code: str | None) -> None:
        """A request got an error as its answer."""
        self._refusals.add(code or str(status), "", Sum(requests=1))

    def refusals(self) -> dict[str, int]:
        """Of the last five minutes, by code, the most frequent first."""
        codes: Counter[str] = Counter()
        for _, code, _, total in self._refusals.read():
            codes[code] += total.requests
        return dict(codes.most_common())

    def _add(self, key: str, tier: str, more: Sum) -> None:
        self._seconds.add(key, tier, more)
        self._minutes.add(key, tier, more)

    def describe(self, client: Client) -> dict[str, Any]:
        """As JSON: of the last minute for each tier, of the last hour for each minute, then the requests, the newest
        first."""
        key = None if client.oversees else client.name
        tiers, recent = {tier: Sum() for tier in TIER_NAMES}, 0
        for age, _, tier, total in self._seconds.read(key):
            tiers[tier].add(total)  # type: ignore[index]
            recent += total.tokens if 1 <= age <= 5 else 0
        history = [{tier: 0 for tier in TIER_NAMES} | {"cost": 0.0, "requests": 0} for _ in range(_MINUTES)]
        for age, _, tier, total in self._minutes.read(key):
            minute = history[_MINUTES - 1 - age]
            minute[tier] += total.tokens
            minute["cost"] += total.cost
            minute["requests"] += total.requests
        rows = [self._row(e) for e in reversed(self._running.values()) if key in (None, e.asked.client.name)]
        rows += [row for name, row in self._ended if key in (None, name)][:_SHOWN]
        return {
            "tokens_per_s": recent / 5,
            "last_minute": {
                tier: {"requests": s.requests, "tokens": s.tokens, "cost": s.cost, "joules": s.joules,
                       "average_weight_bits": s.average_bits} for tier, s in tiers.items()
            },
            "history": history, "requests": rows, "scale": [(bits, colour(bits)) for bits in _SCALE],
        }  # fmt: skip

    def _row(self, exchange: Exchange) -> dict[str, Any]:
        accounts = [job.account for job in exchange.jobs if job.account is not None]
        begun = any(a.first_at is not None for a in accounts)
        chosen = exchange.jobs[0].choice[1]
        return {
            "id": exchange.id, "key": exchange.asked.client.name, "tier": exchange.asked.terms.tier,
            "state": "running" if begun else "waiting", "seconds": round(time.monotonic() - exchange.came, 2),
            "ended": None,
            "prompt_tokens": sum(job.choice[1].prompt_tokens for job in exchange.jobs),
            "tokens": sum(sum(a.written) for a in accounts), "average_weight_bits": round(accounts[0].bits, 3),
            "cost": sum(a.cost for a in accounts) / UNIT, "currency": exchange.asked.terms.prices.currency,
            "strip": self._strip(chosen.blueprint, chosen.table),
            "arm": None if exchange.asked.terms.arm is None else exchange.asked.terms.arm.name,
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
