"""What is kept of guesses: those of a sequence, how they fared, and how long steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

WINDOW = 32  # outcomes that an acceptance rate is the mean of
LEAST = 16  # outcomes before it counts alone
HOPE = 0.9  # acceptance rate before that: high, so that a drafter is tried where it could pay
REST = 128  # steps after which a drafter that did not pay is tried again
GRAMS = (3, 2)  # tokens that must have been written before, in the same order, for the text to be a guess
TEXT = 0  # the drafter that reads the text; others are known by their bits


class Outcomes:
    """How guesses of one drafter fared: accepted or not, the last ones.

    Attributes:
        drafted, accepted: all guesses of it that were checked, and how many of them were right.
    """

    def __init__(self) -> None:
        self.drafted = self.accepted = 0
        self._last: deque[bool] = deque(maxlen=WINDOW)
        self._idle = 0

    def add(self, accepted: int, refused: bool, drafted: int = 0) -> None:
        """So many guesses were right, and the one after them was not; `drafted` were checked."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self._last.extend([True] * accepted + [False] * refused)
        self._idle = 0

    def pass_by(self, tokens: int) -> None:
        """So many tokens were written without it."""
        self._idle += tokens
        if self._idle >= REST:
            self._last.clear()
            self._idle = 0

    @property
    def rate(self) -> float:
        """Part of the guesses that are right."""
        n = len(self._last)
        seen = sum(self._last) / n if n else 0.0
        return seen if n >= LEAST else HOPE + (seen - HOPE) * n / LEAST


def progress(rate: float, guesses: int) -> float:
    """Tokens that a step is expected to write when it checks so many guesses (1 when there are none)."""
    return guesses + 1.0 if rate >= 1 else (1 - rate ** (guesses + 1)) / (1 - rate)


@dataclass(eq=False)
class Speculation:
    """What a sequence that speculates keeps.

    Attributes:
        guesses: tokens that may follow `Sequence.token_ids`.
        source: the drafter of them: `TEXT`, or its bits.
        proposals: per guess the distribution float32 `[vocabulary]` that it was drawn from, where it was drawn and
            rejection sampling decides; else empty.
        generator: what guesses are drawn with.
        outcomes: per drafter.
        draft_bytes: bytes of weights and scales that draft rows read, at batch 1.
    """

    guesses: list[int] = field(default_factory=list)
    source: int = TEXT
    proposals: list[torch.Tensor] = field(default_factory=list)
    generator: torch.Generator | None = None
    outcomes: dict[int, Outcomes] = field(default_factory=dict)
    draft_bytes: int = 0
    _places: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)
    _indexed: int = 0

    def of(self, drafter: int) -> Outcomes:
        return self.outcomes.setdefault(drafter, Outcomes())

    @property
    def drafted(self) -> int:
        """Guesses that were checked."""
        return sum(o.drafted for o in self.outcomes.values())

    @property
    def accepted(self) -> int:
        """Those of them that were right."""
        return sum(o.accepted for o in self.outcomes.values())

    def drop(self) -> None:
        """Forget the guesses."""
        self.guesses.clear()
        self.proposals.clear()

    def right(self, at: int, token: int | None) -> bool:
        """Whether this token is what was guessed, by the guess of this number."""
        return token in self.guesses[at : at + 1]

    def checked(self, accepted: int, refused: bool) -> None:
        """The first `accepted` guesses were right; `refused`: the next one was not."""
        self.of(self.source).add(accepted, refused, len(self.guesses))
        self.drop()

    def look_up(self, tokens: Many[int], most: int) -> list[int]:
        """Prompt lookup (Saxena 2023): what followed where the last tokens stood before, at most `most` tokens."""
        for end in range(self._indexed, len(tokens)):  # the last one has no follower yet
            for n in GRAMS:
                if end >= n:
                    self._places[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        for n in GRAMS:
            place = self._places.get(tuple(tokens[-n:]))
            if place is not None:
                return list(tokens[place : place + most])
        return []


class Costs:
    """How long steps take, by their rows and bits: the least of the last ones, which other work on the machine did not
    lengthen.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}

    def add(self, rows: int, bits: float, seconds: float) -> None:
        self._seconds.setdefault((rows, round(bits)), deque(maxlen=8)).append(seconds)

    def of(self, rows: int, bits: float) -> float | None:
        """Seconds, None when there was no such step yet."""
        found = self._seconds.get((rows, round(bits)))
        return min(found) if found else None
