"""Prometheus metrics: vLLM's names where they mean the same, `qbe:` for what only this server has."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from qbe.engine.memory import Memory
from qbe.engine.result import Result
from qbe.server.contract import Terms
from qbe.server.health.metrics import HealthMetrics
from qbe.server.observe.report import RequestReport
from qbe.server.observe.steps import Step
from qbe.server.rollout.metrics import RolloutMetrics
from qbe.server.worker import Load

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(scale * 10**power) for power in range(6) for scale in (1, 2, 5))
_BITS = (4.25, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 12.0, 16.0)


class Metrics:
    """One server's metrics. Threads may share it.

    Args:
        model: the label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self.registry, self._model, self._expert_tokens = CollectorRegistry(), model, 0
        ProcessCollector(registry=self.registry)  # memory, files and processor time, where the system tells

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(name, documentation, ["model_name"], registry=self.registry).labels(model)

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, documentation: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(name, documentation, ["model_name"], registry=self.registry, buckets=buckets).labels(model)

        self.running = gauge("vllm:num_requests_running", "answers in the batch")
        self.waiting = gauge("vllm:num_requests_waiting", "answers that wait")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "used part of the KV cache's bytes, 0 to 1")
        self.brownout = gauge("qbe:brownout", "how far tiers with a floor have sunk to it, 0 to 1")
        self.settings_ok = gauge("qbe:settings_ok", "1 when the settings file as it is now is in use")
        self.settings_ok.set(1)
        self.ledger_ok = gauge("qbe:ledger_ok", "1 when the ledger could be written at the last trial")
        self.prompt = counter("vllm:prompt_tokens", "tokens of prompts")
        self.generated = counter("vllm:generation_tokens", "tokens written")
        self.queried = counter("vllm:prefix_cache_queries", "tokens of prompts that were looked for in the cache")
        self.cached = counter("vllm:prefix_cache_hits", "tokens of prompts that were in the cache")
        self.drafted = counter("vllm:spec_decode_num_draft_tokens", "draft tokens that were verified")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "draft tokens that were accepted")
        self.preempted = counter("vllm:num_preemptions", "answers that gave their pages up and waited again")
        self.success = counter("vllm:request_success", "answers that ended", "finished_reason")
        self.first = histogram("vllm:time_to_first_token_seconds", "from a request's arrival to its first token")
        self.between = histogram("vllm:inter_token_latency_seconds", "between two tokens of an answer")
        self.per_token = histogram("vllm:request_time_per_output_token_seconds", "mean of an answer after its first")
        self.whole = histogram("vllm:e2e_request_latency_seconds", "from a request's arrival to its last token")
        self.queued = histogram("vllm:request_queue_time_seconds", "of an answer, from the engine to its first step")
        self.prefill = histogram("vllm:request_prefill_time_seconds", "of an answer, from its first step to its token")
        self.decode = histogram("vllm:request_decode_time_seconds", "of an answer, from its first token to its last")
        self.inference = histogram("vllm:request_inference_time_seconds", "of an answer, from its first step on")
        self.prompt_size = histogram("vllm:request_prompt_tokens", "of a request", _TOKENS)
        self.answer_size = histogram("vllm:request_generation_tokens", "of an answer", _TOKENS)
        self.params_n = histogram("vllm:request_params_n", "answers that a request asked for", _TOKENS[:8])
        self.params_tokens = histogram("vllm:request_params_max_tokens", "tokens that a request asked for", _TOKENS)
        self.iteration = histogram("vllm:iteration_tokens_total", "tokens of a step", _TOKENS)
        self.bits = histogram("qbe:average_weight_bits", "of an answer", _BITS)
        self.read_bits = histogram("qbe:read_weight_bits", "of an answer, as its steps read them", _BITS)
        self.misses = counter("qbe:precision_misses", "times that a token asked a site for more than was on the device")
        self.kv_bits = histogram("qbe:average_kv_bits", "of an answer", (2, 3, *_BITS))
        self.by_bits = counter("qbe:tokens_by_bits", "computed tokens by the bits of the weights they read", "bits")
        self.weight_bytes = counter("qbe:weight_bytes", "bytes of weights that steps read, each at its highest row")
        self.slice_bytes = counter("qbe:slice_bytes_fetched", "bytes of slices that came to the device behind")
        self.switches = counter("qbe:blueprint_switches", "steps whose rows had other blueprints than the step before")
        self.blueprints = counter("qbe:blueprint_cache", "blueprints that were asked of the cache", "result")
        self.by_tier = counter("qbe:requests", "requests that ended", "tier")
        self.cost = counter("qbe:cost", "what was charged", "tier", "currency")
        self.joules = counter("qbe:joules", "of requests, by tier and by who says so", "tier", "source")
        self.joules_by_bits = counter("qbe:joules_by_bits", "of requests, by their average bits", "bits", "source")
        self.tokens_by_bits = counter("qbe:joules_by_bits_tokens", "computed tokens of these", "bits", "source")
        self.watts = Gauge("qbe:power_watts", "while steps run", ["model_name", "source"], registry=self.registry)
        self.memory = Gauge(
            "qbe:memory_bytes", "of weights, originals, KV cache, recurrent states, graphs and workspace",
            ["model_name", "use"], registry=self.registry,
        )  # fmt: skip
        self.shift = gauge("qbe:energy_shift", "of the default tier: -1 at its floor, 1 at its high end")
        self.intensity = gauge("qbe:carbon_intensity", "grams of CO2 a kilowatt-hour; NaN when unknown")
        # Nothing is shown of these without experts; one label for each of thousands would be too many.
        self.expert_tokens = counter("qbe:expert_tokens", "tokens whose experts were counted")
        self.expert_top = Gauge(
            "qbe:expert_top_tenth", "share of choices, since the start, on the tenth of a layer's experts used most",
            ["model_name"], registry=self.registry,
        )  # fmt: skip
        self.expert_moved = Gauge(
            "qbe:expert_use_moved", "share of choices, since the start, on other experts than the store expects",
            ["model_name"], registry=self.registry,
        )  # fmt: skip
        self.health = HealthMetrics(self.registry, model)
        self.rollout = RolloutMetrics(self.registry, model)
        self.refused = counter("qbe:requests_refused", "requests that got an error", "status", "code")

    def took(self, memory: Memory) -> None:
        """There is an engine of these bytes."""
        for use, size in memory.describe().items():
            if use != "total":
                self.memory.labels(self._model, use).set(size)

    def step(self, step: Step) -> None:
        """The engine has run a step."""
        name = self._model
        self.iteration.observe(step.tokens)
        self.weight_bytes.labels(name).inc(step.weight_bytes)
        self.slice_bytes.labels(name).inc(step.fetched_bytes)
        self.preempted.labels(name).inc(step.preempted)
        self.switches.labels(name).inc(step.switched)

    def written(self, tokens: int, seconds: float) -> None:
        """Tokens have come after the first, each so long after the one before."""
        for _ in range(tokens):
            self.between.observe(seconds)

    def charged(self, terms: Terms, cost: float) -> None:
        """So much more is in the ledger."""
        self.cost.labels(self._model, terms.tier, terms.prices.currency).inc(max(0.0, cost))

    def answer(self, result: Result, waited_s: float) -> None:
        """An answer has ended."""
        name, tokens = self._model, len(result.token_ids)
        self.generated.labels(name).inc(tokens)
        self.drafted.labels(name).inc(result.drafted_tokens)
        self.accepted.labels(name).inc(result.accepted_tokens)
        self.success.labels(name, result.finish_reason).inc()
        self.bits.observe(result.average_weight_bits)
        self.read_bits.observe(result.read_weight_bits)
        self.misses.labels(name).inc(result.misses)
        self.kv_bits.observe(result.average_kv_bits)
        self.answer_size.observe(tokens)
        for bits, count in result.tokens_by_bits.items():
            self.by_bits.labels(name, str(bits)).inc(count)
        self.queued.observe(waited_s)
        if tokens:
            prefill, decode = max(0.0, result.prefill_ms / 1e3 - waited_s), result.decode_ms / 1e3
            self.prefill.observe(prefill)
            self.decode.observe(decode)
            self.inference.observe(prefill + decode)
        if tokens > 1:
            self.per_token.observe(result.decode_ms / 1e3 / (tokens - 1))

    def request(self, report: RequestReport) -> None:
        """A request has ended."""
        name = self._model
        self.prompt.labels(name).inc(report.prompt_tokens)
        self.queried.labels(name).inc(report.prompt_tokens)
        self.cached.labels(name).inc(report.cached_tokens)
        self.by_tier.labels(name, report.tier).inc()
        self.prompt_size.observe(report.prompt_tokens)
        self.params_n.observe(report.n)
        self.params_tokens.observe(report.params.max_tokens)
        self.joules.labels(name, report.tier, report.energy).inc(report.joules)
        bits = f"{round(2 * report.weight_bits) / 2:g}"
        self.joules_by_bits.labels(name, bits, report.energy).inc(report.joules)
        self.tokens_by_bits.labels(name, bits, report.energy).inc(sum(report.tokens_by_bits.values()))
        for result in report.cache:
            self.blueprints.labels(name, result).inc()
        if report.first_s is not None:
            self.first.observe(report.first_s)
            self.whole.observe(report.seconds)

    def energy(self, watts: float, source: str, shift: float, intensity: float | None) -> None:
        """Power and what it is budgeted by."""
        self.watts.clear()
        self.watts.labels(self._model, source).set(watts)
        self.shift.set(shift)
        self.intensity.set(float("nan") if intensity is None else intensity)

    def experts(self, tokens: int, top_tenth: float, moved: float) -> None:
        """How experts are used, since the start."""
        self.expert_tokens.labels(self._model).inc(max(0, tokens - self._expert_tokens))
        self._expert_tokens = tokens
        self.expert_top.labels(self._model).set(top_tenth)
        self.expert_moved.labels(self._model).set(moved)

    def text(self, load: Load | None, inside: int, brownout: float) -> bytes:
        """What `/metrics` shows."""
        if load is not None:
            self.running.set(load.running)
            self.waiting.set(max(0, inside - load.running))
            self.kv_usage.set(load.kv_usage)
        self.brownout.set(brownout)
        return generate_latest(self.registry)
