"""Keys, their limits, and grammars that mean harm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qbe.server.admission import Admission, Bucket
from qbe.server.errors import APIError
from qbe.server.keys import Client, new_key
from qbe.server.settings import Key, Limits
from qbe.server.settings_file import load
from server_running import Running, running, until

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Running]:
    config = tmp_path_factory.mktemp("config") / "serve.toml"
    text = "[limits]\ngrammar_s = 2.0\ngrammar_bytes = 20000\n"
    for name, more in (("all", ""), ("cheap", 'tiers = ["flex"]\n'), ("rare", "requests_per_minute = 2\n"),
                       ("small", "tokens_per_minute = 100\n")):  # fmt: skip
        keys[name], lines = new_key(name)
        text += lines + more
    config.write_text(text)
    with running(config=config) as found:
        yield found


def ask(server: Running, key: str, body: Any) -> Any:
    return server.post("chat/completions", body, Authorization=f"Bearer {key}")


def test_only_hashes_are_kept(tmp_path: Path) -> None:
    key, lines = new_key("me")
    assert key not in lines
    assert len(key) > 40
    path = tmp_path / "serve.toml"
    path.write_text(lines)
    assert set(load(path).keys) == {"me"}
    assert new_key("me")[0] != key


def test_a_key_is_needed(server: Running, keys: dict[str, str]) -> None:
    assert server.http.get("/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": keys["all"]}, {"Authorization": "Bearer"}):
        for answer in (
            server.http.get("/v1/models", headers=headers),
            server.http.post("/v1/chat/completions", json=HI, headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert ask(server, keys["all"], HI).status_code == 200


def test_a_key_has_its_tiers(server: Running, keys: dict[str, str]) -> None:
    assert ask(server, keys["cheap"], HI).json()["service_tier"] == "flex"  # auto is what it may use
    refused = ask(server, keys["cheap"], HI | {"service_tier": "priority"})
    assert refused.status_code == 403
    assert refused.json()["error"]["param"] == "service_tier"


def test_a_key_has_its_limits(server: Running, keys: dict[str, str]) -> None:
    codes = [ask(server, keys["rare"], HI) for _ in range(3)]
    assert [c.status_code for c in codes] == [200, 200, 429]
    assert 20 <= int(codes[2].headers["Retry-After"]) <= 30
    assert ask(server, keys["small"], HI | {"max_tokens": 200}).status_code == 429
    for _ in range(3):  # what was charged and not used is given back: 50 tokens each would be too many
        assert ask(server, keys["small"], HI | {"max_tokens": 30, "logit_bias": {"256": 100}}).status_code == 200


def test_buckets_refill_and_queues_are_counted() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    assert bucket.wait(61) == float("inf")
    bucket.take(60)
    assert bucket.wait(10) == pytest.approx(10)
    now[0] = 4.0
    assert bucket.wait(10) == pytest.approx(6)
    now[0] = 1000.0
    assert bucket.wait(60) == 0
    admission = Admission(running=2, clock=lambda: now[0])
    limits = Limits(queue=2)
    for _ in range(4):
        admission.enter(1, limits)
    for end in (1001.0, 1003.0, 1005.0):
        now[0] = end
        admission.leave()
    admission.enter(3, limits)
    with pytest.raises(APIError) as refused:
        admission.enter(2, limits)
    assert refused.value.retry_after == pytest.approx(4)  # two answers, one in two seconds
    now[0] = 1006.0
    for _ in range(9):
        admission.enter(1, limits, "flex")
        admission.leave(1, "flex", ended=0)  # refused
    with pytest.raises(APIError) as refused:
        admission.enter(2, limits)
    assert refused.value.retry_after == pytest.approx(4)
    admission.enter(2, limits, "priority")  # whose queue is empty
    with pytest.raises(APIError, match="'priority'"):
        admission.enter(1, limits, "priority")
    client = Client("me", Key(sha256="0" * 64, tokens_per_minute=100))
    admission.charge(client, 90)
    with pytest.raises(APIError):
        admission.charge(client, 20)
    admission.refund(client, 80)
    admission.charge(client, 20)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "object", "properties": {"a": schema}}, schema]}
    return schema


HOSTILE: dict[str, Any] = {
    "a pattern": {"type": "string", "pattern": "^((a{1,300}){1,300}){1,300}$"},
    "many patterns": {"allOf": [{"pattern": f"(.*{c}.*){{40}}"} for c in "abcdefghij"]},
    "exponential": nested(12),
    "deep": nested(9),
    "recursive": {"$ref": "#"},
    "unknown": {"$ref": "https://example.com/schema.json"},
    "no type": {"type": "nothing"},
    "large": {"enum": [f"value {i}" for i in range(5000)]},
    "bounds": {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_neither_stalls_nor_breaks(server: Running, keys: dict[str, str], name: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": HOSTILE[name]}}
    with ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        hostile = pool.submit(ask, server, keys["all"], HI | {"response_format": wanted})
        assert ask(server, keys["all"], HI).status_code == 200  # others are served meanwhile
        answer = hostile.result(30)
        assert time.monotonic() - begun < 30
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "response_format"
    good = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    assert ask(server, keys["all"], HI | {"response_format": good, "max_tokens": 9}).status_code == 200


def test_a_check_that_takes_too_long_is_ended(server: Running, keys: dict[str, str], tmp_path: Path) -> None:
    """A checker that never answers stands for a grammar that never ends."""
    grammars = server.service._grammars
    assert grammars is not None
    silent = tmp_path / "silent.py"
    silent.write_text("import sys\nsys.stdin.readline()\nprint('null', flush=True)\nimport time\ntime.sleep(600)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qbe.server.grammar._CHECKER", silent)
        patch.setattr(grammars, "_checker", None)
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "never seen"}}}
        patch.setattr("qbe.server.grammar._WAITING", 1)
        with ThreadPoolExecutor(1) as pool:
            oversized = pool.submit(ask, server, keys["all"], HI | {"response_format": wanted})
            until(lambda: grammars._waiting == 1, "it is being checked")
            late = ask(server, keys["all"], HI | {"response_format": {"type": "grammar", "grammar": 'start: "a"'}})
            assert (late.status_code, late.json()["error"]["code"]) == (429, "queue_full")
            answer = oversized.result(30)
    assert answer.status_code == 400
    assert "longer than 2 s" in answer.json()["error"]["message"]
    assert ask(server, keys["all"], HI | {"response_format": wanted, "max_tokens": 30}).status_code == 200
