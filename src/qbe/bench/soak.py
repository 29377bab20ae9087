"""Thousands of connections, half of which hang up: does everybody else get an answer, and does anything stay behind?"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from qbe.bench.client import HUNG_UP, LIMIT_S, Answered, Clients
from qbe.bench.traffic import Arrival
from qbe.errors import QBEError


@dataclass(frozen=True)
class State:
    """A server in which nothing runs.

    Attributes:
        files: open ones, sockets included.
        memory: resident, bytes.
        pages: used part of the KV cache, 0 to 1.
        inside: answers that run or wait.
    """

    files: int
    memory: int
    pages: float
    inside: int


@dataclass(frozen=True)
class Soaked:
    """What came of it.

    Attributes:
        states: at the beginning and after each part of the connections.
        stayed: connections that waited for their answer, and how many of them got all of it.
        hung_up: that went away before its end.
        errors: of those that stayed, each once.
        most: connections that were open at once.
        seconds: in all.
        open_rows: of the ledger, that were never closed.
    """

    states: list[State]
    stayed: tuple[int, int]
    hung_up: int
    errors: list[str]
    most: int
    seconds: float
    open_rows: int


async def soak(
    clients: Clients, parts: Sequence[Sequence[Arrival]], hang_up: float, ledger: Path, tick: Callable[[], None]
) -> Soaked:
    """Replay each part, then wait until the server is idle and look at it.

    Args:
        parts: arrivals.
        hang_up: part of the connections that hang up: while they wait, before the first token, or within the answer.
        tick: called after each part.

    Raises:
        QBEError: the server does not become idle.
    """
    draw, begun = random.Random(0), time.perf_counter()
    open_now = most = 0
    stayed: list[Answered] = []
    gone = 0

    async def one(arrival: Arrival, since: float, leaves: bool) -> None:
        nonlocal open_now, most, gone
        await asyncio.sleep(arrival.at - (time.perf_counter() - since))
        open_now += 1
        most = max(most, open_now)
        try:
            if not leaves:
                stayed.append(await clients.ask(arrival.body()))
                return
            gone += 1
            if draw.random() < 0.5:  # whatever it is doing by then
                with suppress(TimeoutError):
                    await asyncio.wait_for(clients.ask(arrival.body()), draw.uniform(0.0, 2.0))
            else:
                await clients.ask(arrival.body(), hang_up=draw.randrange(arrival.tokens))
        finally:
            open_now -= 1

    states = [await _idle(clients)]
    for part in parts:
        since = time.perf_counter()
        await asyncio.gather(*(one(a, since, draw.random() < hang_up) for a in part))
        states.append(await _idle(clients))
        tick()
    good = [a for a in stayed if not a.error]
    errors = sorted({a.error for a in stayed if a.error and a.error != HUNG_UP})
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        open_rows = db.execute("SELECT count(*) FROM entries WHERE finish IS NULL").fetchone()[0]
    return Soaked(states, (len(stayed), len(good)), gone, errors, most, time.perf_counter() - begun, open_rows)


async def _idle(clients: Clients) -> State:
    """What the server has when nothing runs and nobody but us is connected."""
    await clients.reconnect()
    ends, last = time.monotonic() + LIMIT_S, None
    while time.monotonic() < ends:
        metrics = await clients.metrics()
        inside = int(metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"])
        state = State(int(metrics["process_open_fds"]), int(metrics["process_resident_memory_bytes"]),
                      metrics["vllm:kv_cache_usage_perc"], inside)  # fmt: skip
        if last is not None and inside == 0 and state.files == last.files:
            return state
        last = state
        await asyncio.sleep(0.5)
    raise QBEError(f"the server does not become idle: {last}")
