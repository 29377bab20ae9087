"""Requests that come at once begin a few at a time, and known clients do not wait behind them."""

from __future__ import annotations

import asyncio
import socket
import time
from asyncio import base_events
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qbe.server.entrance import STARTS, Entrance
from qbe.server.guard import Guard
from qbe.server.keys import new_key
from server_running import running

HEALTHY = b'{"status":"ok"}'
HEAD = "{} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_a_turn_has_a_few_of_each_line_and_pauses_for_what_it_took() -> None:
    cpu, begun, turns = 0.0, list[str](), list[tuple[float, float, int]]()

    def begin(name: str) -> None:
        nonlocal cpu
        cpu += 0.002  # of CPU time for each
        begun.append(name)

    async def look() -> None:
        entrance, loop = Entrance(lambda: cpu), asyncio.get_running_loop()
        turn = entrance._turn

        def turned() -> None:
            turns.append((loop.time(), cpu, len(begun)))
            turn()

        entrance._turn = turned  # type: ignore[method-assign]
        for name, known, count in (("other", False, 5 * STARTS), ("known", True, STARTS + 1)):
            for number in range(count):  # whoever else waits, the known ones have places of their own
                if now := entrance.enter(lambda name=name: begin(name), known):  # type: ignore[misc]
                    begin(name)
                assert now == (number < STARTS)
        while entrance._turning:
            await asyncio.sleep(0.001)

    asyncio.run(look())
    assert Counter(begun) == {"other": 5 * STARTS, "known": STARTS + 1}
    assert begun[2 * STARTS] == "known"
    for before, now in pairwise(turns):
        assert now[2] - before[2] <= STARTS + 1
    for (at, spent, _), (later, now_spent, _) in pairwise(turns):
        assert later - at >= now_spent - spent - 0.002
    assert turns[0][1] == pytest.approx(2 * STARTS * 0.002)


def test_requests_at_once_do_not_hold_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, loops = 0, list[asyncio.AbstractEventLoop]()
    begun: list[tuple[int, str]] = []
    run_once, call = base_events.BaseEventLoop._run_once, Guard.__call__  # type: ignore[attr-defined]

    def counted(self: Any) -> None:
        nonlocal turn
        turn += 1
        run_once(self)

    async def seen(self: Guard, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            loops.append(asyncio.get_running_loop())
            begun.append((turn, scope["path"]))
        await call(self, scope, receive, send)

    monkeypatch.setattr(base_events.BaseEventLoop, "_run_once", counted)
    monkeypatch.setattr(Guard, "__call__", seen)
    config = tmp_path / "serve.toml"
    config.write_text(new_key("one")[1])
    with running(config=config) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection((host, int(port)), timeout=60))

        def answer(connection: socket.socket) -> bytes:
            found = b""
            while not found.endswith(HEALTHY):
                found += connection.recv(4096) or pytest.fail(f"it ends: {found!r}")
            return found

        known, others = connect(), [connect() for _ in range(200)]
        known.sendall(HEAD.format("GET /health").encode())
        assert answer(known).startswith(b"HTTP/1.1 200")
        began = len(begun)
        loops[-1].call_soon_threadsafe(time.sleep, 1.0)
        for each in others:
            each.sendall(HEAD.format("GET /v1/models").encode())
        known.sendall(HEAD.format("GET /health").encode())
        assert answer(known).startswith(b"HTTP/1.1 200")
        assert all(each.recv(4096).startswith(b"HTTP/1.1 401") for each in others)
    found = begun[began:]
    assert len(found) == 201
    assert max(Counter(at for at, _ in found).values()) <= 2 * STARTS
    assert [path for _, path in found].index("/health") <= 2 * STARTS
