"""The answers to one prompt, between the event loop and the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbe.engine.request_selector import Choice
from qbe.engine.result import Request, Result
from qbe.engine.sampling.logprobs import Logprob

if TYPE_CHECKING:
    from qbe.server.billing import Account


class Cancelled(Exception):
    """A job was cancelled before all of its answers began."""


@dataclass(frozen=True)
class Delta:
    """What a step added to one answer.

    Attributes:
        answer: which of the job's, from 0.
        tokens: the new ones.
        logprobs: where they were asked for, of those tokens whose text is in this delta.
        prompt_logprobs: of the whole prompt, with the first delta of an answer that asks for them.
        result: the answer's end, in its last delta.
        cached_tokens: of the prompt, that were in the cache.
        joules: that its steps have taken since the delta before.
        waited_s: seconds that the answer waited in the engine before its first step.
    """

    answer: int
    text: str
    tokens: list[int]
    logprobs: list[Logprob]
    prompt_logprobs: list[Logprob]
    result: Result | None
    cached_tokens: int = 0
    waited_s: float = 0.0
    joules: float = 0.0


Event = Delta | Exception | None  # None: the engine has taken the job


class Job:
    """The answers to one prompt, which goes through the model once.

    Args:
        requests: one for each answer; they differ in seed and constraint.
        choice: the prompt's tokens and blueprint, as `Engine.choose` gave them.
        events: gets, in the event loop, None once the engine has taken the job, then deltas; an exception if it
            refuses.
        ended: called once in the event loop, when no answer will go on.
        within: of average bits, the range that they have in the order of tiers; None: they are not in it.

    Attributes:
        results: of the answers that have ended, in order of the answers, None for the others.
        account: what it costs.
        epoch: of the health's ladder when it began.
        refused: whether the engine did not take it.
    """

    def __init__(
        self, requests: Sequence[Request], choice: Choice, events: asyncio.Queue[tuple[Job, Event]],
        ended: Callable[[Job], None], within: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        self.requests, self.choice, self._events, self._ended = requests, choice, events, ended
        self.within = within
        self.results: list[Result | None] = [None] * len(requests)
        self.account: Account | None = None
        self.epoch = 0
        self.refused = False
        self._taken = self._over = False

    @property
    def most_tokens(self) -> int:
        """Tokens that the prompt and its answers may have."""
        return self.choice[1].prompt_tokens + sum(r.params.max_tokens for r in self.requests)

    def hear(self, event: Event) -> None:
        """In the event loop: take what the engine's thread says."""
        if isinstance(event, Delta) and event.result is not None:
            self.results[event.answer] = event.result
        self._taken = self._taken or event is None
        self.refused = self.refused or (isinstance(event, Exception) and not self._taken)
        if not self._over and (isinstance(event, Exception) or None not in self.results):
            self._over = True
            self._ended(self)
        self._events.put_nowait((self, event))


def deliver(news: list[tuple[Job, Event]]) -> None:
    """In the event loop: tell every job what is new."""
    for job, event in news:
        job.hear(event)
