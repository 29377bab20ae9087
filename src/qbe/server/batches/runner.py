"""Answers the lines of batches in places that nobody else wants, as their keys would be answered over HTTP.

A line begins only while a place is free and nobody waits, in the cheapest tier that its key may use, and in line it
stands behind all live requests until its batch's window is over. Its answer is booked before it is written down, under
an id that it has again when it runs again; so after `kill -9` it is neither lost nor billed twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.server.batches.lines import Line, Written, check, lines, written
from qbe.server.batches.protocol import Batch
from qbe.server.batches.store import BatchStore
from qbe.server.bodies import checked
from qbe.server.endpoint import Answering, Endpoint
from qbe.server.errors import APIError
from qbe.server.keys import ANYONE, Client
from qbe.server.service import Service
from qbe.server.wire import dumps

log = logging.getLogger(__name__)

_TICK_S = 0.5  # after which free places are looked for again
_PLACE_S = 0.05  # between two looks for a place
_AGAIN_S = 60.0  # at most, until a line that was refused for now is tried again
_SWEEP_S = 3600.0
_AT_ONCE = 256  # lines that are given up in one write
_EXPIRED = {"code": "batch_expired", "message": "the batch's completion window was over before this line was answered"}


@dataclass(eq=False)
class _Running:
    """A batch whose lines are answered."""

    rest: Iterator[Line | dict[str, Any]]
    so_far: Written
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    writes: set[asyncio.Task[None]] = field(default_factory=set)  # which go on when their line's task is cancelled
    ended: bool = False  # whether all lines have begun
    error: str = ""  # why it cannot go on


class BatchRunner:
    """Runs in the event loop.

    Args:
        store: where batches are kept.
        service: what answers.
        endpoints: by path.

    Attributes:
        store: the same.
    """

    def __init__(self, store: BatchStore, service: Service, endpoints: Mapping[str, Endpoint]) -> None:
        self.store, self._service, self._endpoints = store, service, endpoints
        self._running: dict[str, _Running] = {}
        self._woken, self._writing = asyncio.Event(), asyncio.Lock()
        self._swept, self._beginning = 0.0, 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with what is in the folder, if there is one and no other server has it."""
        try:
            self.store.open(make=False)
        except APIError as error:
            log.warning("%s", error)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; what was not answered is when the server runs again."""
        tasks = [] if self._task is None else [self._task]
        tasks += [t for running in self._running.values() for t in running.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writes = [w for running in self._running.values() for w in running.writes]
        await asyncio.gather(*writes, return_exceptions=True)
        self.store.close()

    def wake(self) -> None:
        """Something has changed."""
        self._woken.set()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self._turn()
            except (QBEError, OSError) as error:
                log.error("batches cannot be kept: %s", error)
            except Exception:
                log.exception("a defect of batches")

    async def _turn(self) -> None:
        if not self.store.is_open:
            return
        if time.monotonic() > self._swept + _SWEEP_S:
            self.store.sweep()
            self._swept = time.monotonic()
        for batch in [b for b in self.store.batches.values() if not b.over]:
            try:
                await self._move(batch)
            except OSError as error:  # of its own files
                self._running.pop(batch.id, None)
                self.store.put(batch.become("failed", self.store.now, errors=[_error("files_lost", str(error))]))
        while (batch_id := self._next()) is not None:
            running = self._running[batch_id]
            try:
                line = await asyncio.to_thread(next, running.rest, None)
            except OSError as error:
                line, running.error = None, str(error)
            if line is None:
                running.ended = True
                self.wake()
            elif isinstance(line, Line) and line.custom_id not in running.so_far.done:
                running.tasks.add(asyncio.create_task(self._line(batch_id, running, line)))

    async def _move(self, batch: Batch) -> None:
        """Into its next state, where its time has come."""
        now = self.store.now
        if batch.status == "validating":
            await self._validate(batch)
        elif batch.status == "finalizing":
            self._finish(batch)
        elif batch.id not in self._running:
            await self._resume(batch)
        elif self._client(batch) is None:
            await self._end(batch, "failed", errors=[_error("key_removed", "its key is no more")])
        elif self._running[batch.id].error:
            await self._end(batch, "failed", errors=[_error("files_full", self._running[batch.id].error)])
        elif batch.status == "cancelling":
            await self._end(batch, "cancelled")
        elif now >= batch.expires_at:
            await self._end(batch, "expired")
        elif self._running[batch.id].ended and not self._running[batch.id].tasks:
            await self._end(batch, "completed")

    async def _validate(self, batch: Batch) -> None:
        settings = self._service.settings
        path = self.store.content(batch.input_file_id)
        total, errors = await asyncio.to_thread(
            check, path, batch.endpoint, settings.batches.requests, settings.limits.body_bytes
        )
        now, batch = self.store.now, self.store.batches[batch.id]
        if errors:
            self.store.put(batch.become("failed", now, errors=errors))
        elif batch.status == "validating":
            self.store.put(batch.become("in_progress", now, total=total))
        else:  # it was cancelled meanwhile
            self.store.put(replace(batch, total=total))
        self.wake()

    async def _resume(self, batch: Batch) -> None:
        so_far = await asyncio.to_thread(written, *self._paths(batch.id))
        rest = lines(self.store.content(batch.input_file_id), batch.endpoint, self._service.settings.limits.body_bytes)
        self._running[batch.id] = _Running(rest, so_far)
        self._count(batch.id)
        self.wake()

    def _next(self) -> str | None:
        """The batch whose line begins next: of the key that has the fewest, the oldest."""
        at_work = {id: r for id, r in self._running.items() if self.store.batches[id].status == "in_progress"}
        keys = Counter({self.store.batches[id].key: 0 for id in at_work})
        for id, running in at_work.items():
            keys[self.store.batches[id].key] += len(running.tasks)
        if (admission := self._service.admission) is None:
            return None
        if sum(keys.values()) >= max(1, int(self._service.settings.batches.places * admission.running)):
            return None
        candidates = [
            (keys[batch.key], batch.created_at, id)
            for id, running in at_work.items()
            if not running.ended and keys[(batch := self.store.batches[id]).key] < self._most_lines(batch.key)
        ]
        return min(candidates)[2] if candidates else None

    def _most_lines(self, key: str) -> float:
        """Half of what a key may have at once; the rest is left to whoever waits for an answer."""
        settings = self._service.settings.keys.get(key)
        return float("inf") if settings is None or settings.concurrent is None else max(1, settings.concurrent // 2)

    async def _line(self, batch_id: str, running: _Running, line: Line) -> None:
        batch, task = self.store.batches[batch_id], asyncio.current_task()
        id = f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"
        try:
            status, body = await self._answer(batch, id, line)
            response = {"status_code": status, "request_id": id, "body": body}
            await self._record(batch, running, [{"id": id, "custom_id": line.custom_id, "response": response,
                                                 "error": None}], status == 200)  # fmt: skip
        except (APIError, OSError) as error:
            log.error("batch %s cannot go on: %s", batch_id, error)
            running.error = str(error)
        except Exception:
            log.exception("a defect of batches")
            running.error = "a defect of the server; its log says more"
        finally:
            assert task is not None
            running.tasks.discard(task)
            self.wake()

    async def _answer(self, batch: Batch, id: str, line: Line) -> tuple[int, dict[str, Any]]:
        """Status and body, as over HTTP. What is refused for now is tried again."""
        endpoint = self._endpoints[batch.endpoint]
        while True:
            try:
                body: Any = await asyncio.to_thread(checked, endpoint.body, line.body)
                if body.stream:
                    raise APIError(400, "stream: a batch does not stream: leave it out", param="stream")
                answering = await self._begin(endpoint, body, batch, id)
                answer = await answering.whole()
                await self._service.booked(answering.exchange)
                return 200, answer
            except APIError as error:
                if error.status == 503 or (error.status == 429 and error.retry_after is not None):
                    await asyncio.sleep(min(_AGAIN_S, error.retry_after or 1.0))
                    continue
                anthropic = batch.endpoint == "/v1/messages"
                return error.status, error.anthropic_body(id) if anthropic else error.body()

    async def _begin(self, endpoint: Endpoint, body: Any, batch: Batch, id: str) -> Answering:
        """Wait for a place that nobody else wants, and take it. Raises APIError."""
        while (admission := self._service.admission) is None or admission.spare <= self._beginning:
            await asyncio.sleep(_PLACE_S)
        client = self._client(batch)
        if client is None:
            raise APIError(503, "its key is no more")
        self._beginning += 1  # it has no place yet
        try:
            window_s = max(0.0, batch.expires_at - self.store.now)
            return await endpoint.begin(body, replace(client, line=id, window_s=window_s), self._service)
        finally:
            self._beginning -= 1

    def _client(self, batch: Batch) -> Client | None:
        """Whose it is; None for a key that is no more."""
        keys = self._service.settings.keys
        if not keys:
            return ANYONE if batch.key == ANYONE.name else None
        return Client(batch.key, keys[batch.key]) if batch.key in keys else None

    async def _record(self, batch: Batch, running: _Running, entries: list[dict[str, Any]], good: bool) -> None:
        """Write lines down, all or none; raises APIError where the key may keep no more."""
        write = asyncio.create_task(self._write(batch, running, entries, good))
        running.writes.add(write)
        write.add_done_callback(running.writes.discard)
        await asyncio.shield(write)

    async def _write(self, batch: Batch, running: _Running, entries: list[dict[str, Any]], good: bool) -> None:
        data = b"".join(dumps(one) + b"\n" for one in entries)
        async with self._writing:
            if len(data) > self.store.room(batch.key):
                raise APIError(413, "its answers have more bytes than its key may keep", code="files_full")
            await asyncio.to_thread(_append, self._paths(batch.id)[0 if good else 1], data)
            for one in entries:
                running.so_far.add(one["custom_id"], one["response"]["body"] if good else None)
            self._count(batch.id)

    def _count(self, id: str) -> None:
        so_far = self._running[id].so_far
        self.store.batches[id] = replace(self.store.batches[id], completed=so_far.completed, failed=so_far.failed,
                                          usage=dict(so_far.usage))  # fmt: skip

    async def _end(self, batch: Batch, outcome: str, **more: Any) -> None:
        """Nothing more of it is answered."""
        running = self._running[batch.id]
        tasks = [*running.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*running.writes, return_exceptions=True)
        if outcome == "expired":
            await self._give_up(batch, running)
        self._count(batch.id)
        output, errors = self._paths(batch.id)
        name = f"file-{batch.id.removeprefix('batch_')}"
        names = {f"{kind}_file_id": f"{name}-{kind}" for kind, path in (("output", output), ("error", errors))
                 if path.exists() and path.stat().st_size}  # fmt: skip
        del self._running[batch.id]
        ends = self.store.batches[batch.id].become("finalizing", self.store.now, outcome=outcome, **names, **more)
        self.store.put(ends)
        self._finish(ends)

    async def _give_up(self, batch: Batch, running: _Running) -> None:
        def some() -> list[dict[str, Any]]:
            left = (one for one in running.rest if isinstance(one, Line) and one.custom_id not in running.so_far.done)
            return [{"id": f"batch_req_{batch.id.removeprefix('batch_')}_{one.number}", "custom_id": one.custom_id,
                     "response": None, "error": _EXPIRED} for one in islice(left, _AT_ONCE)]  # fmt: skip

        # Those that had begun are not in `rest` any more: from the beginning, what is done left out.
        path = self.store.content(batch.input_file_id)
        running.rest = lines(path, batch.endpoint, self._service.settings.limits.body_bytes)
        with suppress(APIError):  # no room: the counts say how many are missing
            while entries := await asyncio.to_thread(some):
                await self._record(batch, running, entries, False)

    def _finish(self, batch: Batch) -> None:
        """Its files become files of its key. Again after a crash, whatever of it was done."""
        for path, id, name in zip(self._paths(batch.id), (batch.output_file_id, batch.error_file_id),
                                  ("output", "error"), strict=True):  # fmt: skip
            if id is not None and path.exists():
                self.store.add(batch.key, path, f"{batch.id}_{name}.jsonl", "batch_output", batch.keep_s, id)
        self.store.put(batch.become(batch.outcome, self.store.now))

    def _paths(self, id: str) -> tuple[Path, Path]:
        return self.store.content(f"{id}.output"), self.store.content(f"{id}.errors")


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "line": None, "param": None}
