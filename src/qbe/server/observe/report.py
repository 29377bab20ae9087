"""One request when it has ended: what metrics, traces, logs and the console tell of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.records.ledger import UNIT

if TYPE_CHECKING:
    from qbe.server.exchange import Exchange

_ERRORS = {"timeout": "timeout", "shutdown": "shutting_down"}  # by `Exchange.late`
_OPERATIONS = {"chatcmpl-": "chat", "cmpl-": "text_completion", "resp_": "chat", "msg_": "chat"}


@dataclass(frozen=True)
class RequestReport:
    """A request and its answers.

    Attributes:
        id: that the client saw.
        operation: `chat` or `text_completion`.
        ended: seconds since 1970.
        seconds, waited_s, first_s: from its arrival to its end, in the queue (the longest of its answers), and from its
            arrival to the first token of its first answer; None when there was none.
        tokens_by_bits: gear -> tokens computed at it.
        finish: reasons, one for each answer that began.
        joules, energy: what it took, and who says so.
        error: a word for programs, when it failed.
        cache: what the blueprint cache did for its prompts.
        arm: of the rollout that it took part in.
        parent: headers of the trace that it belongs to.
    """

    id: str
    operation: str
    key: str
    tier: str
    model: str
    policy: str
    stream: bool
    n: int
    params: SamplingParams
    ended: float
    seconds: float
    waited_s: float
    first_s: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    weight_bits: float
    kv_bits: float
    tokens_by_bits: Mapping[int, int]
    cost: float
    currency: str
    joules: float
    energy: str
    brownout: float
    finish: tuple[str, ...]
    error: str | None
    cache: tuple[str, ...]
    arm: str | None
    parent: Mapping[str, str]

    def describe(self) -> dict[str, Any]:
        """As a line of a log has it."""
        return {
            "id": self.id, "operation": self.operation, "key": self.key, "tier": self.tier, "policy": self.policy,
            "stream": self.stream, "n": self.n, "seconds": round(self.seconds, 4), "waited_s": round(self.waited_s, 4),
            "first_s": None if self.first_s is None else round(self.first_s, 4), "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens, "completion_tokens": self.completion_tokens,
            "weight_bits": round(self.weight_bits, 3), "kv_bits": round(self.kv_bits, 3),
            "tokens_by_bits": {str(b): n for b, n in sorted(self.tokens_by_bits.items())},
            "cost": round(self.cost, 12), "currency": self.currency, "joules": round(self.joules, 6),
            "energy": self.energy, "brownout": self.brownout,
            "finish": ",".join(self.finish), "error": self.error, "arm": self.arm,
        }  # fmt: skip


def report(exchange: Exchange, model: str) -> RequestReport:
    """Of a request whose jobs are over."""
    asked, now = exchange.asked, time.monotonic()
    accounts = exchange.accounts
    entries = [account.entry() for account in accounts]
    spread: dict[int, int] = {}
    for entry in entries:
        for bits, count in entry.tokens_by_bits.items():
            spread[bits] = spread.get(bits, 0) + count
    weights = [max(1, sum(e.tokens_by_bits.values())) for e in entries]
    results = [r for job in exchange.jobs for r in job.results if r is not None]
    finish = tuple(r.finish_reason for r in results)
    firsts = [a.first_at - exchange.came for a in accounts if a.first_at is not None]
    chosen = [job.choice[1] for job in exchange.jobs]

    # Of answers that would have gone out whole and did not, nothing was booked.
    failed = exchange.late != "latency" and {"error", "cancelled"} & set(finish)
    unpaid = not asked.stream and (failed or any(None in job.results for job in exchange.jobs))
    cost = 0.0 if unpaid else sum(e.cost for e in entries) / UNIT

    def mean(values: list[float]) -> float:
        return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))

    return RequestReport(
        id=exchange.id, operation=_OPERATIONS[asked.prefix], key=asked.client.name, tier=asked.terms.tier, model=model,
        policy=chosen[0].blueprint.policy, stream=asked.stream, n=asked.n, params=asked.params, ended=time.time(),
        seconds=now - exchange.came, waited_s=max((a.waited_s for a in accounts), default=0.0),
        first_s=min(firsts, default=None), prompt_tokens=sum(e.prompt_tokens for e in entries),
        cached_tokens=sum(e.cached_tokens for e in entries),
        completion_tokens=sum(e.completion_tokens for e in entries), weight_bits=mean([e.weight_bits for e in entries]),
        kv_bits=mean([e.kv_bits for e in entries]), tokens_by_bits=spread, cost=cost,
        currency=asked.terms.prices.currency, joules=sum(a.joules for a in accounts),
        energy=entries[0].energy or "", brownout=asked.terms.brownout, finish=finish,
        error="engine_error" if "error" in finish else _ERRORS.get(exchange.late),
        cache=tuple(c.cache for c in chosen if c.cache is not None),
        arm=None if asked.terms.arm is None else asked.terms.arm.name, parent=exchange.parent,
    )  # fmt: skip
