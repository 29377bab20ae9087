"""What a hostile client can do before and after it has a key: bytes read, parts parsed, connections held."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h11
import pytest

from qbe.errors import QBEError
from qbe.server import bodies
from qbe.server.errors import APIError
from qbe.server.keys import Client, new_key
from qbe.server.protocol import ChatRequest, CompletionRequest
from qbe.server.rates import REFUSED_BYTES
from qbe.server.settings_file import load
from server_running import Running, running, until

HOST = "Host: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Running]:
    config, text = tmp_path_factory.mktemp("config") / "serve.toml", ""
    for name in ("one", "two"):
        keys[name], lines = new_key(name)
        text += lines
    config.write_text(text + "requests_per_minute = 4\n")
    with running(config=config) as found:
        yield found


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    try:
        while more := connection.recv(65536):
            found += more
    except ConnectionResetError:
        pass
    return found


def flood(connection: socket.socket, piece: bytes, most: int) -> None:
    """Send and send, until nobody takes it."""
    connection.settimeout(2)
    try:
        for _ in range(most // len(piece)):
            connection.sendall(piece)
    except OSError:
        pass
    connection.settimeout(30)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that connections have read since the test began."""
    found: list[int] = []
    received = h11.Connection.receive_data
    monkeypatch.setattr(
        h11.Connection, "receive_data", lambda self, data: (found.append(len(data)), received(self, data))[1]
    )
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/", "/no/such", "/health", "/v1/models"])
@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"2000\r\n" + b"x" * 8192 + b"\r\n"])
def test_without_a_key_no_body_is_read(server: Running, read: list[int], path: str, chunk: bytes) -> None:
    for method in ("POST", "GET"):
        with connect(server) as connection:
            head = f"{method} {path} HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n".encode()
            connection.sendall(head)
            flood(connection, chunk * max(1, 8192 // len(chunk)), 4 << 20)
            answer(connection)
            assert sum(read) <= len(head)
            read.clear()


def test_a_refusal_without_a_key_arrives_although_its_body_does_not(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\n{HOST}Content-Length: 20000\r\n\r\n".encode() + b"x" * 20000
        )
        said = answer(connection)
    assert said.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in said.lower()


def test_the_sockets_bytes_are_bounded_without_a_key(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncio import selector_events

    taken: list[int] = []
    got = selector_events._SelectorSocketTransport._read_ready__data_received  # type: ignore[attr-defined]

    def counted(self: Any) -> None:
        before = self._protocol.data_received
        self._protocol.data_received = lambda data: (taken.append(len(data)), before(data))[1]
        try:
            got(self)
        finally:
            del self._protocol.data_received

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "_read_ready__data_received", counted)
    with connect(server) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{HOST}Content-Length: 4000000\r\n\r\n".encode())
        flood(connection, b"x" * 65536, 4_000_000)
        answer(connection)
    assert 0 < sum(taken) <= 64 * 1024


@pytest.mark.parametrize(
    "head",
    [
        f"POST /v1/completions HTTP/1.1\r\n{HOST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"GET /health HTTP/1.1\n{HOST}\r\n",
        f"GET /health HTTP/1.1\r\n{HOST}X: y\nZ: a\r\n\r\n",
        "GET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
        f"GET /health HTTP/1.1\r\n{HOST}\r\nGET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
        f"POST /v1/completions HTTP/1.1\r\n{HOST}Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    ],
)
def test_what_two_parsers_may_read_differently_is_refused(server: Running, keys: dict[str, str], head: str) -> None:
    with connect(server) as connection:
        connection.sendall(head.encode())
        said = answer(connection)
    assert b"HTTP/1.1 400" in said
    assert said.lower().count(b"connection: close") == 1


def test_pipelined_requests_are_answered(server: Running) -> None:
    one = f"GET /health HTTP/1.1\r\n{HOST}\r\n"
    with connect(server) as connection:
        connection.sendall((one * 2 + one.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")).encode())
        assert answer(connection).count(b"HTTP/1.1 200") == 3


def authorized(key: str, more: str) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\n{HOST}Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"{more}\r\n\r\n"
    ).encode()


def test_tiny_chunks_are_refused_with_a_key(server: Running, keys: dict[str, str], read: list[int]) -> None:
    with connect(server) as connection:
        connection.sendall(authorized(keys["one"], "Transfer-Encoding: chunked"))
        flood(connection, b"1\r\nx\r\n" * 1000, 1 << 20)
        assert answer(connection).startswith(b"HTTP/1.1 400")
    assert sum(read) < 20_000
    body = b'{"prompt": "x", "max_tokens": 1}'
    chunks = b"".join(b"8\r\n" + body[i : i + 8] + b"\r\n" for i in range(0, len(body), 8)) + b"0\r\n\r\n"
    with connect(server) as connection:  # small ones of a small body are no harm
        connection.sendall(authorized(keys["one"], "Connection: close\r\nTransfer-Encoding: chunked") + chunks)
        assert answer(connection).startswith(b"HTTP/1.1 200")


def many(part: str, count: int) -> str:
    return f"[{','.join([part] * count)}]"


CHAT = '"messages":[{"role":"user","content":%s}]'
HOSTILE = {
    "objects as prompts": '{{"prompt":{}}}'.format(many("{}", 1_000_000)),
    "arrays as prompts": '{{"prompt":{}}}'.format(many("[1]", 700_000)),
    "empty texts": '{{"prompt":{}}}'.format(many('""', 1_000_000)),
    "tokens": '{{"prompt":{}}}'.format(many("1", 1_500_000)),
    "content": "{" + CHAT % many("{}", 1_000_000) + "}",
    "calls": '{{"messages":[{{"role":"assistant","tool_calls":{}}}]}}'.format(many("{}", 1_000_000)),
    "metadata": "{" + CHAT % '"x"' + ',"metadata":{{{}}}}}'.format(",".join(f'"{i}":{{}}' for i in range(250_000))),
    "logit_bias": '{{"prompt":"x","logit_bias":{{{}}}}}'.format(",".join(f'"{i}":"x"' for i in range(250_000))),
    "unknown": "{{{}}}".format(",".join(f'"a{i}":1' for i in range(250_000))),
    "nested": "[" * 3_000_000,
    "quotes": '"[:' * 1_000_000,
    "digits": '{"prompt":[%s]}' % ("9" * 3_000_000),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_makes_many_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects parsed and errors collected are what takes the time; both are bounded, however large the body is."""
    made: list[Any] = []
    wrong, hook = bodies.wrong_body, bodies._object
    monkeypatch.setattr(bodies, "wrong_body", lambda error: (made.append(error.error_count()), wrong(error))[1])
    monkeypatch.setattr(bodies, "_object", lambda pairs: (made.append(1), hook(pairs))[1])
    text = HOSTILE[name].encode()
    assert len(text) > 2_000_000
    with pytest.raises(APIError) as refused:
        bodies.parse(ChatRequest if '"messages"' in HOSTILE[name][:40] else CompletionRequest, text)
    assert refused.value.status == 400
    assert sum(made) < 2000
    assert len(refused.value.message) < 500


def test_lists_stop_at_their_first_wrong_item() -> None:
    for text, kind in (('{{"prompt":{}}}'.format(many("{}", 50_000)), CompletionRequest),
                       ("{" + CHAT % many("{}", 50_000) + "}", ChatRequest),
                       ('{{"messages":{}}}'.format(many("{}", 50_000)), ChatRequest)):  # fmt: skip
        with pytest.raises(ValueError, match="validation error") as refused:
            kind.model_validate(json.loads(text))
        assert refused.value.error_count() <= 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ['[{,:"\\' * 500_000, 'say \\"[{}]\\" ' * 200_000, "1,2:[" * 300_000])
def test_a_long_text_is_one_part(text: str) -> None:
    found = bodies.parse(CompletionRequest, json.dumps({"prompt": text}).encode())
    assert isinstance(found, CompletionRequest)
    assert found.prompt == text


def test_bodies_in_memory_are_bounded_for_each_key() -> None:
    held = bodies.Bodies({})
    for _ in range(4):
        held.hold("one", 4 << 20)
    with pytest.raises(APIError, match="one after the other"):
        held.hold("one", 1)
    for key in ("two", "three", "four"):
        held.hold(key, 16 << 20)
    with pytest.raises(APIError):
        held.hold("five", 1)
    held.free("one", 4 << 20)
    held.hold("five", 4 << 20)
    held.close()


def test_refusals_are_charged(server: Running, keys: dict[str, str]) -> None:
    def ask(body: Any) -> Any:
        return server.post("completions", body, Authorization=f"Bearer {keys['two']}")

    found = [ask({"prompt": {}}) for _ in range(4)]
    assert [f.status_code for f in found] == [400] * 4
    assert [f.headers["x-ratelimit-remaining-requests"] for f in found] == ["3", "2", "1", "0"]
    late = ask({"prompt": "x", "max_tokens": 1})
    assert (late.status_code, late.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert late.headers["x-ratelimit-limit-requests"] == "4"
    server.service.rates.refused(Client("one", server.service.settings.keys["one"]), 2 * REFUSED_BYTES)
    late = server.post("completions", {"prompt": "x"}, Authorization=f"Bearer {keys['one']}")
    assert (late.status_code, late.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    server.service.rates._buckets.clear()


def test_silent_connections_make_room(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("[limits]\nheader_s = 60\nconnections = 8\n")
    with running(config=config) as own, ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr("qbe.server.connections._SILENT", 0.0)
        silent = [stack.enter_context(connect(own)) for _ in range(20)]
        for one in silent[10:]:
            one.sendall(b"GET /health HT")
        for _ in range(5):
            assert own.http.get("/health").status_code == 200
        until(lambda: answer(silent[0]) == b"", "the oldest is closed")


def test_a_settings_file_is_a_small_file(tmp_path: Path) -> None:
    began = time.monotonic()
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(QBEError, match="file"):
            load(path)
    large = tmp_path / "large.toml"
    with large.open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(QBEError, match="more than"):
        load(large)
    assert time.monotonic() - began < 5
