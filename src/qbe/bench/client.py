"""Clients of a server, over HTTP: when was what asked, when did which tokens come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from qbe.bench.traffic import Arrival
from qbe.errors import QBEError

LIMIT_S = 600.0
HUNG_UP = "the client hung up"


@dataclass(frozen=True)
class Answered:
    """One stream as its client saw it.

    Attributes:
        status: of HTTP.
        first_s: from asking to the first token; infinite when none came.
        per_token_s: between later tokens, the mean; 0 for an answer of one token.
        seconds: from asking to the end.
        tokens: of the answer.
        bits: average bits of the weights.
        error: why it failed.
    """

    status: int
    first_s: float
    per_token_s: float
    seconds: float
    tokens: int
    bits: float
    error: str = ""


class Clients:
    """Asks a server. One event loop, one connection a request that is under way.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = self._connected()

    def _connected(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        return httpx2.AsyncClient(base_url=self._url, timeout=LIMIT_S, limits=limits)

    async def reconnect(self) -> None:
        """Hang up and begin with no connection."""
        await self.close()
        self._http = self._connected()

    async def close(self) -> None:
        """Hang up."""
        await self._http.aclose()

    async def metrics(self) -> dict[str, float]:
        """The server's, without their labels: those that differ in labels alone are added up."""
        values: dict[str, float] = {}
        for line in (await self._http.get("/metrics")).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    async def ask(self, body: dict[str, Any], hang_up: int | None = None) -> Answered:
        """One completion, as a stream.

        Args:
            hang_up: after so many events; 0 as soon as the headers are there.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        asked = time.perf_counter()
        first = last = asked
        tokens, bits, error, events = 0, 0.0, "", 0
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode()
                    now = time.perf_counter() - asked
                    return Answered(answer.status_code, float("inf"), 0.0, now, 0, 0.0, text[:300])
                if hang_up == 0:
                    return Answered(200, 0.0, 0.0, time.perf_counter() - asked, 0, 0.0, HUNG_UP)
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    events += 1
                    if events == hang_up:
                        return Answered(200, 0.0, 0.0, time.perf_counter() - asked, events, 0.0, HUNG_UP)
                    last = time.perf_counter()
                    if first == asked:
                        first = last
                    if '"usage":{' in line or '"error":{' in line:  # what comes before is only counted
                        said = json.loads(line[6:])
                        error = said.get("error", {}).get("message", "")
                        usage = said.get("usage") or {}
                        tokens = usage.get("completion_tokens", 0)
                        bits = usage.get("qbe", {}).get("average_weight_bits", 0.0)
        except httpx2.HTTPError as wrong:
            error = repr(wrong)
        if first == asked or error:
            return Answered(200, float("inf"), 0.0, time.perf_counter() - asked, tokens, bits, error or "no answer")
        each = (last - first) / (tokens - 1) if tokens > 1 else 0.0
        return Answered(200, first - asked, each, last - asked, tokens, bits)

    async def replay(self, arrivals: Sequence[Arrival]) -> list[Answered]:
        """Every request at its time, whatever became of those before it."""
        begun = time.perf_counter()

        async def one(arrival: Arrival) -> Answered:
            await asyncio.sleep(arrival.at - (time.perf_counter() - begun))
            return await self.ask(arrival.body())

        return list(await asyncio.gather(*map(one, arrivals)))


def all_good(answers: Sequence[Answered]) -> list[Answered]:
    """The answers. Raises QBEError when one of them failed."""
    for answer in answers:
        if answer.error:
            raise QBEError(f"the server answered {answer.status}: {answer.error}")
    return list(answers)
