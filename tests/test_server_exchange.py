"""The way of events from the engine's thread to a request, in orders that seldom happen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError
from qbe.server.contract import terms
from qbe.server.errors import APIError
from qbe.server.exchange import EngineRequest, Exchange
from qbe.server.job import Cancelled, Delta, Job
from qbe.server.keys import Client
from qbe.server.protocol import Contract
from qbe.server.settings import Settings


def exchange(answers: int = 1, prompts: int = 2, **contract: Any) -> tuple[Exchange, list[Job], list[Job]]:
    """A request with jobs that nobody runs, the list of those cancelled, and of those ended."""
    given = terms("default", Contract(**contract), Settings(), 0.0)
    asked = EngineRequest(Client("me", None), ["x"] * prompts, SamplingParams(), answers, given)
    cancelled, ended = list[Job](), list[Job]()
    found = Exchange(asked, cancelled.append, 30.0)
    choice: Any = ([0], None)
    found.jobs += [Job([None] * answers, choice, found.events, ended.append) for _ in range(prompts)]  # type: ignore[list-item]
    return found, cancelled, ended


def delta(answer: int, text: str, reason: str | None = None) -> Delta:
    result: Any = None if reason is None else SimpleNamespace(finish_reason=reason, error="it broke")
    return Delta(answer, text, [1], [], [], result)


async def read(found: Exchange) -> list[tuple[int, str]]:
    await found.taken()
    return [(index, d.text) async for index, d in found.deltas()]


def test_what_comes_before_all_prompts_are_taken_is_kept() -> None:
    async def run() -> None:
        found, _, ended = exchange(answers=2)
        one, two = found.jobs
        for job, event in (
            (one, None), (one, delta(0, "a")), (one, delta(1, "b", "stop")), (two, None), (one, delta(0, "c", "stop")),
            (two, delta(1, "d", "stop")), (two, delta(0, "e", "length")),
        ):  # fmt: skip
            job.hear(event)
        assert await read(found) == [(0, "a"), (1, "b"), (0, "c"), (3, "d"), (2, "e")]
        assert ended == [one, two]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("event", "status"),
    [(delta(0, "", "error"), 500), (delta(0, "", "cancelled"), 503), (Cancelled(), 503), (QBEError("the prompt"), 400),
     (RuntimeError("secret"), 500)],
)  # fmt: skip
def test_what_fails_has_its_status(event: Any, status: int) -> None:
    async def run() -> None:
        found, cancelled, ended = exchange()
        one, two = found.jobs
        for job in (one, two):
            job.hear(None)
        one.hear(event)
        one.hear(event)
        with pytest.raises(APIError) as refused:
            await read(found)
        assert refused.value.status == status
        assert "secret" not in refused.value.message
        assert ended == [one]  # once, whatever comes after
        found.over()
        assert two in cancelled

    asyncio.run(run())


def test_what_is_late_is_cancelled_and_cut_or_refused() -> None:
    async def run() -> None:
        for contract, status in (({"max_latency_ms": 1}, None), ({}, 504)):
            found, cancelled, _ = exchange(prompts=1, **contract)
            if status is not None:
                found._expire("timeout")
            while not cancelled:
                await asyncio.sleep(0.001)
            found.jobs[0].hear(None)
            found.jobs[0].hear(delta(0, "a", "cancelled"))
            if status is None:
                assert await read(found) == [(0, "a")]
            else:
                with pytest.raises(APIError) as refused:
                    await read(found)
                assert refused.value.status == status
            found.over()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.server.exchange._GRACE_S", -29.99)  # of the 30 s that `exchange` gives

    async def run() -> None:
        found, _, _ = exchange()
        found.jobs[0].hear(None)  # the other one is never taken
        with pytest.raises(APIError) as refused:
            await read(found)
        assert (refused.value.status, refused.value.code) == (504, "timeout")
        found.over()

    asyncio.run(asyncio.wait_for(run(), 30))
