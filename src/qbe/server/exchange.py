"""One HTTP request while it is answered: what it asks of the engine, and what comes back of each answer."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qbe.engine.result import PromptInput, Request, Result
from qbe.engine.sampling.constraint import Constraint
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError
from qbe.server.contract import Terms
from qbe.server.errors import APIError
from qbe.server.job import Cancelled, Delta, Event, Job
from qbe.server.keys import Client
from qbe.server.observe import logs, traces
from qbe.server.protocol import Contract

if TYPE_CHECKING:
    from qbe.server.billing import Account
    from qbe.server.grammar import Grammars
    from qbe.server.structure import Structure

_GRACE_S = 30.0  # after its time limit, for the engine to end a request

SHUTTING_DOWN = APIError(503, "the server is shutting down: try again later", code="shutting_down", retry_after=5)


@dataclass(frozen=True)
class EngineRequest:
    """What one HTTP request asks of the engine.

    Attributes:
        prompts: each gets `n` answers.
        params: of the first answer; the i-th one has the seed s + i. `max_tokens` is a wish if `lenient`.
        lenient: whether answers may be shorter because the cache is small.
        structure: what every answer must be.
        variables: more that the chat template may read.
        ignored: fields of the body that change nothing here.
        field, length_field: of the body, that the prompt and `max_tokens` came from.
        prefix: of the answer's id.
        stream: whether tokens go out as they come.
        hidden: tokens of each answer that nobody asked for.
    """

    client: Client
    prompts: Sequence[PromptInput]
    params: SamplingParams
    n: int
    terms: Terms
    tools: list[dict[str, Any]] | None = None
    structure: Structure | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    lenient: bool = False
    field: str = "prompt"
    length_field: str = "max_tokens"
    prefix: str = "cmpl-"
    stream: bool = False
    hidden: int = 0

    def requests(self, first: Request, grammars: Grammars | None) -> list[Request]:
        """The answers to a prompt: the first as it is given, the others with seeds of their own."""
        requests = []
        for i in range(self.n):
            seed = None if first.params.seed is None else (first.params.seed + i) % 2**63
            params = replace(first.params, seed=seed, prompt_logprobs=first.params.prompt_logprobs if i == 0 else None)
            wanted = self.structure
            constraint = (
                None if wanted is None or grammars is None else grammars.constraint(wanted.matcher, wanted.limits)
            )
            requests.append(replace(first, params=params, constraint=constraint))
        return requests

    def refused(self, error: QBEError) -> APIError:
        """The engine's refusal, with the field of the body."""
        said, param = str(error), self._param(error.field)
        return APIError(400, said if param is None or param in said else f"{param}: {said}", param=param)

    def _param(self, field: str | None) -> str | None:
        """The field of the body that the engine's came from."""
        if field in ("prompt", "max_tokens"):
            return self.field if field == "prompt" else self.length_field
        if field == "bits":  # whatever bounded them
            bounds = ("bits", "min_bits", "max_bits", "policy")
            given = (f"qbe.{name}" for name in bounds if getattr(self.terms.contract, name) is not None)
            return next(given, "service_tier")
        return f"qbe.{field}" if field in Contract.model_fields else field


