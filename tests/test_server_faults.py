"""What goes wrong: clients that hang up, full queues, slow and failing engines, and bodies that are too much."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from server_running import Running, running, tiny_engine, until

LONG = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}
TOML = """
[limits]
queue = 4
brownout = 0.0
timeout_s = 20
body_bytes = 20000
[tiers.default]
bits = [8.0, 8.0]
floor = 4.0
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text(TOML)
    with running(lambda: tiny_engine(max_sequences=2), config) as found:
        yield found


@pytest.fixture(autouse=True)
def _ends_idle(server: Running) -> Iterator[None]:
    """Whatever happened, nothing is left: no request, no page, no place in the queue."""
    yield
    until(lambda: not server.engine.core.has_work() and not server.engine._live, "the engine is idle")
    allocator = server.engine.core.scheduler.allocator
    assert allocator.free_bytes == allocator.num_pages * allocator.page_bytes
    until(lambda: server.service._admission.inside == 0, "the queue is empty")  # type: ignore[union-attr]


def connect(server: Running, body: dict[str, Any]) -> socket.socket:
    """A connection on which this was asked."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_pages(server: Running, stream: bool) -> None:
    with connect(server, LONG | {"stream": stream, "n": 2}) as connection:
        until(lambda: len(server.engine.core.scheduler.running) == 2, "both answers run")
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: not server.engine.core.has_work(), "they were cancelled")
    cancelled = 'vllm:request_success_total{finished_reason="cancelled"'
    until(lambda: server.metric(cancelled) >= 2, "they are counted")


def test_one_that_hangs_up_in_the_queue_is_never_begun(server: Running) -> None:
    with connect(server, LONG | {"n": 2}):
        until(lambda: len(server.engine.core.scheduler.running) == 2, "the batch is full")
        with connect(server, LONG):
            until(lambda: len(server.engine.core.scheduler.waiting) == 1, "it waits")
        until(lambda: not server.engine.core.scheduler.waiting, "it is gone")
        assert len(server.engine.core.scheduler.running) == 2


def test_a_full_queue_browns_out_and_then_refuses(server: Running) -> None:
    def bits() -> float:
        answer = server.post("completions", {"prompt": "x", "max_tokens": 1}).json()
        return answer["usage"]["qbe"]["average_weight_bits"]

    assert bits() == 8
    with connect(server, LONG | {"n": 2}), connect(server, LONG | {"n": 2}):
        until(lambda: server.service._admission.waiting == 2, "two answers wait")  # type: ignore[union-attr]
        assert server.metric("qbe:brownout") == 0.5
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(server.post, "completions", {"prompt": "x", "max_tokens": 1})
            until(lambda: server.service._admission.waiting == 3, "the third waits")  # type: ignore[union-attr]
            with connect(server, LONG):
                until(lambda: server.service._admission.waiting == 4, "the queue is full")  # type: ignore[union-attr]
                with pytest.raises(openai.RateLimitError) as refused:
                    server.client.completions.create(model="tiny", prompt="x")
                assert refused.value.code == "queue_full"
                assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
                assert server.metric("qbe:brownout") == 1
                assert server.metric("vllm:num_requests_waiting") == 4
            server.service._worker.cancel(next(iter(server.service._worker._jobs)))
            usage = late.result(30).json()["usage"]["qbe"]
    assert usage["brownout"] == 0.5
    assert usage["average_weight_bits"] == 6  # halfway to the floor
    until(lambda: server.service.brownout() == 0, "the pressure is gone")
    assert bits() == 8


@pytest.fixture
def slow(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a while."""
    step = server.engine.core.step
    monkeypatch.setattr(server.engine.core, "step", lambda: (time.sleep(0.02), step())[1])


