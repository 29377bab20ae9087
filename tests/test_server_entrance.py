"""Requests that come at once begin a few at a time, and the welcome do not wait behind the rest."""

from __future__ import annotations

import asyncio
import socket
import time
from asyncio import base_events
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from qbe.server.entrance import STARTS, Entrance, Line
from qbe.server.guard import Guard
from qbe.server.keys import new_key
from server_running import running

HEALTHY = b'{"status":"ok"}'
HEAD = "{} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(("pause", "share"), [(1.0, 0.5), (9.0, 0.1)])
def test_a_line_leaves_the_rest_of_the_loop_to_others(pause: float, share: float) -> None:
    """However its requests come: all at once, or one by one as soon as the last has begun."""
    cpu = 0.0

    async def look(at_once: int) -> float:
        nonlocal cpu
        loop, begun = asyncio.get_running_loop(), 0
        line, over = Line(pause, lambda: cpu), loop.create_future()
        started, spent = loop.time(), cpu

        def begin() -> None:
            nonlocal cpu, begun
            cpu += 0.001
            begun += 1
            if begun == 6 * STARTS:
                over.set_result(None)
            elif begun > at_once - 1:
                loop.call_soon(come)

        def come() -> None:
            if begun < 6 * STARTS and line.enter(begin, "one"):
                begin()

        for _ in range(at_once):
            come()
        await asyncio.wait_for(over, 60)
        took = cpu - spent
        return took / (took + loop.time() - started)  # that clock stands still while the other one runs

    for at_once in (1, 6 * STARTS):
        # Of six turns five are paused for.
        assert asyncio.run(look(at_once)) <= share * 6 / 5 + 0.02


def test_keys_and_addresses_take_turns() -> None:
    begun: list[str] = []

    async def look() -> None:
        entrance = Entrance()
        for sender, key, count in (("many", "a", 200), ("few", "b", 2), ("stranger", None, 200), ("other", None, 2)):

            def begin(sender: str = sender) -> None:
                begun.append(sender)

            for _ in range(count):
                if entrance.enter(begin, key, sender):
                    begin()
        while len(begun) < 404:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(look(), 60))
    assert Counter(begun) == {"many": 200, "few": 2, "stranger": 200, "other": 2}
    for few, many in (("few", "many"), ("other", "stranger")):
        last = max(n for n, sender in enumerate(begun) if sender == few)
        assert begun[:last].count(many) <= STARTS + 3


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
