"""What the detectors (`qbe.server.health.syndromes`) have seen of the last answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from qbe.server.health.scorer import ScoredAnswer
from qbe.server.health.settings import DetectorName, Health
from qbe.server.health.syndromes import DETECTORS
from qbe.server.health.windows import Ratio, Reading, Shares


@dataclass(frozen=True)
class AnswerFacts:
    """What every answer shows when it ends.

    Attributes:
        prompt_class: of its query.
        failed: whether it ended in an error.
        loops: whether it ended in a loop of tokens.
        rejected: of a structured answer, whether its grammar was exhausted, or it had to be closed because it looped or
            grew too long; None for others.
        kv_raised: whether its attention asked for more KV bits; None where nothing watched that.
        drafted, accepted: draft tokens.
    """

    prompt_class: str
    failed: bool
    loops: bool
    rejected: bool | None
    kv_raised: bool | None
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Rating:
    """What a client told of a request.

    Attributes:
        failed: None where it did not say.
        structured: whether the answer had to have a form.
        retries: how often it asked again.
        cost: of the request, in the currency of the prices.
        teller: the client's key.
    """

    failed: bool | None
    structured: bool
    retries: int
    cost: float
    teller: str = ""


class Detectors:
    """Counts. Threads may share it.

    Args:
        settings: those in use now.
        reference: class -> passages of the calibration set; None where that is not known.
    """

    def __init__(self, settings: Callable[[], Health], reference: Mapping[str, int] | None = None) -> None:
        self._settings, self._reference, self._lock = settings, reference, threading.Lock()
        self.inputs: tuple[float | None, ...] | None = None  # of the calibration text, as `AnswerScore.inputs`
        self.inputs_tokens = 0  # of a passage of it: shorter prompts are not compared
        self._make()

    def _make(self) -> None:
        self._size = self._settings().window
        self._ratios: dict[str, Ratio] = defaultdict(lambda: Ratio(self._size))
        self._by_tier: dict[tuple[str, str], Ratio] = defaultdict(lambda: Ratio(self._size))
        self._classes = None if self._reference is None else Shares(4 * self._size, self._reference)

    def compare_with(self, reference: Mapping[str, int]) -> None:
        """Compare prompts with a calibration set of these classes."""
        with self._lock:
            self._reference = reference
            self._make()

    def clear(self) -> None:
        """Forget all: answers are served otherwise from now on."""
        with self._lock:
            classes = self._classes  # prompts do not depend on how they are served
            self._make()
            self._classes = classes

    def answer(self, facts: AnswerFacts) -> None:
        """An answer has ended."""
        with self._lock:
            self._ratios["loops"].add(facts.loops)
            self._ratios["errors"].add(facts.failed)
            if facts.rejected is not None:
                self._ratios["grammar"].add(facts.rejected)
            if facts.kv_raised is not None:
                self._ratios["kv_raised"].add(facts.kv_raised)
            if facts.drafted:
                self._ratios["acceptance"].add(facts.accepted, facts.drafted)
            if self._classes is not None:
                self._classes.add(facts.prompt_class)

    def scored(self, answer: ScoredAnswer) -> None:
        """An answer was scored by the widest gear."""
        score, long = answer.score, self._settings().long_context
        with self._lock:
            self._by_tier["live_kl", answer.tier].add(score.kl * score.tokens, score.tokens)
            self._by_tier["top1_agreement", answer.tier].add(score.top1 * score.tokens, score.tokens)
            self._ratios["long" if answer.context >= long else "short"].add(score.kl * score.tokens, score.tokens)
            if score.opening_kl is not None:
                self._ratios["opening_kl"].add(score.opening_kl)
            if answer.parity is not None:
                self._ratios["parity"].add(answer.parity, score.tokens)
            if self.inputs is not None and score.inputs and score.inputs_tokens >= self.inputs_tokens:
                self._ratios["activation_range"].add(_excess(score.inputs, self.inputs))

    def rated(self, rating: Rating) -> None:
        """A client has told of a request."""
        with self._lock:
            self._ratios["retries"].add(rating.retries, teller=rating.teller)
            if rating.failed is not None:
                self._ratios["failures"].add(rating.failed, teller=rating.teller)
                self._ratios["cost_per_success"].add(rating.cost, not rating.failed, rating.teller)
                if rating.structured:
                    self._ratios["structured_failures"].add(rating.failed, teller=rating.teller)

    def readings(self) -> dict[DetectorName, Reading]:
        """What each says now, those that are off left out."""
        settings = self._settings()
        with self._lock:
            if settings.window != self._size:
                self._make()
            found: dict[DetectorName, Reading] = {}
            for name in DETECTORS:
                if name not in settings.off:
                    found[name] = self._read(name, settings)
            return found

    def _read(self, name: DetectorName, settings: Health) -> Reading:
        least = min(settings.least, settings.window)
        if name in ("live_kl", "top1_agreement"):
            tiers = [ratio.read(least) for (of, _), ratio in self._by_tier.items() if of == name]
            return _worst(tiers, DETECTORS[name].below)
        if name == "long_context_kl":
            long, short = (self._ratios[n].read(least) for n in ("long", "short"))
            known = long.value is not None and short.value is not None
            return Reading(long.value - short.value if known else None, long.seen)  # type: ignore[operator]
        if name == "drift":
            return Reading() if self._classes is None else self._classes.read(4 * least)
        return self._ratios[name].read(least)


def _worst(readings: Iterable[Reading], below: bool) -> Reading:
    readings = list(readings)
    known = [r for r in readings if r.value is not None]
    if not known:
        return Reading(None, sum(r.seen for r in readings))
    return (min if below else max)(known, key=lambda r: r.value or 0.0)


def _excess(inputs: Iterable[float | None], reference: Iterable[float | None]) -> float:
    """By how much the inputs of the site at the 95th percentile exceed; 0 where no site was seen.

    The one that exceeds most says little: of SmolLM2's 211 sites one may read four times as much in a plain prompt."""
    pairs = zip(inputs, reference, strict=True)
    times = sorted(now / before for now, before in pairs if now is not None and before)
    return times[int(0.95 * (len(times) - 1))] if times else 0.0
