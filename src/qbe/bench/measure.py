"""The measuring core: systems take turns round by round; what is kept of each are the median and the quartiles.

Taking turns is what makes a ratio fair: a machine that gets slower for a while slows every system alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

Sample = Callable[[], Mapping[str, float]]
"""One measurement of one system: the value of each part of its work (a shape, a whole step), lower is better."""

MIN_ROUNDS = 3
MAX_SECONDS = 150.0  # of one comparison; when it is over no further round begins


@dataclass(frozen=True)
class Timing:
    """What the rounds gave.

    Attributes:
        median: of all rounds.
        low, high: lower and upper quartile.
        rounds: how many there were.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def times(self, factor: float) -> Timing:
        """The same in another unit."""
        return Timing(self.median * factor, self.low * factor, self.high * factor, self.rounds)

    def rate(self, amount: float) -> Timing:
        """`amount` per what was measured, e.g. tokens per second from seconds."""
        return Timing(amount / self.median, amount / self.high, amount / self.low, self.rounds)


@dataclass(frozen=True)
class Failed:
    """A peer that could not be measured, and why, in one line."""

    reason: str

    @classmethod
    def because(cls, error: BaseException) -> Failed:
        lines = str(error).strip().splitlines()
        return cls(f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__)


Outcome = Mapping[str, Timing] | Failed


def attempt(build: Callable[[], Sample]) -> Sample | Failed:
    """Builds a peer; what goes wrong is kept as the reason why it is missing."""
    try:
        return build()
    except Exception as error:
        return Failed.because(error)


def take_turns(
    ours: Mapping[Name, Sample],
    peers: Mapping[str, Sample | Failed],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
    max_seconds: float = MAX_SECONDS,
) -> tuple[dict[Name, Mapping[str, Timing]], dict[str, Outcome]]:
    """Measures every system once a round, after a first round that does not count.

    The order moves on by one from round to round, so that nobody always follows the same neighbour. A peer that fails
    is left out from then on and its reason kept; a failure of ours is raised.

    Args:
        rounds: to measure; fewer (never below 3, or `rounds` if that is less) when `max_seconds` are over.
        on_round: called after each round, the first one included.

    Returns:
        What was measured of ours and of the peers, name -> part -> value.
    """
    systems: dict[Hashable, Sample] = dict(ours.items())
    failed: dict[Hashable, Failed] = {}
    for peer, sample_or_reason in peers.items():
        if isinstance(sample_or_reason, Failed):
            failed[peer] = sample_or_reason
        else:
            systems[peer] = sample_or_reason
    values: dict[Hashable, dict[str, list[float]]] = {name: {} for name in systems}
    started = time.perf_counter()
    for turn in range(rounds + 1):
        if turn > min(rounds, MIN_ROUNDS) and time.perf_counter() - started > max_seconds:
            break
        names = list(systems)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            try:
                sample = systems[name]()
            except Exception as error:
                if name in ours:
                    raise
                failed[name] = Failed.because(error)
                del systems[name]
                continue
            if turn > 0:
                for part, value in sample.items():
                    values[name].setdefault(part, []).append(value)
        on_round()
    timings = {n: {p: Timing.of(v) for p, v in values[n].items()} for n in systems}
    theirs: dict[str, Outcome] = {n: failed[n] if n in failed else timings[n] for n in peers}
    return {n: timings[n] for n in ours}, theirs
