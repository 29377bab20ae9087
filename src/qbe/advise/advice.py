"""Which bound is broken most, why, and the lowest rung that is enough."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qbe.advise.observed import Observed
from qbe.advise.rungs import RUNGS, Kind, Prediction, Rung
from qbe.advise.slo import SLO

Outcome = Literal["holds", "advice", "nothing is enough", "raise precision", "unknown"]
_WAITS = 0.5  # part of the time to the first token that is waiting, from where on that is the bottleneck


@dataclass(frozen=True)
class Bound:
    """One bound of the objective. `value` is None where nothing was counted of it."""

    name: str
    value: float | None
    limit: float

    @property
    def excess(self) -> float:
        """How many times the limit is exceeded; 1 and less: it holds. A success rate must not be below."""
        if self.value is None:
            return 0.0
        if self.name == "success_rate":
            return self.limit / self.value if self.value else float("inf")
        return self.value / self.limit


@dataclass(frozen=True)
class Considered:
    """A rung that helps, or not: `enough`, `not enough`, `unknown`, `in use`, `no help`, `QBE cannot`."""

    rung: str
    verdict: str
    predicted: Prediction | None = None


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        outcome: what it comes to.
        bounds: all that were given.
        bottleneck: the bound that is broken most, and what it consists in; "" where all hold.
        line: all of it in one sentence.
        rung, do, suite: what is proposed, how it is set, and what must pass first; "" where nothing is.
        considered: every rung, in order.
    """

    outcome: Outcome
    bounds: tuple[Bound, ...]
    bottleneck: str
    line: str
    rung: str = ""
    do: str = ""
    suite: str = ""
    considered: tuple[Considered, ...] = ()

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        bounds = [
            {**asdict(b), "value": None if b.value == math.inf else b.value, "holds": b.excess <= 1}
            for b in self.bounds
        ]  # with no success at all a success costs what JSON has no number for
        return {**asdict(self), "bounds": bounds}


def advise(seen: Observed, slo: SLO) -> Advice:
    """The advice for a server that was seen so."""
    bounds = tuple(_bounds(seen, slo))
    worst = max(bounds, key=lambda b: b.excess)
    if worst.excess <= 1:
        missing = [b.name for b in bounds if b.value is None]
        if missing:
            return Advice("unknown", bounds, "", f"nothing was counted of {', '.join(missing)} yet: let it serve first")
        return Advice("holds", bounds, "", "the objective holds: change nothing")
    if worst.name in ("live_kl", "success_rate"):
        return _raise(seen, bounds, worst, worst.name)
    if worst.name == "cost_per_success" and (not seen.succeeded or seen.cost <= worst.limit * seen.rated):
        return _raise(seen, bounds, worst, "failures")  # were all of them successes, the price would do
    return _lower(seen, bounds, worst, _kind(seen, worst))


def _bounds(seen: Observed, slo: SLO) -> list[Bound]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    values = {
        "ttft_ms": ms(seen.ttft_s), "itl_ms": ms(seen.itl_s),
        "memory_gb": sum(seen.memory.values()) / 1e9 if seen.memory else None,
        "cost_per_success": (seen.cost / seen.succeeded if seen.succeeded else float("inf")) if seen.rated else None,
        "success_rate": seen.succeeded / seen.rated if seen.rated else None, "live_kl": seen.live_kl,
    }  # fmt: skip
    return [Bound(n, value, getattr(slo, n)) for n, value in values.items() if getattr(slo, n) is not None]


def _kind(seen: Observed, bound: Bound) -> Kind:
    if bound.name == "ttft_ms":
        waits = seen.queue_s is not None and seen.queue_s >= _WAITS * (seen.ttft_s or 0.0)
        return "queue" if waits else "prefill"
    kinds: dict[str, Kind] = {"itl_ms": "itl", "memory_gb": "memory", "cost_per_success": "cost"}
    return kinds[bound.name]


_UNITS = {"queue": 1e3, "prefill": 1e3, "itl": 1e3, "memory": 1e-9, "cost": 1.0}


def _lower(seen: Observed, bounds: tuple[Bound, ...], bound: Bound, kind: Kind) -> Advice:
    assert bound.value is not None
    unit = _UNITS[kind]
    considered = tuple(_consider(rung, seen, kind, bound.value / unit, bound.limit / unit) for rung in RUNGS)
    bottleneck = f"{bound.name} ({kind})" if kind in ("queue", "prefill") else bound.name
    broken = f"{bound.name} is {bound.value:.4g}, {bound.excess:.2g} times what is allowed"
    chosen = next((c for c in considered if c.verdict == "enough"), None)
    perhaps = next((c for c in considered if c.verdict == "unknown"), None)
    found = chosen or perhaps
    if found is None:
        line = f"{broken}, and no rung that QBE has is enough: add devices or replicas, or loosen the bound"
        return Advice("nothing is enough", bounds, bottleneck, line, considered=considered)
    rung = next(r for r in RUNGS if r.name == found.rung)
    after = found.predicted.value if found.predicted is not None else None
    at_best = "what it brings nothing measured tells" if after is None else f"at best {after * unit:.4g}"
    line = f"{broken}: {rung.name} ({at_best})"
    if chosen is not None and perhaps is not None and considered.index(perhaps) < considered.index(chosen):
        line += f"; before it try {perhaps.rung}, which costs less and which nothing measured tells of"
    return Advice("advice", bounds, bottleneck, line, rung.name, rung.do, rung.suite, considered)


def _consider(rung: Rung, seen: Observed, kind: Kind, value: float, limit: float) -> Considered:
    if not rung.can:
        return Considered(rung.name, "QBE cannot")
    if rung.in_use(seen, kind):
        return Considered(rung.name, "in use")
    predicted = rung.predict(seen, kind, value)
    if predicted is None:
        return Considered(rung.name, "no help")
    if predicted.value is None:
        return Considered(rung.name, "unknown", predicted)
    return Considered(rung.name, "enough" if predicted.value <= limit else "not enough", predicted)


def _raise(seen: Observed, bounds: tuple[Bound, ...], bound: Bound, why: str) -> Advice:
    """Answers are not good enough: the highest rung that changes them is to be taken back."""
    changing = [r for r in RUNGS if r.name in ("8-bit native", "KV cache", "4 bits") and r.in_use(seen, "itl")]
    said = f"{bound.name} is {bound.value:.4g} where {bound.limit:.4g} is allowed"
    said += ", because answers fail" if why == "failures" else ""
    if not changing:
        line = f"{said}, and no rung is in use that could be the cause: look at prompts and model, not at precision"
        return Advice("raise precision", bounds, bound.name, line)
    line = f"{said}: go back from {changing[-1].name}; fewer bits cost more here"
    return Advice(
        "raise precision", bounds, bound.name, line, changing[-1].name, f"undo: {changing[-1].do}", changing[-1].suite
    )
