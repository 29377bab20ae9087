"""What the arms of one step have shown, and what follows from it for each metric: successful, failed or inconclusive,
as in Argo Rollouts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qbe.server.rollout.arms import ARMS, ArmName
from qbe.server.rollout.settings import MetricName, Rollout
from qbe.server.rollout.statistics import Looks, least_excess, least_mean, quantile, slower

Outcome = Literal["successful", "failed", "inconclusive"]
Kind = Literal["share", "time", "mean"]
METRICS: tuple[MetricName, ...] = get_args(MetricName)
SCORED: frozenset[MetricName] = frozenset({"live_kl", "top1_agreement", "flip_margin"})
RARE: frozenset[MetricName] = frozenset({"malformed", "failures", "flip_margin"})  # nobody may ask for it, or tell
_BELOW: frozenset[MetricName] = frozenset({"top1_agreement"})


def kind(name: MetricName) -> Kind:
    """How it is compared: a share's excess over the stable arm, times its 95th percentile, or a mean by itself."""
    return "mean" if name in SCORED else "time" if name in ("ttft", "itl") else "share"


@dataclass(frozen=True)
class Finding:
    """What a metric says.

    Attributes:
        values: of each arm that has any: a share, seconds at the 95th percentile, or a mean.
        seen: answers of each arm in its window.
    """

    outcome: Outcome
    values: Mapping[ArmName, float]
    seen: Mapping[ArmName, int]

    def describe(self, limit: float) -> dict[str, Any]:
        """As JSON."""
        return {"outcome": self.outcome, "limit": limit, **{arm: self.values.get(arm) for arm in ARMS},
                "answers": dict(self.seen)}  # fmt: skip


class Evidence:
    """Of one step of one rollout. Not for several threads.

    Args:
        rollout: its settings.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._kept: dict[tuple[MetricName, ArmName], deque[float]] = {
            (name, arm): deque(maxlen=rollout.window) for name in METRICS for arm in ARMS
        }
        self._count: dict[MetricName, int] = dict.fromkeys(METRICS, 0)  # of the candidate's answers
        self._looks = {name: Looks(self._least(name), rollout.window) for name in METRICS}
        self.failed: dict[MetricName, Finding] = {}  # what is once found to be worse stays so

    @property
    def names(self) -> tuple[MetricName, ...]:
        """The metrics that are looked at."""
        return tuple(name for name in METRICS if name not in self._rollout.off)

    def _least(self, name: MetricName) -> int:
        return self._rollout.least_scored if name in SCORED else self._rollout.least

    def limit(self, name: MetricName) -> float:
        """From where on it is too much."""
        found: float = getattr(self._rollout.limits, name)
        return found

    def add(self, arm: ArmName, values: Mapping[MetricName, float]) -> None:
        """One more answer of an arm has shown this."""
        for name, value in values.items():
            self._kept[name, arm].append(value)
            self._count[name] += arm == "candidate"

    def judge(self) -> MetricName | None:
        """Test whatever is due; the metric by which the candidate is found to be worse."""
        for name in self.names:
            level = self._looks[name].take(self._count[name]) if self._enough(name) else None
            if level is not None and self._worse(name, level):
                self.failed[name] = self._found(name, "failed")
        return next(iter(self.failed), None)

    def findings(self) -> dict[MetricName, Finding]:
        """What each metric says now."""
        return {name: self.failed.get(name) or self._found(name, self._outcome(name)) for name in self.names}

    def outcome(self, scores: bool) -> Outcome:
        """What all of them come to: failed by one; successful by all that can be expected to have answers.

        Args:
            scores: whether answers can be scored.
        """
        found = self.findings()
        if self.failed:
            return "failed"
        said = {name for name, finding in found.items() if finding.outcome == "successful"}
        needed = {
            n for n in found
            if (n not in RARE or self._enough(n)) and (n not in SCORED or (scores and self._rollout.sample))
        }  # fmt: skip
        return "successful" if needed <= said else "inconclusive"

    def _arms(self, name: MetricName) -> tuple[ArmName, ...]:
        """Those that a metric needs answers of."""
        return ("candidate",) if kind(name) == "mean" else ARMS

    def _enough(self, name: MetricName) -> bool:
        return all(len(self._kept[name, arm]) >= self._least(name) for arm in self._arms(name))

    def _worse(self, name: MetricName, level: float) -> bool:
        """For sure, at this level."""
        (mine, other), limit = (self._kept[name, arm] for arm in ("candidate", "stable")), self.limit(name)
        if kind(name) == "share":
            return least_excess(sum(mine), len(mine), sum(other), len(other), level) > limit
        if kind(name) == "time":
            return slower(mine, other, limit, level)
        if name in _BELOW:
            return least_mean([-v for v in mine], level) > -limit
        return least_mean(mine, level) > limit

    def _outcome(self, name: MetricName) -> Outcome:
        """Without proof that it is worse: with enough answers, whether its number is within the limit."""
        if not self._enough(name):
            return "inconclusive"
        values, limit = self._values(name), self.limit(name)
        mine = values["candidate"]
        if kind(name) == "share":
            within = mine - values["stable"] <= limit
        elif kind(name) == "time":
            within = mine <= limit * values["stable"]
        else:
            within = mine >= limit if name in _BELOW else mine <= limit
        return "successful" if within else "inconclusive"

    def _found(self, name: MetricName, outcome: Outcome) -> Finding:
        return Finding(outcome, self._values(name), {arm: len(self._kept[name, arm]) for arm in ARMS})

    def _values(self, name: MetricName) -> dict[ArmName, float]:
        kept = {arm: self._kept[name, arm] for arm in ARMS if self._kept[name, arm]}
        return {arm: quantile(v) if kind(name) == "time" else sum(v) / len(v) for arm, v in kept.items()}
