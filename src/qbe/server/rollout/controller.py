"""Moves a rollout on: up step by step as time goes and nothing is wrong, off at once where something is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qbe.errors import QBEError
from qbe.server.rollout.arms import Arm, as_candidate, place, takes_part, unit
from qbe.server.rollout.evidence import Evidence
from qbe.server.rollout.metrics import RolloutMetrics
from qbe.server.rollout.settings import MetricName, Rollout
from qbe.server.rollout.state import State, StateFile, identity

if TYPE_CHECKING:
    from qbe.server.contract import Terms
    from qbe.server.keys import Client

log = logging.getLogger(__name__)

Act = Literal["abort", "promote", "pause", "resume"]
_SAVE_S = 30.0  # between two writes of how long a step has run


@dataclass
class _Running:
    """The rollout of the settings in use."""

    rollout: Rollout
    id: str
    state: State
    evidence: Evidence
    run: int  # number of this rollout's step among all that this server has begun
    saved: State | None = None

    @property
    def weight(self) -> float:
        """Percent that the candidate answers now."""
        if self.state.phase in ("aborted", "successful"):
            return 0.0 if self.state.phase == "aborted" else 100.0
        return self.rollout.steps[self.state.step].weight

    @property
    def seconds(self) -> float:
        """That its step is to run for."""
        return 60 * self.rollout.steps[self.state.step].minutes


class RolloutController:
    """Of one server. Threads may share it.

    Args:
        settings: those in use now; None: no rollout.
        ledger: the file that the state lies beside.
        metrics: are told of all.
        clock: seconds.

    Attributes:
        aborts: how often a candidate was aborted.
        scores: whether answers can be scored.
        held: whether the server's health has actions in force: then both arms are served otherwise than they should
            be, so that time stands still and nothing counts.
    """

    def __init__(
        self, settings: Callable[[], Rollout | None], ledger: Path, metrics: RolloutMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._settings, self._file, self.metrics, self._clock = settings, StateFile(ledger), metrics, clock
        self._looked = self._saved_at = clock()
        self._lock, self._writing = threading.RLock(), threading.Lock()  # taken in this order
        self._now: _Running | None = None
        self._runs = self.aborts = 0
        self.scores, self.held = True, False

    def _running(self) -> _Running | None:
        """The rollout of the settings as they are now."""
        rollout = self._settings()
        if rollout is None or rollout.candidate is None:
            self._now = None
        elif self._now is None or self._now.rollout is not rollout:
            id = identity(rollout)
            if self._now is not None and self._now.id == id:  # the file was read again, and says the same
                self._now.rollout = rollout
            else:
                self.close()
                state = self._file.read(id, len(rollout.steps))
                self._now = _Running(rollout, id, state, Evidence(rollout), self._number(), state)
                more = f" ({state.cause})" if state.cause else ""
                log.warning("rollout %s: %s, %g %% for the candidate%s", id, state.phase, self._now.weight, more)
        return self._now

    def _number(self) -> int:
        self._runs += 1
        return self._runs

    @property
    def weight(self) -> float:
        """Percent that the candidate answers now."""
        with self._lock:
            now = self._running()
            return 0.0 if now is None else now.weight

    @property
    def sample(self) -> float:
        """Share of the candidate's answers that are scored at least."""
        with self._lock:
            now = self._running()
            return 0.0 if now is None else now.rollout.sample

    def assign(self, terms: Terms, client: Client, conversation: str | None) -> Terms:
        """The terms of the arm that a request is in; as they are where it takes no part."""
        with self._lock:
            now = self._running()
            if now is None or now.rollout.candidate is None or not takes_part(now.rollout.candidate, terms):
                return terms
            there = place(now.rollout.salt, unit(now.rollout, client, conversation))
            if there < now.weight:
                return as_candidate(terms, now.rollout.candidate, now.run)
            return replace(terms, arm=Arm("stable", now.run))

    def saw(self, arm: Arm | None, values: Mapping[MetricName, float]) -> None:
        """An answer of an arm has shown this. A candidate that is found to be worse is aborted here and now."""
        if arm is None or not values:
            return
        with self._lock:
            now = self._running()
            if now is None or arm.run != now.run or self.held or now.state.phase not in ("progressing", "paused"):
                return
            now.evidence.add(arm.name, values)
            if arm.name == "candidate" and (name := now.evidence.judge()) is not None:
                found, limit = now.evidence.failed[name], now.evidence.limit(name)
                said = ", ".join(f"{a} {found.values[a]:.4g}" for a in sorted(found.values))
                self._abort(now, f"{name}: {said}; limit {limit:g}", name)

    def abort(self, cause: str, name: str) -> None:
        """Nothing more goes to the candidate; what runs goes on. Again: nothing.

        Args:
            cause: in one line. name: in one word.
        """
        with self._lock:
            now = self._running()
            if now is not None and now.state.phase != "aborted":
                self._abort(now, cause, name)

    def _abort(self, now: _Running, cause: str, name: str) -> None:
        self.aborts += 1
        self.metrics.aborted(name)
        self._change(now, replace(now.state, phase="aborted", cause=cause))

    def act(self, act: Act) -> None:
        """What an operator wants. Raises QBEError where that cannot be."""
        with self._lock:
            now = self._running()
            if now is None:
                raise QBEError("there is no rollout: give [rollout] in the settings")
            phase = now.state.phase
            if act == "abort":
                self.abort("an operator aborted it", "operator")
            elif act == "promote":
                self._change(now, replace(now.state, phase="successful", cause=""))
            elif act == "pause":
                if phase != "progressing":
                    raise QBEError(f"it cannot be paused: it is {phase}")
                self._change(now, replace(now.state, phase="paused"))
            elif phase == "aborted":
                self._begin(now, 0)
            elif phase == "paused":
                self._change(now, replace(now.state, phase="progressing"))
            else:
                raise QBEError(f"there is nothing to resume: it is {phase}")

    def look(self) -> None:
        """About once a second: time goes on."""
        self._follow()
        with self._lock:
            passed, self._looked = self._clock() - self._looked, self._clock()
            now = self._running()
            if now is not None and now.state.phase == "progressing" and not self.held:
                now.state = replace(now.state, elapsed_s=now.state.elapsed_s + passed)
                if now.state.elapsed_s >= now.seconds and now.evidence.outcome(self.scores) == "successful":
                    if now.state.step + 1 < len(now.rollout.steps):
                        self._begin(now, now.state.step + 1)
                    else:
                        self._change(now, replace(now.state, phase="successful"))
            self.metrics.looked(self.describe())
            if now is None or now.saved == now.state or self._clock() - self._saved_at < _SAVE_S:
                return
            self._writing.acquire()  # so that nothing older is written after what comes meanwhile
            state = now.state
        try:  # while others go on
            self._write(now, state)
        finally:
            self._writing.release()

    def _follow(self) -> None:
        """What another server with this ledger has aborted is off here, too, rather than written over."""
        with self._lock:
            now = self._running()
        if now is None or now.state.phase == "aborted":
            return
        theirs = self._file.read(now.id, len(now.rollout.steps))
        if theirs.phase == "aborted":
            with self._lock:
                if self._now is now and now.state.phase != "aborted":
                    self._abort(now, theirs.cause, "elsewhere")

    def _begin(self, now: _Running, step: int) -> None:
        """A step, with evidence of its own."""
        now.evidence, now.run = Evidence(now.rollout), self._number()
        self._change(now, State("progressing", step))

    def _change(self, now: _Running, state: State) -> None:
        now.state = state
        more = f" ({state.cause})" if state.cause else ""
        log.warning("rollout %s: %s, %g %% for the candidate%s", now.id, state.phase, now.weight, more)
        self._save(now)
        self.metrics.looked(self.describe())

    def _save(self, now: _Running) -> None:
        with self._writing:
            self._write(now, now.state)

    def _write(self, now: _Running, state: State) -> None:
        """What cannot be written is tried again; until then it holds in this process."""
        self._saved_at = self._clock()
        try:
            self._file.write(now.id, state)
            now.saved = state
        except QBEError as error:
            log.error("%s", error)

    def close(self) -> None:
        """The server ends: keep how long the step has run."""
        with self._lock:
            if self._now is not None and self._now.saved != self._now.state:
                self._save(self._now)

    @property
    def aborted(self) -> str:
        """Why the candidate is off; empty where it is not."""
        with self._lock:
            now = self._running()
            return "" if now is None or now.state.phase != "aborted" else now.state.cause

    def describe(self) -> dict[str, Any] | None:
        """As JSON; None without a rollout."""
        with self._lock:
            now = self._running()
            if now is None or now.rollout.candidate is None:
                return None
            state, evidence = now.state, now.evidence
            overdue = state.phase == "progressing" and state.elapsed_s >= now.seconds
            return {
                "id": now.id, "phase": "inconclusive" if overdue else state.phase, "weight": now.weight,
                "cause": state.cause or None, "candidate": now.rollout.candidate.model_dump(exclude_none=True),
                "step": state.step, "steps": [step.model_dump() for step in now.rollout.steps],
                "elapsed_s": round(state.elapsed_s, 1), "outcome": evidence.outcome(self.scores), "held": self.held,
                "metrics": {n: f.describe(evidence.limit(n)) for n, f in evidence.findings().items()},
            }  # fmt: skip
