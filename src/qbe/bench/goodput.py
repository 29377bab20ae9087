"""Requests a second that meet a latency bound (goodput: Zhong et al. 2024, DistServe), found by a search over rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qbe.bench.client import Answered

PART = 0.95  # of the requests must meet the bound
_RISES = 8  # of the first rate, to 25 times: so few requests that all of them may come at once end the search, too
_FALLS = 8  # to a 25th: a bound that is not met by answers that are alone ends it


@dataclass(frozen=True)
class Bound:
    """What an answer must keep to: seconds to its first token, and between its later ones."""

    first_s: float
    per_token_s: float


@dataclass(frozen=True)
class TraceReplay:
    """A replay at one rate.

    Attributes:
        rate: requests a second that came.
        first_s, per_token_s: what `PART` of the answers stay below.
        bits: mean of the answers' average bits.
        failed: answers that were refused or broke off.
    """

    rate: float
    first_s: float
    per_token_s: float
    bits: float
    failed: int

    @classmethod
    def of(cls, rate: float, answers: Sequence[Answered]) -> TraceReplay:
        good = [a for a in answers if not a.error]
        # A refused answer counts as one that never came.
        first = sorted(a.first_s for a in good) + [float("inf")] * (len(answers) - len(good))
        each = [a.per_token_s for a in good] + [float("inf")] * (len(answers) - len(good))
        return cls(
            rate, quantile(first, PART), quantile(each, PART), float(np.mean([a.bits for a in good] or [0.0])),
            len(answers) - len(good),
        )  # fmt: skip

    def over(self, bound: Bound) -> float:
        """How many times as slow as the bound; up to 1 it is met."""
        return max(self.first_s / bound.first_s, self.per_token_s / bound.per_token_s)


def quantile(values: Sequence[float], part: float) -> float:
    """The value that this part of them stays below; no interpolation, so that it is one that occurred."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


class Search:
    """The highest rate at which a bound is met: half as much again until it is not, then the interval is halved.

    Args:
        bound: to be met.
        start: the first rate.
        steps: halvings.
    """

    def __init__(self, bound: Bound, start: float, steps: int) -> None:
        self._bound, self._steps = bound, steps
        self.rate, self.trials = start, list[TraceReplay]()
        self._good, self._bad, self._rises, self._falls = 0.0, float("inf"), 0, 0

    @property
    def done(self) -> bool:
        """Whether the interval is small enough."""
        return self._steps < 0 or self._rises > _RISES or self._falls > _FALLS

    @property
    def best(self) -> float:
        """The highest rate that met the bound; 0 where none did."""
        return self._good

    def take(self, trial: TraceReplay) -> None:
        """What came of `rate`; it is another one then."""
        self.trials.append(trial)
        if trial.over(self._bound) <= 1:
            self._good = max(self._good, trial.rate)
        else:
            self._bad = min(self._bad, trial.rate)
        if self._bad == float("inf"):
            self.rate = self._good * 1.5
            self._rises += 1
        elif self._good == 0.0:
            self.rate = self._bad / 1.5
            self._falls += 1
        else:
            self.rate = (self._good * self._bad) ** 0.5
            self._steps -= 1


def in_turns(searches: Sequence[Search], trial: Callable[[int, float], TraceReplay]) -> None:
    """Run searches to their ends, a trial of each in turns, so that a slow hour is everybody's.

    Args:
        trial: of the search of this number, at a rate.
    """
    while any(not s.done for s in searches):
        for number, search in enumerate(searches):
            if not search.done:
                search.take(trial(number, search.rate))
