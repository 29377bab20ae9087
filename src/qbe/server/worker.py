"""The thread that steps the engine. Others send it work and hear of it through queues; it alone touches the engine."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from qbe.engine.engine import Engine
from qbe.engine.scheduling.sequence import Priority, Status
from qbe.errors import QBEError
from qbe.server.health.scorer import IdleScorer
from qbe.server.job import Cancelled, Delta, Event, Job

log = logging.getLogger(__name__)

_QUIET_S = 1.0  # without anybody, from when on answers are scored
_FAILURES = 3  # steps that fail in a row; then the engine counts as broken


@dataclass(frozen=True)
class Load:
    """What is in the engine.

    Attributes:
        running: answers in the batch.
        kv_usage: used part of the KV cache's bytes, 0 to 1.
    """

    running: int
    kv_usage: float


@dataclass
class _Running:
    """A job in the engine."""

    ids: list[str] = field(default_factory=list)
    over_for: Exception | None = None  # why no further answer begins
    seen: list[int] = field(default_factory=list)  # tokens of each answer that were told; -1 when it has ended
    shown: list[int] = field(default_factory=list)  # of these, those whose logprobs were
    asked_at: list[float] = field(default_factory=list)
    waited_s: list[float | None] = field(default_factory=list)

    def add(self, request_id: str) -> None:
        """One more answer is in the engine."""
        self.ids.append(request_id)
        self.seen.append(0)
        self.shown.append(0)
        self.asked_at.append(time.monotonic())
        self.waited_s.append(None)

    @property
    def over(self) -> bool:
        return all(s < 0 for s in self.seen)


class Worker(threading.Thread):
    """Makes the engine, then steps it while there is work.

    Args:
        make: makes the engine, in this thread.
        ready: called in the event loop when the engine is there, or with what went wrong.
        broken: called in the event loop when the engine cannot go on.
        deliver: called in this thread with what is new; has `deliver` called in the event loop.
        stepped: called in this thread after each step, with its seconds; returns the joules of the answers in it.
        scorer: of answers that have ended; it runs while there is no job.

    Attributes:
        engine: None until it is ready.
        line: places of the answers that waited after the last step.
    """

    def __init__(
        self, make: Callable[[], Engine], ready: Callable[[BaseException | None], None], broken: Callable[[], None],
        deliver: Callable[[list[tuple[Job, Event]]], None], stepped: Callable[[float], dict[str, float]],
        scorer: IdleScorer,
    ) -> None:  # fmt: skip
        super().__init__(name="qbe-engine", daemon=True)
        self.engine: Engine | None = None
        self.line: tuple[Priority, ...] = ()
        self._make, self._ready, self._broken = make, ready, broken
        self._deliver, self._stepped, self._scorer = deliver, stepped, scorer
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[Job, _Running] = {}
        self._busy = 0.0  # when somebody was in the engine last
        self._news: list[tuple[Job, Event]] = []
        self._spent: dict[str, float] = {}  # joules of answers that were not told yet
        self._begun = 0.0  # when the last step did, by `time.monotonic`

    def submit(self, job: Job) -> None:
        """Have a job answered."""
        self._inbox.put(lambda: self._start(job))

    def cancel(self, job: Job) -> None:
        """End a job before the next step; what is written stays in its results."""
        self._inbox.put(lambda: self._end(job))

    async def load(self, seconds: float) -> Load | None:
        """What is in the engine between two steps; None when it does not say within so many seconds."""
        answer: asyncio.Future[Load] = self._loop.create_future()
        self._inbox.put(lambda: self._tell(_resolve, answer, self._load()))
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            return None

    def _load(self) -> Load:
        assert self.engine is not None
        scheduler = self.engine.core.scheduler
        allocator = scheduler.allocator
        total = allocator.num_pages * allocator.page_bytes
        running = len(scheduler.running) if self._jobs else 0  # what is being scored is no answer
        return Load(running, 1 - allocator.free_bytes / total if total else 0.0)

    def stop(self) -> None:
        """Cancel everything and end."""
        self._inbox.put(None)

    def run(self) -> None:
        """The thread's life."""
        try:
            self.engine = engine = self._make()
        except BaseException as error:  # the command says it
            self._tell(self._ready, error)
            return
        self._tell(self._ready, None)
        try:
            with engine:
                self._serve(engine)
        except Exception:  # a defect of ours
            log.exception("the engine's thread ended")
            self._tell(self._broken)

    def _serve(self, engine: Engine) -> None:
        failures = 0
        try:
            while self._take_orders():
                if not self._jobs and self._scorer.waiting:
                    self._scorer.step(engine)
                    continue
                self._busy = time.monotonic()
                if engine.core.has_work():
                    try:
                        self._begun = time.monotonic()
                        engine.step()
                        for request_id, joules in self._stepped(time.monotonic() - self._begun).items():
                            self._spent[request_id] = self._spent.get(request_id, 0.0) + joules
                        failures = 0
                    except Exception:
                        log.exception("a step failed")
                        failures += 1
                self._report(engine)
                if failures == _FAILURES:
                    log.error("the engine fails at every step and is given up: restart the server")
                    self._tell(self._broken)
                    break
        finally:
            for job in list(self._jobs):
                self._end(job)
            self._report(engine)

    def _take_orders(self) -> bool:
        """What was asked meanwhile; waits for something to do. Whether to go on."""
        while True:
            try:
                order = self._inbox.get(not self._jobs, self._quiet_in() if self._scorer.waiting else None)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def _quiet_in(self) -> float:
        """Seconds until scoring may begin: who asks one thing after the other would wait for a step of it each time."""
        return max(0.0, self._busy + _QUIET_S - time.monotonic())

    def _start(self, job: Job) -> None:
        assert self.engine is not None
        self._scorer.leave(self.engine)
        try:
            first = self.engine.submit(job.requests[0], choice=job.choice)
        except Exception as error:
            if not isinstance(error, QBEError):
                log.exception("a request could not be started")
            self._tell(job.hear, error)
            return
        self._jobs[job] = running = _Running()
        running.add(first)
        self._tell(job.hear, None)

    def _end(self, job: Job) -> None:
        running = self._jobs.get(job)
        if running is not None:
            assert self.engine is not None
            running.over_for = running.over_for or Cancelled()
            for request_id, seen in zip(running.ids, running.seen, strict=True):
                if seen >= 0:
                    self.engine.cancel(request_id)

    def _report(self, engine: Engine) -> None:
        """Tell every job what is new; start the other answers of those whose prompt is through."""
        self.line = tuple(s.priority for s in engine.core.scheduler.waiting)
        for job, running in list(self._jobs.items()):
            rest = job.requests[len(running.ids) :]
            if rest and running.over_for is None and engine.started(running.ids[0]):
                try:
                    for request in rest:
                        running.add(engine.submit(request, fork_parent=running.ids[0], choice=job.choice))
                except QBEError as error:
                    running.over_for = error
                    self._end(job)
            for answer, request_id in enumerate(running.ids):
                if running.seen[answer] >= 0:
                    self._add_news(engine, job, running, answer, request_id)
            if running.over:
                del self._jobs[job]
                if running.over_for is not None and len(running.ids) < len(job.requests):
                    self._news.append((job, running.over_for))
        if self._news:
            self._deliver(self._news)
            self._news = []

    def _add_news(self, engine: Engine, job: Job, running: _Running, answer: int, request_id: str) -> None:
        sequence, seen, waited = engine.sequence(request_id), running.seen[answer], running.waited_s[answer]
        if waited is None and sequence.status is not Status.WAITING:
            waited = running.waited_s[answer] = max(0.0, self._begun - running.asked_at[answer])
        tokens = sequence.token_ids[len(sequence.prompt_ids) + seen :]
        done = engine.finished(request_id)
        if not tokens and not done:
            return
        text = "".join(engine.take_pieces(request_id))
        shown, running.shown[answer] = running.shown[answer], engine.shown(request_id)
        running.seen[answer] = -1 if done else seen + len(tokens)
        result = engine.take_result(request_id) if done else None
        if result is not None:
            self._scorer.offer(job, sequence, result)
        delta = Delta(
            answer, text, tokens, sequence.sampling.logprobs[shown : running.shown[answer]],
            [] if seen else sequence.sampling.prompt_logprobs, result, sequence.paging.cached,
            waited or 0.0, self._spent.pop(request_id, 0.0),
        )  # fmt: skip
        self._news.append((job, delta))

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has ended: nobody listens
            log.debug("the event loop has ended")


def _resolve(answer: asyncio.Future[Load], load: Load) -> None:
    if not answer.done():
        answer.set_result(load)
