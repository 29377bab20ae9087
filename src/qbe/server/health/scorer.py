"""Scores a sample of finished answers in steps that nobody else wants; everything here runs in the engine's thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from qbe.engine.engine import Engine
from qbe.engine.result import Result
from qbe.engine.sampling.answer_scoring import AnswerScore, AnswerScoring
from qbe.engine.sampling.calibration_inputs import CalibrationInputs
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError
from qbe.server.health.settings import Health
from qbe.server.job import Job
from qbe.server.rollout.arms import Arm
from qbe.store.calibration_text import built_in

log = logging.getLogger(__name__)

_LEFT = 32  # times that somebody came while an answer was scored, after which it is given up
_WAITING = 16  # answers that wait to be scored; more are left out
_TIE = 0.5  # nats by which a greedy token may be behind the likeliest: kernels round, and rounding decides near ties
_PASSAGES = (4, 448)  # of the calibration text, and tokens of each


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer, and how it was scored.

    Attributes:
        id: of the answer and its record.
        tier, prompt_class: it was served at, and what it was.
        epoch: of the ladder when it began.
        context: tokens of its prompt.
        parity: of a greedy answer with draft tokens, how many of its scored tokens are not what its own bits find
            likeliest; None for others.
        arm: of a rollout.
    """

    id: str
    tier: str
    prompt_class: str
    epoch: int
    context: int
    parity: int | None
    score: AnswerScore
    arm: Arm | None = None


class Listener(Protocol):
    """Who is told; in the engine's thread."""

    def on_scored(self, answer: ScoredAnswer) -> None:
        """An answer was scored."""

    def on_not_scored(self, why: str) -> None:
        """One was drawn, and is not."""

    def on_scoring(self, seconds: float) -> None:
        """A step took so long."""

    def on_inputs(self, inputs: tuple[float | None, ...], tokens: int) -> None:
        """What sites read of the calibration text, in passages of so many tokens."""


@dataclass(frozen=True)
class _Kept:
    job: Job
    served: Sequence
    result: Result


class IdleScorer:
    """Takes answers as they end, and scores them while no request is in the engine.

    Args:
        settings: those in use now.
        listener: is told.
        share: of answers like this job's that are scored.

    Attributes:
        why_not: why nothing is scored at all; None: it is.
    """

    def __init__(
        self, settings: Callable[[], Health], listener: Listener, share: Callable[[Job], float]
    ) -> None:  # fmt: skip
        self._settings, self._listener, self._share = settings, listener, share
        self._waiting: deque[_Kept] = deque()
        self._kept: _Kept | None = None  # that is scored now
        self._running: AnswerScoring | CalibrationInputs | None = None
        self._calibrated, self._left = False, 0
        self.why_not: str | None = None

    def begin(self, engine: Engine) -> None:
        """There is an engine."""
        if engine.core.plan.limits is not None:
            self.why_not = "device_memory bounds what can be read, so that there is no widest gear to score by"
        if self.why_not is not None and self._settings().sample:
            log.warning("health.sample does nothing here: %s", self.why_not)

    @property
    def waiting(self) -> bool:
        """Whether there is something to score."""
        return self._running is not None or bool(self._waiting)

    def offer(self, job: Job, served: Sequence, result: Result) -> None:
        """An answer has ended."""
        drawn = int(result.id[:8], 16) / 2**32 < self._share(job)  # ids are random
        ended = result.finish_reason in ("stop", "length") and bool(result.token_ids)
        if not drawn or not ended or self.why_not is not None:
            return
        if len(self._waiting) >= _WAITING:
            self._listener.on_not_scored("too many wait")
        else:
            self._waiting.append(_Kept(job, served, result))

    def step(self, engine: Engine) -> None:
        """Run one step of scoring. Nobody else is in the engine."""
        began = time.monotonic()
        try:
            if self._running is None:
                self._running = self._next(engine)
            found = engine.run_idle(lambda _: None if self._running is None else self._running.step())
        except QBEError as error:
            if self._kept is not None:
                self._listener.on_not_scored("not possible")
                log.info("an answer was not scored: %s", error)
            self._running = self._kept = None
            return
        except Exception:  # a defect, or a device that fails, which requests will find out for themselves
            self._running, self._kept, self.why_not = None, None, "scoring failed; the log says more"
            self._waiting.clear()
            log.exception("answers are not scored any more")
            return
        self._listener.on_scoring(time.monotonic() - began)
        if found is not None:
            self._take(engine, found)

    def leave(self, engine: Engine) -> None:
        """Somebody comes: give up what scoring holds of the engine; it goes on later."""
        running = self._running
        if running is None:
            return
        engine.run_idle(lambda _: running.leave())
        self._left += 1
        if self._left > _LEFT and self._kept is not None:
            self._running = self._kept = None
            self._listener.on_not_scored("interrupted")

    def _next(self, engine: Engine) -> AnswerScoring | CalibrationInputs:
        if not self._calibrated:
            self._calibrated = True  # once, whatever comes of it
            passages = built_in().segments(engine.tokenizer, _PASSAGES, engine.model)
            return CalibrationInputs(engine.core, passages.tolist())
        self._kept = kept = self._waiting.popleft()
        self._left = 0
        at = int(kept.result.id[8:16], 16) / 2**32
        return AnswerScoring(engine.core, kept.served, self._settings().tokens, at, inputs=True)

    def _take(self, engine: Engine, found: AnswerScore | tuple[float | None, ...]) -> None:
        running, kept, self._running, self._kept = self._running, self._kept, None, None
        if isinstance(running, CalibrationInputs):
            self._listener.on_inputs(tuple(found), running.tokens)  # type: ignore[arg-type]
        elif kept is not None and isinstance(found, AnswerScore):
            engine.record_quality(kept.result.id, found.describe())
            self._listener.on_scored(_scored(kept, found))


def _scored(kept: _Kept, score: AnswerScore) -> ScoredAnswer:
    result, account = kept.result, kept.job.account
    return ScoredAnswer(
        id=result.id, tier=kept.job.requests[0].budget.tier if account is None else account.asked.terms.tier,
        prompt_class=result.profile.prompt_class, epoch=kept.job.epoch, context=result.prompt_tokens,
        parity=_parity(kept, score), score=score, arm=None if account is None else account.asked.terms.arm,
    )  # fmt: skip


def _parity(kept: _Kept, score: AnswerScore) -> int | None:
    """How many of its tokens speculation should not have let through. Answers whose tokens something else has a say in
    are not looked at: penalties, a grammar, bits that were read beyond what was asked."""
    result, params = kept.result, kept.served.params
    plain = kept.served.sampling.constraint is None and not params.logit_bias and params.repetition_penalty == 1
    plain = plain and not params.presence_penalty and not params.frequency_penalty
    if not result.drafted_tokens or not params.greedy or not plain or result.shared_bits or result.misses:
        return None
    return sum(behind > _TIE for behind in score.behind)
