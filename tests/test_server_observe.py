"""What a server says about itself: metrics, the dashboard that reads them, traces, logs."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qbe.blueprint import Blueprint
from qbe.errors import QBEError
from qbe.server.observe import traces
from qbe.server.observe.logs import Lines
from qbe.server.observe.metrics import Metrics
from qbe.server.observe.steps import bytes_of_step
from server_running import Running, running, tiny_engine, until

SECRET = "the prompt that nobody shall read"
MONITORING = Path(__file__).parents[1] / "deploy/helm/qbe/files"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text("[prices]\noutput = 1.0\n")
    with running(tiny_engine, config) as found:
        yield found


def ask(server: Running, **body: Any) -> Any:
    answer = server.post("completions", {"prompt": SECRET, "max_tokens": 6, "ignore_eos": True} | body)
    assert answer.status_code == 200, answer.text
    return answer


def samples(server: Running) -> dict[str, float]:
    """Sums over all labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_metrics_count_what_was_done(server: Running) -> None:
    before = samples(server)
    ask(server, n=2, qbe={"bits": 4})
    ask(server, stream=True, qbe={"bits": 8})
    until(lambda: samples(server)["qbe:requests_total"] == before.get("qbe:requests_total", 0) + 2, "both are counted")
    after = samples(server)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    prompt = len(SECRET)
    assert more("vllm:prompt_tokens_total") == more("vllm:prefix_cache_queries_total") == 2 * prompt
    assert more("vllm:generation_tokens_total") == 3 * 6
    assert more("vllm:request_success_total") == more("vllm:request_queue_time_seconds_count") == 3
    assert more("vllm:time_to_first_token_seconds_count") == more("vllm:e2e_request_latency_seconds_count") == 2
    assert more("vllm:inter_token_latency_seconds_count") == 3 * 5
    assert more("vllm:request_params_n_sum") == 3
    assert more("vllm:request_params_max_tokens_sum") == 12
    # A twin computes the last token of the prompt again; of an answer's tokens the last is not computed.
    assert more("vllm:iteration_tokens_total_sum") == pytest.approx(2 * prompt + 3 * 5, abs=2 * 32)
    steps = more("vllm:iteration_tokens_total_count")
    assert 12 <= steps <= 30
    assert 2 <= more("qbe:blueprint_switches_total") <= steps
    tiny = sum(s.parameters for s in server.engine.table.nested)
    assert more("qbe:weight_bytes_total") >= steps * tiny / 2  # 4 bits a weight at least
    assert more("qbe:average_weight_bits_sum") == 4 + 4 + 8
    assert more("qbe:average_kv_bits_sum") == 3 * 16
    assert more("qbe:cost_total") == pytest.approx((12 * 4 + 6 * 8) / 16 / 1e6)
    assert sum(more(n) for n in after if n.startswith("qbe:tokens_by_bits_total")) >= 2 * prompt


def test_waiting_ends_where_the_first_step_begins(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = server.engine.core.step
    monkeypatch.setattr(server.engine.core, "step", lambda: (time.sleep(0.3), step())[1])
    before = samples(server)
    ask(server, max_tokens=1)
    until(lambda: samples(server)["qbe:requests_total"] > before["qbe:requests_total"], "it is counted")
    after = samples(server)
    waited, prefill = (
        after[n] - before[n] for n in ("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum")
    )
    assert prefill >= 0.3 > waited  # the step is no part of the wait


def test_a_step_reads_each_site_at_its_highest_row(server: Running) -> None:
    table = server.engine.table
    low, high = (Blueprint.of("x", table, (bits,) * len(table.nested)) for bits in (4, 8))
    mixed = Blueprint.of("x", table, [4, 8] * (len(table.nested) // 2) + [4] * (len(table.nested) % 2))
    assert bytes_of_step(table, [low]) == low.bytes_per_token(table)
    assert bytes_of_step(table, [low, mixed]) == mixed.bytes_per_token(table)
    assert bytes_of_step(table, [low, mixed, high]) == high.bytes_per_token(table)


def test_the_dashboard_shows_what_there_is(server: Running) -> None:
    """Every metric in it exists, with the labels it asks for."""
    ask(server)
    server.post("completions", {"prompt": ""})
    known: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        known.setdefault(family.name, set())
        known.setdefault(f"{family.name}_total", set())
        if family.type == "histogram":  # without a rollout nothing is observed of its arms
            known |= {f"{family.name}_{part}": set() for part in ("sum", "count", "bucket")}
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    assert len(asked) > 20
    for expression in asked:
        names = re.findall(r"(?:vllm|qbe):[a-z_0-9]+", expression)
        assert names
        for name in names:
            assert name in known, expression
            labels = set(re.findall(r"by \(([^)]*)\)", expression)[0].split(", ")) if " by (" in expression else set()
            assert labels <= known[name] or not known[name], expression
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]}) == len(dashboard["panels"])


