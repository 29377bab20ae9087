"""`qbe bench serve` on a tiny model: real servers, real clients, a made-up trace."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import itertools
import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bench_samples import CPU, LIMITS, described
from qbe.bench import serve
from qbe.bench.client import Answered
from qbe.bench.goodput import Bound, Search, TraceReplay, in_turns, quantile
from qbe.bench.serve import run
from qbe.bench.serve_sizes import ServeSizes
from qbe.bench.traffic import Traffic
from qbe.errors import QBEError
from server_process import save_tiny

pytestmark = pytest.mark.usefixtures("forked_servers")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with a burst, texts, schemas."""
    folder = tmp_path_factory.mktemp("data")
    at, lines = datetime(2023, 11, 16, 18, 15), ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for i in range(60):
        at += timedelta(seconds=0.01 if 10 <= i < 20 else 0.5)
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f}0,{40 + 13 * i % 200},{20 + 7 * i % 40}")
    (folder / "azure_llm_trace_conv_6000.csv").write_text("\n".join(lines))
    (folder / "gsm8k_train4000.jsonl").write_text('{"question": "Two apples and three?"}\n{"question": "Why?"}\n')
    (folder / "alpaca_seed_tasks.jsonl").write_text('{"instruction": "Write a word."}\n')
    (folder / "json_schemas").mkdir()
    for name, schema in {
        "flag": {"type": "boolean"}, "one": {"enum": ["a", "b"]},
        "pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "wrong": {"type": "string", "pattern": "(?=a)b"},
    }.items():  # fmt: skip
        (folder / "json_schemas" / f"{name}.json").write_text(json.dumps(schema))
    return folder


@pytest.fixture(scope="module")
def sizes(data: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeSizes:
    model = save_tiny(tmp_path_factory.mktemp("bench") / "model")
    return ServeSizes(
        model=model, policy="uniform", data=data, shrink=16, requests=4, halvings=0, rounds=1, batch=2, tokens=4,
        probes=5, flood=3, schemas=4, schema_tokens=40,
    )  # fmt: skip


def measured(sizes: ServeSizes, part: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in described(run(CPU, LIMITS, replace(sizes, parts=(part,), **more)), CPU)}


def test_a_trace_keeps_its_bursts_and_repeats_no_prompt(data: Path) -> None:
    traffic = Traffic(data, "conv", 4, {"flex": 0.5, "priority": 0.5})
    one, two = traffic.take(30, 2.0, 3), traffic.take(30, 2.0, 3)
    assert [(a.at, a.tokens, a.tier) for a in one] == [(a.at, a.tokens, a.tier) for a in two]
    assert len({a.prompt for a in one + two}) == 60
    assert one[-1].at == pytest.approx(29 / 2.0)
    gaps = [b.at - a.at for a, b in itertools.pairwise(one)]
    assert max(gaps) > 10 * min(gaps)
    assert {a.tier for a in one} == {"flex", "priority"}
    assert {a.tier for a in traffic.take(30, 2.0, 3, "flex")} == {"flex"}


@pytest.mark.parametrize("text", [None, "", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n"])
def test_a_trace_that_is_none_is_one_line(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "azure_llm_trace_conv_6000.csv").write_text(text)
    with pytest.raises(QBEError, match=r"azure_llm_trace_conv_6000\.csv"):
        Traffic(tmp_path, "conv", 4, {"flex": 1.0})


def test_the_search_finds_the_highest_rate() -> None:
    """Of two servers that are too late from some rate on."""
    limits = (3.7, 0.9)
    searches = [Search(Bound(1.0, 1.0), 0.5, 6) for _ in limits]

    def trial(number: int, rate: float) -> TraceReplay:
        late = 2.0 if rate > limits[number] else 0.5
        return TraceReplay(rate, late, 0.1, 6.0, 0)

    in_turns(searches, trial)
    assert [s.best for s in searches] == pytest.approx(limits, rel=0.03)
    assert searches[0].best <= limits[0]
    easy = Search(Bound(1.0, 1.0), 0.5, 6)
    in_turns([easy], lambda _, rate: TraceReplay(rate, 0.1, 0.1, 6.0, 0))
    assert easy.best > 10  # it ends, although no rate is too high
    hard = Search(Bound(1.0, 1.0), 0.5, 6)
    in_turns([hard], lambda _, rate: TraceReplay(rate, 2.0, 0.1, 6.0, 0))
    assert hard.best == 0  # and although none is low enough


def test_a_refused_answer_meets_no_bound() -> None:
    good = Answered(200, 0.1, 0.01, 1.0, 10, 5.0)
    refused = Answered(429, float("inf"), 0.0, 0.1, 0, 0.0, "full")
    assert TraceReplay.of(1.0, [good] * 20).over(Bound(0.2, 0.02)) <= 1
    assert TraceReplay.of(1.0, [good] * 15 + [refused] * 5).over(Bound(0.2, 0.02)) > 1
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_requests_within_a_bound(sizes: ServeSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("--max-sequences", "1")  # each number of rows is compiled for itself
    monkeypatch.setattr(serve, "_serving", lambda *a, plain=serve._serving: plain(*a, *few))
    (row,) = measured(sizes, "bound", slack=1e6).values()  # one that a busy machine meets, too
    assert row["unit"] == "requests/s"
    assert row["peer"] == "all at 16 bits"
    assert row["ours"] == row["peer_value"] > 0  # no rate was too high


def test_overhead_and_priority(sizes: ServeSizes) -> None:
    found = measured(sizes, "overhead")
    assert len(found) == 1  # two cases of one name: wall clock and CPU time
    found = measured(sizes, "priority")
    assert found["first token, p99"]["ours"] >= found["first token, p50"]["ours"] > 0


def test_schemas(sizes: ServeSizes) -> None:
    found = measured(sizes, "schemas")
    valid, token = found["valid answers"], found["a token"]
    assert valid["ours"] == valid["peer_value"] == 3
    assert "of 4 schemas 1 are refused" in valid["note"]
    assert token["ours"] > 0


def test_half_of_the_connections_hang_up_and_nothing_stays(sizes: ServeSizes) -> None:
    found = measured(sizes, "soak", connections=160, soak_s=4.0, soak_shrink=2)
    answered, files = found["answered"], found["open files"]
    assert answered["ours"] == answered["peer_value"] > 40
    assert files["ours"] == files["peer_value"]
    assert "KV pages in use at the end: 0%" in answered["note"]
    assert "ledger rows left open: 0" in answered["note"]
