"""Prometheus metrics: vLLM's names where they mean the same, `qbe:` for what only this server has."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from qbe.engine.result import Result
from qbe.server.contract import Terms
from qbe.server.worker import Load

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_BITS = (4.25, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 12.0, 16.0)


class Metrics:
    """One server's metrics.

    Args:
        model: the label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self.registry, self._model = CollectorRegistry(), model

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(name, what, registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, what, ["model_name"], registry=self.registry, buckets=buckets)

        self.running = gauge("vllm:num_requests_running", "answers in the batch")
        self.waiting = gauge("vllm:num_requests_waiting", "answers that wait")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "used part of the KV cache's bytes, 0 to 1")
        self.brownout = gauge("qbe:brownout", "how far tiers with a floor have sunk to it, 0 to 1")
        self.settings_ok = gauge("qbe:settings_ok", "1 when the settings file as it is now is in use")
        self.settings_ok.set(1)
        self.prompt = counter("vllm:prompt_tokens", "tokens of prompts")
        self.generated = counter("vllm:generation_tokens", "tokens written")
        self.cached = counter("vllm:prefix_cache_hits", "tokens of prompts that were in the cache")
        self.success = counter("vllm:request_success", "answers that ended", "finished_reason")
        self.first = histogram("vllm:time_to_first_token_seconds", "from the engine to the first token")
        self.per_token = histogram("vllm:request_time_per_output_token_seconds", "mean of an answer after its first")
        self.whole = histogram("vllm:e2e_request_latency_seconds", "from the engine to the last token")
        self.bits = histogram("qbe:average_weight_bits", "of an answer", _BITS)
        self.by_bits = counter("qbe:tokens_by_bits", "computed tokens by the bits of the weights they read", "bits")
        self.by_tier = counter("qbe:requests", "requests that ended", "tier")
        self.cost = counter("qbe:cost", "what was charged", "tier", "currency")
        self.refused = counter("qbe:requests_refused", "requests that got an error", "status", "code")

    def ended(self, result: Result) -> None:
        """An answer has ended."""
        name = self._model
        self.generated.labels(name).inc(len(result.token_ids))
        self.success.labels(name, result.finish_reason).inc()
        self.bits.labels(name).observe(result.average_weight_bits)
        for bits, count in result.tokens_by_bits.items():
            self.by_bits.labels(name, str(bits)).inc(count)
        if result.token_ids:
            self.first.labels(name).observe(result.prefill_ms / 1e3)
            self.whole.labels(name).observe((result.prefill_ms + result.decode_ms) / 1e3)
        if len(result.token_ids) > 1:
            self.per_token.labels(name).observe(result.decode_ms / 1e3 / (len(result.token_ids) - 1))

    def served(self, terms: Terms, first: Result | None) -> None:
        """The answers to a prompt have ended; `first` is one of them, if there is one."""
        name = self._model
        if first is not None:
            self.prompt.labels(name).inc(first.prompt_tokens)
            self.cached.labels(name).inc(first.cached_tokens)
        self.by_tier.labels(name, terms.tier).inc()

    def charged(self, terms: Terms, cost: float) -> None:
        """So much more is in the ledger."""
        self.cost.labels(self._model, terms.tier, terms.prices.currency).inc(max(0.0, cost))

    def text(self, load: Load | None, inside: int, brownout: float) -> bytes:
        """What `/metrics` shows."""
        if load is not None:
            self.running.set(load.running)
            self.waiting.set(max(0, inside - load.running))
            self.kv_usage.set(load.kv_usage)
        self.brownout.set(brownout)
        return generate_latest(self.registry)
