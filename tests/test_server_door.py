"""What headers say of who is at the door, and who goes on being welcome."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qbe.server.door import key_at
from qbe.server.keys import Client, new_key
from qbe.server.rates import REFUSED_BYTES, Rates
from qbe.server.settings import Settings
from qbe.server.settings_file import load
from server_running import running

POST = "POST /v1/completions HTTP/1.1\r\nHost: x"


@pytest.fixture
def door(tmp_path: Path) -> tuple[Settings, str]:
    key, lines = new_key("one")
    (tmp_path / "serve.toml").write_text(lines + "requests_per_minute = 2\n")
    return load(tmp_path / "serve.toml"), key


@pytest.mark.parametrize("header", ["Authorization: Bearer {}", "x-api-key: {}", "AUTHORIZATION:   bearer {}  "])
def test_a_key_is_known_by_the_headers_that_carry_it(door: tuple[Settings, str], header: str) -> None:
    settings, key = door
    head = f"{POST}\r\n{header.format(key)}\r\nAccept: */*".encode()
    assert key_at(head, settings, Rates()) == "one"
    assert key_at(f"{POST}\r\n{header.format('qbe-other')}".encode(), settings, Rates()) is None


def test_who_has_no_key_is_welcome_only_to_ask_how_the_server_is(door: tuple[Settings, str]) -> None:
    settings, _ = door
    for line, welcome in (("GET /health", True), ("GET /ready", True), ("POST /health", False), ("GET /healthy", False),
                          ("GET /v1/models", False), ("GET /", False)):  # fmt: skip
        found = key_at(f"{line} HTTP/1.1\r\nHost: x\r\nX-Api-Key".encode(), settings, Rates())
        assert (found is not None) == welcome
    assert key_at(POST.encode(), Settings(), Rates()) == "anonymous"  # who needs none


@pytest.mark.parametrize("over", ["requests", "refusals"])
def test_who_asks_too_much_waits_with_the_rest(door: tuple[Settings, str], over: str) -> None:
    settings, key = door
    now = 0.0
    rates, client = Rates(lambda: now), Client("one", settings.keys["one"])
    head = f"{POST}\r\nAuthorization: Bearer {key}".encode()
    for _ in range(2 if over == "requests" else 1):
        assert key_at(head, settings, rates) == "one"
        if over == "requests":
            rates.charge(client, 1)
        else:
            rates.refused(client, REFUSED_BYTES)
    assert key_at(head, settings, rates) is None
    now = 120.0
    assert key_at(head, settings, rates) == "one"


def test_tiny_chunks_cost_their_key_what_they_cost_the_server(tmp_path: Path) -> None:
    key, lines = new_key("one")
    (tmp_path / "serve.toml").write_text(lines)
    with running(config=tmp_path / "serve.toml") as server:
        host, port = server.url.removeprefix("http://").split(":")
        answers: list[bytes] = []
        for _ in range(40):
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
                head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
                connection.sendall(head.encode() + b"1\r\n[\r\n" * 2500)
                answers.append(connection.recv(4096)[:12])
            if answers[-1] == b"HTTP/1.1 429":
                break
        refused: Any = server.post("completions", {"prompt": "x"}, Authorization=f"Bearer {key}")
    assert Counter(answers)[b"HTTP/1.1 400"] in range(4, 32)
    assert answers[-1] == b"HTTP/1.1 429"
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