class Exchange:
    """The answers to one HTTP request while they are written.

    Args:
        cancel: ends a job.
        seconds: until the request has taken too long.

    Attributes:
        id: of the request and of its answer.
        jobs, left: one for each prompt, and how many of them are not over.
        came: when it did, in the loop's time.
        late: why it was cut, "timeout", "latency" or "shutdown"; empty when it was not.
        parent: headers of the trace that it belongs to.
        request_id: of the HTTP request, as its answer's header says it.
        preparing: the limit on the wait for a prompt's tokens and blueprint; None while nobody waits for them.
        ends_at, gone_at: in the loop's time, when its answers end, and when nobody waits for them any more.
    """

    def __init__(self, asked: EngineRequest, cancel: Callable[[Job], None], seconds: float) -> None:
        self.asked, self.jobs, self.id = asked, list[Job](), asked.client.line or f"{asked.prefix}{uuid.uuid4().hex}"
        self.left = 0
        self.preparing: asyncio.Timeout | None = None
        self.events: asyncio.Queue[tuple[Job, Event]] = asyncio.Queue()
        self._early: deque[tuple[Job, Event]] = deque()  # what was heard before all jobs were taken
        self._cancel, self._loop = cancel, asyncio.get_running_loop()
        self.came = self._loop.time()
        self.parent, self.request_id = traces.parent.get(), logs.request_id.get()
        self.ends_at = self.came + seconds
        self.gone_at = self.ends_at + _GRACE_S
        latency, self.late = asked.terms.contract.max_latency_ms, ""
        self._timers = [
            self._loop.call_at(self.ends_at, self._expire, "timeout"), self._loop.call_at(self.gone_at, self._give_up),
        ]  # fmt: skip
        if latency is not None:
            self._timers.append(self._loop.call_later(latency / 1e3, self._expire, "latency"))

    @property
    def accounts(self) -> list[Account]:
        """What each of its prompts costs."""
        return [job.account for job in self.jobs if job.account is not None]

    @property
    def refused(self) -> bool:
        """Whether the engine did not take one of its prompts, so that nothing of it is answered."""
        return any(job.refused for job in self.jobs)

    def began(self) -> None:
        """Its jobs are with the engine. What expired while there was nothing to cut yet is cut now."""
        if self.late:
            self.cancel()

    def shut_down(self) -> None:
        """End it because the server ends; its client hears that."""
        if self.preparing is not None and not self.preparing.expired():
            self.late = "shutdown"
            self.preparing.reschedule(self._loop.time())
        self._expire("shutdown")

    def _expire(self, why: str) -> None:
        self.late = self.late or why
        self.cancel()

    def _give_up(self) -> None:
        # One timer rather than a limit on each wait for an event, which costs more than the rest of that wait.
        for job in self.jobs[:1]:
            self.events.put_nowait((job, APIError(504, "the engine does not answer", code="timeout")))

    def cancel(self) -> None:
        """End what still runs; its pages are free before the next step."""
        for job in self.jobs:
            if None in job.results:
                self._cancel(job)

    def over(self) -> None:
        """Nobody reads any more."""
        self.cancel()
        for timer in self._timers:
            timer.cancel()

    @property
    def unbegun(self) -> APIError:
        """What its client hears when it was cut before all of its answers began."""
        if self.late == "latency":
            return APIError(
                429, f"qbe.max_latency_ms is {self.asked.terms.contract.max_latency_ms:g}, which was over before all "
                "answers began: allow more time, or try again later", param="qbe.max_latency_ms", code="deadline",
            )  # fmt: skip
        if self.late == "timeout":
            return APIError(504, "the request took too long before it began", code="timeout")
        return SHUTTING_DOWN

    async def taken(self) -> None:
        """Until the engine has taken all jobs. Raises APIError when it refuses one."""
        early: list[tuple[Job, Event]] = []
        for _ in self.jobs:
            while (event := await self._next())[1] is not None:  # the first of them may be written already
                if isinstance(event[1], Exception):
                    raise self._failed(event[1])
                early.append(event)
        self._early.extend(early)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What comes of each answer, with its index; `taken` must have been awaited.

        Raises:
            APIError: an answer failed or took too long.
        """
        left = len(self.jobs) * self.asked.n
        while left:
            job, event = await self._next()
            if isinstance(event, Exception):
                raise self._failed(event)
            if event is None:
                continue
            if event.result is not None:
                left -= 1
                self._check(event.result, getattr(job.requests[event.answer], "constraint", None))
            yield self.jobs.index(job) * self.asked.n + event.answer, event

    async def _next(self) -> tuple[Job, Event]:
        return self._early.popleft() if self._early else await self.events.get()

    def _check(self, result: Result, constraint: Constraint | None) -> None:
        if result.finish_reason == "error":
            if constraint is not None and constraint.error is not None:
                raise APIError(400, constraint.error, code="grammar_exhausted")
            raise APIError(500, result.error or "the model failed", code="engine_error")
        if result.finish_reason == "cancelled" and self.late == "timeout":
            raise APIError(504, "the request took too long: ask for fewer tokens", code="timeout")
        if result.finish_reason == "cancelled" and self.late != "latency":
            raise SHUTTING_DOWN

    def _failed(self, error: Exception) -> APIError:
        if isinstance(error, Cancelled):
            return self.unbegun
        if isinstance(error, APIError):
            return error
        if isinstance(error, QBEError):
            return self.asked.refused(error)
        return APIError(500, "the request could not be started; the server's log says more", code="engine_error")


async def while_connected(disconnected: Callable[[], Any], work: Any) -> Any:
    """The result of `work`, or None if the client hangs up before; then it is cancelled.

    Args:
        disconnected: awaits the client's end.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, gone):
            if not future.done():
                future.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await future