def test_a_request_that_takes_too_long_ends(server: Running, slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = server.service.settings.limits.model_copy(update={"timeout_s": 0.4})
    changed = server.service.settings.model_copy(update={"limits": limits})
    monkeypatch.setattr(server.service._watched, "current", changed)
    answer = server.post("completions", LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    with pytest.raises(openai.APIError, match="too long"):
        list(server.client.completions.create(
            model="tiny", prompt="x", stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
        ))  # fmt: skip


def test_an_engine_that_fails_once_goes_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, failed = server.engine.core.runner.step, []

    def step(work: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("a kernel failed")
        return forward(work)

    monkeypatch.setattr(server.engine.core.runner, "step", step)
    answer = server.post("completions", {"prompt": "x", "stream": True})
    assert "engine_error" in answer.text
    assert "a kernel failed" not in answer.text
    monkeypatch.setattr(server.engine.core.runner, "step", forward)
    assert server.post("completions", {"prompt": "x"}).status_code == 200
    assert server.http.get("/health").status_code == 200


def test_an_engine_that_fails_always_says_so() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a kernel failed")

    with running() as own:
        own.engine.core.runner.step = broken  # type: ignore[method-assign]
        codes = [own.post("completions", {"prompt": "x"}).status_code for _ in range(3)]
        assert codes == [500] * 3
        until(lambda: own.http.get("/health").status_code == 503, "it is given up")
        assert own.http.get("/ready").status_code == 503
        assert own.post("completions", {"prompt": "x"}).status_code == 503


def test_bodies_and_headers_have_limits(server: Running) -> None:
    big = server.post("completions", {"prompt": "x" * 30000})
    assert (big.status_code, big.json()["error"]["code"]) == (413, "body_too_large")
    parts = server.http.post("/v1/completions", content=iter([b" " * 9000] * 4))  # its length is not declared
    assert parts.status_code == 413
    assert server.http.get("/health", headers={"X-Long": "x" * 40000}).status_code == 431
    plain = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 400  # what a page of another site could send
    assert server.http.get("/health", headers={"Host": "evil.example"}).status_code == 403
    for text in (b"[" * 9000, b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}', b'{"seed": NaN}', b"\xff", b"", b"null"):
        answer = server.http.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_slow_body_is_not_waited_for(server: Running, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("[limits]\nbody_s = 0.2\n")
    with running(config=config) as own:
        host, port = own.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 50\r\n\r\n"
            connection.sendall(head.encode() + b"{")
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_slow_headers_and_too_many_connections_end(server: Running, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("[limits]\nheader_s = 0.3\nconnections = 3\n")
    with running(config=config) as own:
        host, port = own.url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            slow, silent = (stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in "ab")
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: ")
            until(lambda: own.http.get("/health").status_code == 200, "the third connection is served")
            with socket.create_connection((host, int(port)), timeout=30) as fourth:
                assert fourth.recv(1000).startswith(b"HTTP/1.1 503")
            assert slow.recv(100) == silent.recv(100) == b""
        for _ in range(3):  # a connection that goes on is no slow one
            time.sleep(0.15)
            assert own.http.get("/health").status_code == 200


def test_a_deadline_that_passes_while_the_prompt_is_prepared_cuts_the_answer(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = server.engine._selector
    choose = selector.choose
    monkeypatch.setattr(selector, "choose", lambda *a, **k: (time.sleep(0.2), choose(*a, **k))[1])
    answer = server.post("completions", LONG | {"qbe": {"max_latency_ms": 50}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] < 100
    two = server.post("completions", LONG | {"n": 2, "qbe": {"max_latency_ms": 50}})  # of which one has not begun
    assert (two.status_code, two.json()["error"]["code"]) == (429, "deadline")


def test_a_flood_of_one_tier_leaves_the_queues_of_the_others_open(server: Running) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(server, LONG | {"n": 2, "service_tier": "flex"}))
        until(lambda: server.service._admission.queued("flex") == 4, "flex's queue is full")  # type: ignore[union-attr]
        late = server.post("completions", LONG | {"service_tier": "flex"})
        assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_full")
        assert "'flex'" in late.json()["error"]["message"]
        stack.enter_context(connect(server, LONG | {"service_tier": "priority"}))
        until(lambda: server.service._admission.queued("priority") == 1, "priority is let in")  # type: ignore[union-attr]


def test_what_was_refused_says_nothing_of_the_pace(server: Running) -> None:
    admission = server.service._admission
    assert admission is not None
    for body, ended in (({"logit_bias": {"5000": 1}}, 0), ({"prompt": "x" * 5000}, 0), ({}, 1)):
        before = len(admission._left)
        server.post("completions", {"prompt": "x", "max_tokens": 1} | body)
        until(lambda: not admission.inside, "it has left")
        assert len(admission._left) == before + ended, body


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_prompt_that_is_too_long_is_not_analysed(server: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    analysed: list[Any] = []
    profile = server.engine._selector.profile
    monkeypatch.setattr(server.engine._selector, "profile", lambda *a: (analysed.append(a), profile(*a))[1])
    text = "x" * 4200
    body = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert "context is 4096" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == ("prompt" if path == "completions" else "messages")
    assert server.post("completions", {"prompt": [5] * 4096}).status_code == 400
    assert not analysed
