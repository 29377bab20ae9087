"""`qbe advise`: twelve written scenarios, and the way from a real server's metrics to a line."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qbe.advise import observed
from qbe.advise.advice import Advice, advise
from qbe.advise.observed import Observed, observe
from qbe.advise.rungs import RUNGS, bytes_ratio
from qbe.advise.slo import SLO, load
from qbe.cli.main import app
from qbe.errors import QBEError
from records_samples import record
from server_running import Running, running, tiny_engine, until

# A server of an 8B model at 16 bits that has enough of everything.
USUAL = Observed(
    model="m", ttft_s=0.2, itl_s=0.02, itl_median_s=0.02, queue_s=0.01, weight_bits=16, read_bits=16, kv_bits=16,
    step_bytes=16e9, memory={"weights": 9e9, "originals": 16e9, "kv": 8e9}, kv_usage=0.5, running=8, prefix_share=0.2,
    rated=100, succeeded=95, cost=1.0, live_kl=0.01,
)  # fmt: skip
EIGHT = replace(USUAL, weight_bits=8, read_bits=8, step_bytes=8.25e9, memory={"weights": 9e9, "kv": 8e9})
SCENARIOS: dict[str, tuple[Observed, dict[str, float], str, str, str]] = {
    "all is well": (USUAL, {"ttft_ms": 500, "itl_ms": 50, "memory_gb": 40}, "holds", "", "change nothing"),
    "nothing was asked yet": (
        Observed(memory={"weights": 9e9}), {"itl_ms": 50}, "unknown", "", "nothing was counted of itl_ms"
    ),
    "answers wait, the cache has room": (
        replace(USUAL, ttft_s=2.0, queue_s=1.8), {"ttft_ms": 500}, "advice", "scheduler and prefix cache",
        "ttft_ms is 2000, 4 times what is allowed: scheduler and prefix cache (at best 200)",
    ),
    "answers wait for pages": (
        replace(EIGHT, ttft_s=2.0, queue_s=1.8, kv_usage=0.97, preemptions=9), {"ttft_ms": 500}, "advice", "KV cache",
        "KV cache (at best 200)",
    ),
    "long prompts": (
        replace(USUAL, ttft_s=0.9, queue_s=0.0), {"ttft_ms": 500}, "advice", "8-bit native",
        "8-bit native (at best 450); before it try scheduler and prefix cache",
    ),
    "prompts hold tokens up": (
        replace(USUAL, itl_s=0.08, itl_median_s=0.02), {"itl_ms": 50}, "advice", "scheduler and prefix cache",
        "scheduler and prefix cache (at best 20)",
    ),
    "16 bits are slow": (
        replace(USUAL, itl_s=0.04, itl_median_s=0.04), {"itl_ms": 25}, "advice", "8-bit native",
        "8-bit native (at best 20.6",
    ),
    "8 bits are slow, and many answers run": (
        replace(EIGHT, itl_s=0.04, itl_median_s=0.04, running=16), {"itl_ms": 25}, "advice", "4 bits",
        "4 bits (at best 20.6",
    ),
    "8 bits are slow for one user": (
        replace(EIGHT, itl_s=0.04, itl_median_s=0.04, running=1, kv_usage=0.01), {"itl_ms": 10}, "advice",
        "speculation", "what it brings nothing measured tells",
    ),
    "memory for originals": (
        replace(USUAL, kv_usage=0.9), {"memory_gb": 20}, "advice", "8-bit native", "8-bit native (at best 17)"
    ),
    "nothing that QBE has is enough": (
        replace(EIGHT, weight_bits=4.3, read_bits=4.3, kv_bits=4, itl_s=0.04, itl_median_s=0.04, drafted=9),
        {"itl_ms": 1}, "nothing is enough", "", "no rung that QBE has is enough",
    ),
    "answers fail at 4 bits": (
        replace(EIGHT, weight_bits=4.3, succeeded=40, cost=1.0), {"cost_per_success": 0.02}, "raise precision",
        "4 bits", "because answers fail: go back from 4 bits",
    ),
}  # fmt: skip


def test_there_are_twelve() -> None:
    assert len(SCENARIOS) == 12


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_gets_its_line(name: str) -> None:
    seen, bounds, outcome, rung, line = SCENARIOS[name]
    found = advise(seen, SLO(**bounds))  # type: ignore[arg-type]
    assert (found.outcome, found.rung) == (outcome, rung)
    assert line in found.line
    if rung and outcome == "advice":
        assert found.do
        assert found.suite
        assert [c.rung for c in found.considered] == [r.name for r in RUNGS]
        assert found.considered[-1].verdict == "QBE cannot"


def predicted(found: Advice, rung: str) -> Any:
    return next(c.predicted for c in found.considered if c.rung == rung)


def test_bytes_are_predicted() -> None:
    found = advise(replace(USUAL, itl_s=0.04, itl_median_s=0.04), SLO(itl_ms=25.0))
    assert predicted(found, "8-bit native").step_bytes == pytest.approx(16e9 * 8.25 / 16)
    assert predicted(found, "4 bits").step_bytes == pytest.approx(16e9 * 4.25 / 16)
    memory = advise(replace(USUAL, kv_usage=0.9), SLO(memory_gb=1.0))
    assert predicted(memory, "8-bit native").memory == pytest.approx(17e9)
    assert predicted(memory, "KV cache").memory == pytest.approx(33e9 - 6e9)
    assert predicted(memory, "4 bits").memory == pytest.approx(17e9 - 9e9 * (1 - 4.25 / 8.75))


def test_records_tell_bytes_where_there_are_two() -> None:
    seen = replace(EIGHT, bytes_at={8.0: 900.0, 5.0: 600.0})
    assert bytes_ratio(seen, 4.0) == pytest.approx(500 / 900)
    assert bytes_ratio(EIGHT, 4.0) == pytest.approx(4.25 / 8.25)


def test_the_worst_bound_is_the_bottleneck() -> None:
    seen = replace(USUAL, ttft_s=0.6, itl_s=0.5, itl_median_s=0.01)
    found = advise(seen, SLO(ttft_ms=500.0, itl_ms=50.0))
    assert found.bottleneck == "itl_ms"
    assert [b["holds"] for b in found.describe()["bounds"]] == [False, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[slo]\n", "no bound is given"),
        ("[slo]\nttft_ms = -1\n", r"slo\.ttft_ms"),
        ("ttft_ms = 1\n", "there is no table"),
        ("[slo]\ncolour = 1\n", r"slo\.colour: there is no such bound"),
        ("[slo", "is not TOML"),
    ],
)
def test_an_objective_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "slo.toml").write_text(text)
    with pytest.raises(QBEError, match=said):
        load(tmp_path / "slo.toml")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tiny_engine) as found:
        for i in range(3):
            asked = {"prompt": f"question {i}", "max_tokens": 8, "ignore_eos": True, "qbe": {"bits": 8}}
            assert found.post("completions", asked).status_code == 200
        until(lambda: found.metric("qbe:requests_total{") == 3, "all are counted")
        yield found


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["advise", *args])


def test_the_metrics_of_a_server_are_read(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_RECORDS", str(tmp_path / "records.sqlite"))
    (tmp_path / "slo.toml").write_text("[slo]\nttft_ms = 1e7\nitl_ms = 1e7\n")
    result = run("--metrics", server.url, "--slo", str(tmp_path / "slo.toml"))
    assert result.exit_code == 0, result.output
    assert "the objective holds" in result.output
    text = server.http.get("/metrics").text
    (tmp_path / "metrics.txt").write_text(text)
    (tmp_path / "slo.toml").write_text("[slo]\nmemory_gb = 1e-6\n")
    result = run("--metrics", str(tmp_path / "metrics.txt"), "--slo", str(tmp_path / "slo.toml"), "--json")
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["bottleneck"] == "memory_gb"
    (tmp_path / "slo.toml").write_text("[slo]\nsuccess_rate = 0.9\n")
    assert run("--metrics", server.url, "--slo", str(tmp_path / "slo.toml")).exit_code == 3, "nobody told of any"
    seen = observe(text, 0.95, [record(model="tiny", tokens_by_activation_bits={8: 30, 16: 10})])
    assert seen.model == "tiny"
    assert seen.weight_bits == 8
    assert seen.ttft_s is not None
    assert seen.itl_s is not None
    assert 0 < (seen.itl_median_s or 0) <= seen.itl_s
    assert seen.step_bytes
    assert seen.activation_share == 0.75
    assert sum(seen.memory.values()) > 0


def test_numbers_that_no_server_counts_are_refused(server: Running, tmp_path: Path) -> None:
    (tmp_path / "slo.toml").write_text("[slo]\nitl_ms = 1\n")
    text = server.http.get("/metrics").text
    for number in ("-1", "NaN", "+Inf"):
        changed = re.sub(r"^(vllm:inter_token_latency_seconds_bucket.*) \S+$", rf"\1 {number}", text, flags=re.M)
        with pytest.raises(QBEError, match="no server counts"):
            observe(changed, 0.95)
    with pytest.raises(QBEError, match="several models"):
        observe(
            re.sub(r'^(qbe:average_weight_bits_count.*model_name=)"[^"]*"', r'\1"other"', text, count=1, flags=re.M),
            0.95,
        )


def test_without_any_success_the_cost_of_one_is_no_number() -> None:
    advice = advise(replace(USUAL, succeeded=0.0), SLO(cost_per_success=1e-9))
    assert json.loads(json.dumps(advice.describe(), allow_nan=False))["bounds"][0]["value"] is None
    assert "because answers fail" in advice.line


def test_metrics_that_are_none_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qbe.cli.main import main

    (tmp_path / "slo.toml").write_text("[slo]\nitl_ms = 1\n")
    (tmp_path / "other.txt").write_text("# TYPE up gauge\nup 1\n")
    (tmp_path / "broken.txt").write_text("what is {this\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for source, said in (
        (tmp_path / "other.txt", "qbe:average_weight_bits"), (tmp_path / "broken.txt", "no text of Prometheus"),
        (tmp_path / "bytes.txt", "no text of Prometheus"), (tmp_path / "none.txt", "No such file"),
        ("http://127.0.0.1:9/", "Connection refused; check the address"), ("ftp://127.0.0.1/metrics", "http://"),
        ("HTTP://127.0.0.1:9", "Connection refused"), ("http://[::1", "check the address"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(["advise", "--metrics", str(source), "--slo", str(tmp_path / "slo.toml")])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error
        assert ("folder" in error) == (said == "No such file")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (None, "no answer for 0.3 s"),
        (b"", "check the address"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nup 1", "check the address"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "check the address"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "403 Forbidden; http.private"),
    ],
)
def test_servers_that_give_no_metrics_are_told_apart(
    sent: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed, "_WAIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(observed.fetch, f"http://127.0.0.1:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        if sent is not None:
            connection.recv(4096)
            connection.sendall(sent)
            connection.close()
        with pytest.raises(QBEError, match=said) as refused:
            asked.result(10)
        connection.close()
    assert "folder" not in str(refused.value)
