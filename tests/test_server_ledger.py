"""The server's ledger: what was served is in it, once, however the server ends."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from qbe.records.ledger import UNIT, Ledger, LedgerEntry
from server_process import save_tiny, serving
from server_running import LIMIT_S, running, tiny_engine, until

TOML = """
[tiers.flex]
bits = [4.0, 4.0]
[tiers.default]
bits = [8.0, 8.0]
[prices]
input = 10.0
cached_input = 1.0
output = 40.0
"""
STREAMS, WHOLE = 4, 2
MOST = 40  # tokens of an answer


@dataclass
class Served:
    """What a client got of one request.

    Attributes:
        tokens: it has seen.
        usage: of an answer that is complete.
    """

    n: int
    tokens: int = 0
    usage: dict[str, Any] = field(default_factory=dict)


class Clients:
    """Clients that ask for one answer after the other until the server is gone.

    Attributes:
        served: by the answer's id.
    """

    def __init__(self, url: str, seed: int) -> None:
        self._url, self.served = url, dict[str, Served]()
        self._gone = threading.Event()
        self._random = random.Random(seed)
        self._pool = ThreadPoolExecutor(STREAMS + WHOLE)
        self._all = [self._pool.submit(self._ask, i < STREAMS, seed * 100 + i) for i in range(STREAMS + WHOLE)]

    def wait(self) -> None:
        self._gone.set()
        for one in self._all:
            one.result(LIMIT_S)
        self._pool.shutdown()

    def _ask(self, stream: bool, seed: int) -> None:
        dice = random.Random(seed)
        with httpx2.Client(base_url=self._url, timeout=LIMIT_S, verify=False) as http:
            while not self._gone.is_set():
                body = {
                    "prompt": f"{dice.random()} and so on", "max_tokens": dice.randint(5, MOST), "ignore_eos": True,
                    "n": dice.randint(1, 2), "service_tier": dice.choice(["flex", "default"]),
                }  # fmt: skip
                try:
                    if stream:
                        self._read(http, body)
                        continue
                    answer = http.post("/v1/completions", json=body).json()
                    self.served[answer["id"]] = Served(body["n"], answer["usage"]["completion_tokens"], answer["usage"])
                except httpx2.TransportError:
                    return

    def _read(self, http: httpx2.Client, body: dict[str, Any]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        with http.stream("POST", "/v1/completions", json=body | options) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                one = self.served.setdefault(event["id"], Served(body["n"]))
                one.tokens = event["usage"]["completion_tokens"]
                if not event["choices"]:
                    one.usage = event["usage"]


def check(book: Path, served: dict[str, Served], before: dict[str, LedgerEntry]) -> dict[str, LedgerEntry]:
    """Compare; returns the rows."""
    rows = {e.request: e for e in Ledger(book).entries()}
    assert len(rows) == len(Ledger(book).entries()), "a request is in it twice"
    assert before == {request: rows[request] for request in before}, "what was there has changed"
    for request, one in served.items():
        row = rows[request]
        assert row.completion_tokens >= one.tokens, "a token that was served is not in it"
        if one.usage:
            assert row.completion_tokens == one.usage["completion_tokens"]
            assert row.cost / UNIT == one.usage["cost"]
            assert row.finish == ",".join(["length"] * one.n)
            spread = {int(b): n for b, n in one.usage["qbe"]["tokens_by_bits"].items()}
            assert row.tokens_by_bits == spread
            assert row.weight_bits == pytest.approx(one.usage["qbe"]["average_weight_bits"])
    new = {request: row for request, row in rows.items() if request not in before}
    for row in new.values():  # it is charged for what it says, no more
        bits = {"flex": 4, "default": 8}[row.tier]
        at_full = (row.prompt_tokens - row.cached_tokens) * 10 + row.cached_tokens + row.completion_tokens * 40
        assert row.cost == pytest.approx(at_full * bits / 16 * UNIT / 1e6, abs=2)
        assert row.completion_tokens <= 2 * MOST
    unseen = [request for request in new if request not in served]
    assert len(unseen) <= STREAMS + WHOLE, "more than what was on its way is charged to nobody"
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("served")
    save_tiny(found / "model")
    (found / "serve.toml").write_text(TOML)
    return found


def test_whatever_is_killed_everything_served_is_billed_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ledger through one death after the other, at random writes and at random times.

    QBE_TEST_KILLS: how often it goes through four of them; 50 before a release.
    """
    dice = random.Random()  # another run, other moments
    options = ("--model", str(home / "model"), "--policy", "uniform", "--config", str(home / "serve.toml"))
    rows: dict[str, LedgerEntry] = {}
    script = str(Path(__file__).with_name("serve_and_die.py"))
    times = int(os.environ.get("QBE_TEST_KILLS", "1"))
    latest = 120 if times > 1 else 40  # writes of the ledger
    points = [f"{where}:{dice.randint(2, latest)}" for where in ("before", "within", "after")] + [""]
    points *= times
    for number, point in enumerate(points):
        monkeypatch.setenv("QBE_TEST_DIES", point)
        program = (script,) if point else ("-m", "qbe")
        with serving(*options, home=home, program=program) as (process, url):
            clients = Clients(url, number)
            if not point:
                until(lambda served=clients.served: len(served) > 3, "answers come")
                time.sleep(dice.uniform(0.0, 0.5))
                process.kill()
            assert process.wait(LIMIT_S) == -signal.SIGKILL
            clients.wait()
        rows = check(home / "ledger.sqlite", clients.served, rows)
        print(point or "at a time", len(rows), "rows", sum(e.finish is None for e in rows.values()), "unfinished")
    total = sum(t.cost for t in Ledger(home / "ledger.sqlite").totals())
    assert total == pytest.approx(sum(e.cost for e in rows.values()) / UNIT)


