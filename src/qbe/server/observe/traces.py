"""OpenTelemetry traces in the semantic conventions of generative AI, where the standard environment asks for them.

`OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) says where a collector takes OTLP over HTTP; the
other `OTEL_…` variables work as OpenTelemetry has them. A span is one request; it has no prompt and no answer in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from qbe.errors import QBEError
from qbe.server.observe.report import RequestReport
from qbe.version import __version__

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_HEADERS = (b"traceparent", b"tracestate")

parent: ContextVar[Mapping[str, str]] = ContextVar("parent", default={})  # noqa: B039 (it is never changed)


def remember_parent(headers: Mapping[bytes, bytes]) -> None:
    """Keep, for this request, the trace that its headers name."""
    parent.set({name.decode(): headers[name].decode("latin-1") for name in _HEADERS if name in headers})


def start() -> Traces | None:
    """What sends traces; None where nobody asked for them.

    Raises:
        QBEError: they were asked for, but OpenTelemetry is not installed.
    """
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or not any(map(os.environ.get, _ENDPOINTS)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise QBEError(
            "the environment asks for traces (OTEL_EXPORTER_OTLP_ENDPOINT), which need OpenTelemetry: "
            "pip install 'qbe[traces]', or unset it"
        ) from None
    return Traces(BatchSpanProcessor(OTLPSpanExporter()))


class Traces:
    """Makes a span of every request.

    Args:
        processor: OpenTelemetry's, that takes the spans.
    """

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(
            resource=Resource.create({} if named else {"service.name": "qbe"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("qbe", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request(self, report: RequestReport) -> None:
        """A request has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = int(report.ended * 1e9)
        begin = end - int(report.seconds * 1e9)
        span = self._tracer.start_span(
            f"{report.operation} {report.model}", self._propagator.extract(report.parent), SpanKind.SERVER,
            attributes=attributes(report), start_time=begin,
        )  # fmt: skip
        if report.first_s is not None:
            span.add_event("first token", timestamp=begin + int(report.first_s * 1e9))
        if report.error is not None:
            span.set_status(Status(StatusCode.ERROR, report.error))
        span.end(end)

    def close(self, seconds: float) -> None:
        """Send what there is, for so long at most."""
        self._provider.force_flush(int(seconds * 1e3))
        self._provider.shutdown()


def attributes(report: RequestReport) -> dict[str, Any]:
    """A span's attributes: the conventions' names, then `qbe.`."""
    params = report.params
    values: dict[str, Any] = {
        "gen_ai.operation.name": report.operation,
        "gen_ai.provider.name": "qbe",
        "gen_ai.request.model": report.model,
        "gen_ai.request.choice.count": report.n,
        "gen_ai.request.stream": report.stream,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.response.id": report.id,
        "gen_ai.response.model": report.model,
        "gen_ai.response.finish_reasons": list(report.finish),
        "gen_ai.response.time_to_first_chunk": report.first_s,
        "gen_ai.usage.input_tokens": report.prompt_tokens,
        "gen_ai.usage.output_tokens": report.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "openai.response.service_tier": report.tier,
        "openai.response.system_fingerprint": f"qbe-{__version__}",
        "error.type": report.error,
        "qbe.key": report.key,
        "qbe.policy": report.policy,
        "qbe.average_weight_bits": report.weight_bits,
        "qbe.average_kv_bits": report.kv_bits,
        "qbe.cost": report.cost,
        "qbe.currency": report.currency,
        "qbe.joules": report.joules,
        "qbe.energy_source": report.energy,
        "qbe.brownout": report.brownout,
        "qbe.queue_seconds": report.waited_s,
        **{f"qbe.tokens_by_bits.{bits}": count for bits, count in report.tokens_by_bits.items()},
    }
    return {name: value for name, value in values.items() if value is not None}
