"""Metrics of live quality, detectors and the ladder."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from qbe.server.health.ladder import Change, Ladder
from qbe.server.health.scorer import ScoredAnswer
from qbe.server.health.settings import DetectorName
from qbe.server.health.syndromes import DETECTORS, LADDER
from qbe.server.health.windows import Reading

_NATS = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class HealthMetrics:
    """One server's. Threads may share it.

    Args:
        registry: where they are shown.
        model: the label `model_name`.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model, by = model, ["model_name", "tier", "prompt_class"]

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, ["model_name", *labels], registry=registry)

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(name, documentation, ["model_name", *labels], registry=registry)

        self._kl = Histogram(
            "qbe:live_kl", "divergence of a scored answer from the widest gear, nats a token", by, buckets=_NATS,
            registry=registry,
        )  # fmt: skip
        self._tokens = counter("qbe:scored_tokens", "tokens of answers that were scored", "tier", "prompt_class")
        self._nats = counter("qbe:scored_kl_nats", "their divergence, summed", "tier", "prompt_class")
        self._agreed = counter("qbe:scored_tokens_agreed", "those whose likeliest is the same", "tier", "prompt_class")
        self._margins = counter("qbe:scored_flip_margin_nats", "margins of the others, summed", "tier", "prompt_class")
        self._reference = gauge("qbe:scored_reference_bits", "of the widest gear that scores")
        self._not_scored = counter("qbe:answers_not_scored", "answers that were drawn and not scored", "why")
        self._seconds = counter("qbe:scoring_seconds", "that steps of scoring took")
        self._value = gauge("qbe:detector", "what a detector says; NaN while it has seen too little", "detector")
        self._tripped = gauge("qbe:detector_tripped", "1 beyond its threshold", "detector")
        self._action = gauge("qbe:health_action", "1 while the ladder's action is in force", "action")
        self._actions = counter("qbe:health_actions", "actions that were taken", "action", "cause")
        self._exhausted = gauge("qbe:health_exhausted", "1 where the highest rung does not help")
        self._rated = counter("qbe:feedback", "requests that clients told of", "tier", "outcome")
        self._retries = counter("qbe:feedback_retries", "retries that they told of", "tier")
        self._cost = counter("qbe:feedback_cost", "cost of rated requests", "tier", "currency")
        for action in LADDER:
            self._action.labels(model, action).set(0)
        self._exhausted.labels(model).set(0)

    def scored(self, answer: ScoredAnswer) -> None:
        """An answer was scored."""
        labels, score = (self._model, answer.tier, answer.prompt_class), answer.score
        self._kl.labels(*labels).observe(score.kl)
        self._tokens.labels(*labels).inc(score.tokens)
        self._nats.labels(*labels).inc(score.kl * score.tokens)
        agreed = round(score.top1 * score.tokens)
        self._agreed.labels(*labels).inc(agreed)
        self._margins.labels(*labels).inc(max(0.0, score.flip_margin or 0.0) * (score.tokens - agreed))
        self._reference.labels(self._model).set(score.reference_bits)

    def not_scored(self, why: str) -> None:
        """One was drawn, and left out."""
        self._not_scored.labels(self._model, why).inc()

    def scoring(self, seconds: float) -> None:
        """A step of scoring took so long."""
        self._seconds.labels(self._model).inc(seconds)

    def looked(
        self, readings: Mapping[DetectorName, Reading], ladder: Ladder, change: Change | None, aborted: bool
    ) -> None:
        """The detectors say this, and the ladder has done that.

        Args:
            aborted: whether a candidate is off.
        """
        name = self._model
        for detector in DETECTORS:
            value = readings[detector].value if detector in readings else None  # else it is off
            self._value.labels(name, detector).set(float("nan") if value is None else value)
            self._tripped.labels(name, detector).set(detector in ladder.tripped)
        for action in LADDER:
            self._action.labels(name, action).set(aborted if action == "arm_aborted" else action in ladder.taken)
        self._exhausted.labels(name).set(ladder.exhausted)
        if change is not None and change.taken:
            self._actions.labels(name, change.action, change.cause).inc()

    def rated(self, tier: str, failed: bool | None, retries: int, cost: float, currency: str) -> None:
        """A client has told of a request."""
        outcome = "unrated" if failed is None else "failure" if failed else "success"
        self._rated.labels(self._model, tier, outcome).inc()
        self._retries.labels(self._model, tier).inc(retries)
        if failed is not None:
            self._cost.labels(self._model, tier, currency).inc(max(0.0, cost))
