"""What is done about a detector that trips: one rung after the other, up at once and down slowly (fail closed).

A detector that trips takes its action, or the next rung above where that is taken already. Then all windows begin anew,
so that only answers that were served under the action can be cause for the next one. After `hold_s` without cause the
highest rung is given back. Who has to take it again soon holds it twice as long.

While a candidate is tried (`qbe.server.rollout`) it is the first suspect: whatever trips aborts it, before any rung is
taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qbe.server.health.settings import DetectorName, Health
from qbe.server.health.syndromes import DETECTORS, LADDER, RUNGS, Action
from qbe.server.health.windows import Reading

CLEAR = 0.8  # of its threshold, that a detector which has tripped must come back to
_SOON = 4  # holds, within which an action that is taken again was given back too soon
_LONGEST = 16  # holds


@dataclass(frozen=True)
class Change:
    """An action that was taken or given back, and which detector was the cause."""

    action: Action
    taken: bool
    cause: DetectorName
    value: float | None = None


@dataclass
class _Hold:
    """How long an action is held, in units of `hold_s`, and when it was given back last."""

    times: int = 1
    released: float | None = None


class Ladder:
    """Decides; `look` is asked about once a second. Other threads may read the attributes.

    Args:
        settings: those in use now.
        clock: seconds.
        arm: whether a candidate answers anything now.

    Attributes:
        taken: the actions in force, each with its cause.
        tripped: detectors beyond their thresholds.
        exhausted: whether the highest rung is taken and something still trips.
        epoch: how often `taken` or the arms have changed; answers that began in another one tell nothing of this one.
    """

    def __init__(
        self, settings: Callable[[], Health], clock: Callable[[], float] = time.monotonic,
        arm: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._settings, self._clock, self._arm = settings, clock, arm
        self.taken: Mapping[Action, DetectorName] = {}
        self.tripped: frozenset[DetectorName] = frozenset()
        self.exhausted, self.epoch = False, 0
        self._holds = {action: _Hold() for action in LADDER}
        self._quiet = clock()  # since when nothing trips

    def look(self, readings: Mapping[DetectorName, Reading]) -> Change | None:
        """What follows from what the detectors say now: one step at most."""
        settings, now = self._settings(), self._clock()
        self.tripped = frozenset(n for n, r in readings.items() if self._trips(n, r, settings))
        if not settings.ladder:
            self.exhausted = False
            return self._give_back(now) if self.taken else None
        causes = [name for name in DETECTORS if name in self.tripped and DETECTORS[name].action is not None]
        if causes:
            self._quiet = now
            if self._arm():
                self.begin_anew()
                return Change("arm_aborted", True, causes[0], readings[causes[0]].value)
            found = [(self._next(name), name) for name in causes]
            cause = next(((action, name) for action, name in found if action is not None), None)
            self.exhausted = cause is None
            return None if cause is None else self._take(*cause, now, readings[cause[1]].value)
        if not self.taken or now - self._quiet < settings.hold_s * self._holds[self._highest].times:
            return None
        self.exhausted = False
        return self._give_back(now)

    @property
    def _highest(self) -> Action:
        return next(action for action in reversed(RUNGS) if action in self.taken)

    def _trips(self, name: DetectorName, reading: Reading, settings: Health) -> bool:
        threshold: float | None = getattr(settings, name)
        if reading.value is None or threshold is None:
            return False
        value, detector = reading.value, DETECTORS[name]
        if name in self.tripped:
            threshold = threshold / CLEAR if detector.below else threshold * CLEAR
            return value < min(1.0, threshold) if detector.below else value > threshold
        return value < threshold if detector.below else value > threshold

    def _next(self, name: DetectorName) -> Action | None:
        """The lowest rung from the detector's own on that is not taken."""
        action = DETECTORS[name].action
        assert action is not None
        return next((a for a in RUNGS[RUNGS.index(action) :] if a not in self.taken), None)

    def _take(self, action: Action, cause: DetectorName, now: float, value: float | None) -> Change:
        hold = self._holds[action]
        soon = hold.released is not None and now - hold.released < _SOON * self._settings().hold_s * hold.times
        hold.times = min(_LONGEST, 2 * hold.times) if soon else 1
        self._change({**self.taken, action: cause})
        return Change(action, True, cause, value)

    def _give_back(self, now: float) -> Change:
        action = self._highest
        cause = self.taken[action]
        self._holds[action].released, self._quiet = now, now
        self._change({a: c for a, c in self.taken.items() if a != action})
        return Change(action, False, cause)

    def _change(self, taken: Mapping[Action, DetectorName]) -> None:
        self.taken = taken
        self.begin_anew()

    def begin_anew(self) -> None:
        """Answers are served otherwise from now on: those that run tell nothing of it."""
        self.tripped = frozenset()
        self.epoch += 1