class Collector(HTTPServer):
    """Takes traces as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                collector.bodies.append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_traces_reach_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: Any = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    service: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    try:
        with running(tiny_engine, traces=traces.start()) as server:
            parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            answer = server.post("completions", {"prompt": SECRET, "max_tokens": 4, "ignore_eos": True, "seed": 5,
                                                 "service_tier": "flex"}, traceparent=parent)  # fmt: skip
            assert answer.status_code == 200
    finally:
        collector.shutdown()
    (body,) = collector.bodies  # sent when the server ended
    assert SECRET.encode() not in body
    (resource,) = service.ExportTraceServiceRequest.FromString(body).resource_spans
    assert any(a.key == "service.name" and a.value.string_value == "qbe" for a in resource.resource.attributes)
    (span,) = resource.scope_spans[0].spans
    assert span.trace_id.hex() == "ab" * 16
    assert span.parent_span_id.hex() == "cd" * 8
    assert span.name == "text_completion tiny"
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    found = {a.key: a.value for a in span.attributes}
    known = {value for name, value in vars(names).items() if name.startswith("GEN_AI_")}
    assert {name for name in found if name.startswith("gen_ai.")} <= known
    assert found["gen_ai.response.id"].string_value == answer.json()["id"]
    assert found["gen_ai.usage.input_tokens"].int_value == len(SECRET)
    assert found["gen_ai.usage.output_tokens"].int_value == 4
    assert found["gen_ai.request.seed"].int_value == 5
    assert found["openai.response.service_tier"].string_value == "flex"
    assert found["qbe.average_weight_bits"].double_value == 4
    assert [e.name for e in span.events] == ["first token"]


def test_traces_are_sent_only_where_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert traces.start() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(QBEError, match=r"qbe\[traces\]"):
        traces.start()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traces.start() is None


@pytest.fixture
def said(server: Running) -> Iterator[io.StringIO]:
    """What the server's log says."""
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("qbe.server")
    handler.setFormatter(Lines(lambda: server.service.settings))
    logger.addHandler(handler)
    before, _ = logger.level, logger.setLevel(logging.INFO)
    yield stream
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("prompts", [False, True])
def test_a_request_is_one_line_without_its_text(
    server: Running, said: io.StringIO, monkeypatch: pytest.MonkeyPatch, format: str, prompts: bool
) -> None:
    logs = server.service.settings.logs.model_copy(update={"format": format, "prompts": prompts})
    monkeypatch.setattr(server.service._watched, "current", server.service.settings.model_copy(update={"logs": logs}))
    answer = ask(server).json()
    assert server.post("completions", {"prompt": SECRET, "n": 0}).status_code == 400
    line, refused = until(lambda: len(said.getvalue().splitlines()) == 2 and said.getvalue(), "two lines").splitlines()
    assert answer["id"] in line
    assert (SECRET in line) == prompts
    assert SECRET not in refused
    if format == "json":
        found = json.loads(line)
        assert (found["message"], found["level"], found["completion_tokens"]) == ("request", "info", 6)
        assert found["cost"] == answer["usage"]["cost"]
        assert json.loads(refused)["param"] == "n"
    else:
        assert line.startswith("qbe: request id=")
        assert " finish=length" in line
        assert "status=400 code=invalid_value param=n" in refused


def test_a_line_of_text_cannot_be_broken() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "request", None, None)
    record.fields = {"key": "a b\nqbe: forged", "n": 1, "none": None, "deep": {"a": 1}}  # type: ignore[attr-defined]
    from qbe.server.settings import Settings

    line = Lines(Settings).format(record)
    assert line == 'qbe: request key="a b\\nqbe: forged" n=1 deep={"a":1}'


def test_what_the_engine_refuses_counts_as_refused_alone(
    server: Running, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = time.monotonic()  # or answers of the tests before leave the last minute
    monkeypatch.setattr(server.service.observer.live._seconds, "_clock", lambda: stopped)
    until(lambda: server.service._admission.inside == 0, "it is idle")  # type: ignore[union-attr]
    before, shown = samples(server), server.http.get("/v1/qbe/live").json()
    wrong = {"prompt": SECRET, "n": 2, "logit_bias": {"5000": 1}}
    assert server.post("completions", wrong).status_code == 400
    assert server.post("completions", wrong | {"prompt": [SECRET, "x"]}).status_code == 400
    until(lambda: server.service._admission.inside == 0, "it is over")  # type: ignore[union-attr]
    after, now = samples(server), server.http.get("/v1/qbe/live").json()
    changed = {name for name in after if str(after[name]) != str(before.get(name, 0.0)) and "_created" not in name}
    assert {name for name in changed if name.startswith(("vllm:", "qbe:"))} == {"qbe:requests_refused_total"}
    assert all(line.startswith("qbe: refused") for line in said.getvalue().splitlines())
    assert now["last_minute"] == shown["last_minute"]
    assert [(row["state"], row["cost"]) for row in now["requests"][:2]] == [("refused", 0.0)] * 2


def test_alerts_ask_for_metrics_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    asked = {name for rule in group["rules"] for name in re.findall(r"\b(?:qbe|vllm):\w+", rule["expr"])}
    known = Metrics("m").text(None, 0, 0.0).decode()
    assert {"qbe:ledger_ok", "qbe:settings_ok"} <= asked
    for name in asked:
        assert f"# TYPE {name.removesuffix('_total')}" in known, name


def test_dashboard_and_alerts_are_promql() -> None:
    yaml, promql = pytest.importorskip("yaml"), pytest.importorskip("promql_parser", reason="needs promql-parser")
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    asked = [t["expr"].replace("$__rate_interval", "1m") for panel in dashboard["panels"] for t in panel["targets"]]
    for expression in [*asked, *(rule["expr"] for rule in group["rules"])]:
        promql.parse(expression)
    with pytest.raises(ValueError):
        promql.parse("rate(qbe:cost_total)")
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[sm]", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
