"""Metrics of a rollout, by arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from qbe.server.rollout.arms import ARMS, Arm
from qbe.server.rollout.evidence import METRICS

PHASES = ("progressing", "inconclusive", "paused", "aborted", "successful")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NATS = (0.0001, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BITS = (4.25, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 12.0, 16.0)


class RolloutMetrics:
    """One server's. Threads may share it.

    Args:
        registry: where they are shown.
        model: the label `model_name`.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(name, documentation, ["model_name", *labels], registry=registry)

        def histogram(name: str, documentation: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, documentation, ["model_name", "arm"], registry=registry, buckets=buckets)

        self._weight = gauge("qbe:rollout_weight", "percent of keys or conversations that the candidate answers")
        self._phase = gauge("qbe:rollout_phase", "1 for the phase that the rollout is in", "phase")
        self._value = gauge("qbe:rollout_metric", "what a metric says of an arm; NaN without answers", "metric", "arm")
        self._failed = gauge("qbe:rollout_metric_failed", "1 where the candidate was found to be worse", "metric")
        self._aborts = Counter(
            "qbe:rollout_aborts", "candidates that were aborted", ["model_name", "cause"], registry=registry
        )
        self._answers = Counter(
            "qbe:arm_answers", "answers that ended", ["model_name", "arm", "finished_reason"], registry=registry
        )
        self._refused = Counter(
            "qbe:arm_fallbacks", "requests that the candidate could not be chosen for, served by the stable arm",
            ["model_name"], registry=registry,
        )  # fmt: skip
        self._first = histogram("qbe:arm_time_to_first_token_seconds", "from a request's arrival to its first token")
        self._between = histogram("qbe:arm_inter_token_latency_seconds", "mean of an answer")
        self._kl = histogram("qbe:arm_live_kl", "divergence of a scored answer, nats a token", _NATS)
        self._bits = histogram("qbe:arm_average_weight_bits", "of an answer", _BITS)
        self._weight.labels(model).set(0)
        for phase in PHASES:
            self._phase.labels(model, phase).set(0)

    def answer(self, arm: Arm, finish: str, bits: float, between_s: float | None) -> None:
        """An answer of an arm has ended."""
        self._answers.labels(self._model, arm.name, finish).inc()
        self._bits.labels(self._model, arm.name).observe(bits)
        if between_s is not None:
            self._between.labels(self._model, arm.name).observe(between_s)

    def first(self, arm: Arm, seconds: float) -> None:
        """A request's first token came after so long."""
        self._first.labels(self._model, arm.name).observe(seconds)

    def scored(self, arm: Arm, kl: float) -> None:
        """An answer was scored."""
        self._kl.labels(self._model, arm.name).observe(kl)

    def fell_back(self) -> None:
        """A request could not be served by the candidate."""
        self._refused.labels(self._model).inc()

    def aborted(self, cause: str) -> None:
        """The candidate is off, for this."""
        self._aborts.labels(self._model, cause).inc()

    def looked(self, found: Mapping[str, Any] | None) -> None:
        """How the rollout stands; None: there is none."""
        name, phase = self._model, None if found is None else found["phase"]
        self._weight.labels(name).set(0 if found is None else found["weight"])
        for one in PHASES:
            self._phase.labels(name, one).set(one == phase)
        for metric in METRICS:
            said = {} if found is None else found["metrics"].get(metric, {})
            self._failed.labels(name, metric).set(said.get("outcome") == "failed")
            for arm in ARMS:
                value = said.get(arm)
                self._value.labels(name, metric, arm).set(float("nan") if value is None else value)