def test_keys_tiers_and_broken_ledgers(tmp_path: Path) -> None:
    """A server whose ledger cannot be written serves nothing, and again when it can."""
    config, book = tmp_path / "serve.toml", tmp_path / "books" / "ledger.sqlite"
    config.write_text(TOML)
    asked: Any = dict(model="tiny", prompt="hello", max_tokens=3, extra_body={"ignore_eos": True})
    with pytest.MonkeyPatch.context() as patch, running(tiny_engine, config, book) as server:
        patch.setattr("qbe.server.billing._PAUSE_S", 0.1)
        first = server.client.completions.create(**asked)
        (row,) = Ledger(book).entries()
        assert (row.request, row.key, row.tier, row.finish) == (first.id, "anonymous", "default", "length")
        echo = server.post("completions", {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}).json()
        assert Ledger(book).entries()[1].completion_tokens == 0
        assert Ledger(book).entries()[1].cost / UNIT == echo["usage"]["cost"]
        assert server.metric("qbe:cost_total") == pytest.approx(sum(e.cost for e in Ledger(book).entries()) / UNIT)

        with pytest.MonkeyPatch.context() as broken:
            broken.setattr("qbe.records.ledger._WRITE", "no such statement")
            with pytest.raises(openai.InternalServerError, match="ledger"):
                server.client.completions.create(**asked)
            time.sleep(0.2)
            with pytest.raises(openai.APIError, match="ledger"):
                list(server.client.completions.create(**asked, stream=True))
            assert server.post("completions", {"prompt": "hello"}).json()["error"]["code"] == "ledger"
        until(lambda: not server.engine.core.has_work(), "nothing runs on")
        until(lambda: server.post("completions", {"prompt": "hello"}).status_code == 200, "it serves again")
        assert len(Ledger(book).entries()) == 3


def test_what_nobody_got_is_not_charged(tmp_path: Path) -> None:
    book, config = tmp_path / "ledger.sqlite", tmp_path / "serve.toml"
    config.write_text("[limits]\ntimeout_s = 0.3\n")
    with running(tiny_engine, config, book) as server:
        body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}
        assert server.post("completions", body).status_code == 504
        lines = server.post("completions", body | {"stream": True}).text.splitlines()
        assert "too long" in lines[-2]
    (row,) = Ledger(book).entries()
    assert row.finish == "cancelled"
    assert row.completion_tokens > 0  # it was streamed up to there


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_while_booking_ends_requests_and_not_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    asked: Any = dict(model="tiny", prompt="hello", max_tokens=3, stream=stream, extra_body={"ignore_eos": True})
    config = tmp_path / "serve.toml"
    config.write_text(TOML)
    monkeypatch.setattr("qbe.server.billing._PAUSE_S", 0.1)
    with running(tiny_engine, config, tmp_path / "ledger.sqlite") as server:
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr("qbe.server.billing.Account.take", lambda *_: 1 / 0)
            with pytest.raises(openai.APIError, match="ledger"):
                list(server.client.with_options(timeout=20).completions.create(**asked))
        until(lambda: server.post("completions", {"prompt": "hello"}).status_code == 200, "it serves again")


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_prompt_that_was_cut_only_what_was_computed_is_charged(tmp_path: Path, stream: bool) -> None:
    """Whether time runs out within it or its client hangs up."""
    config, book = tmp_path / "serve.toml", tmp_path / "ledger.sqlite"
    config.write_text(TOML)
    with running(lambda: tiny_engine(max_batch_tokens=64), config, book) as server:
        step = server.engine.core.step
        server.engine.core.step = lambda: (time.sleep(0.02), step())[1]  # type: ignore[method-assign]
        body = {"prompt": "x" * 4000, "max_tokens": 9, "ignore_eos": True}
        if stream:
            with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}):
                until(lambda: server.engine.core.scheduler.running, "it has begun")
        else:
            usage = server.post("completions", body | {"qbe": {"max_latency_ms": 200}}).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4000, 0)
        (row,) = until(lambda: Ledger(book).entries(), "it is booked")
    computed = sum(row.tokens_by_bits.values())
    assert 0 < computed < 4000
    assert row.cost == pytest.approx(computed * 10 * 8 / 16 * UNIT / 1e6, abs=2)
    if not stream:
        assert usage["cost"] == row.cost / UNIT
