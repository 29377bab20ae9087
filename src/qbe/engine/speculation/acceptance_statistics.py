"""What is kept of draft tokens: those of a sequence, how they fared, and how long steps take."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from qbe.engine.speculation.ngram_proposer import NgramProposal, NgramTable

WINDOW = 32  # outcomes that an acceptance rate is the mean of
PRIOR_WEIGHT = 16  # outcomes before it counts alone
PRIOR_RATE = 0.9  # acceptance rate before that: high, so that a drafter is tried where it could pay
RETRY_INTERVAL = 1024  # tokens after which a drafter that did not pay is tried again
# the drafter that reads what was written (`qbe.engine.speculation.ngram_proposer`); others are known by their bits
NGRAM_DRAFTER = 0


class AcceptanceStats:
    """How draft tokens of one drafter fared: accepted or not, the last ones."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=WINDOW)
        self._idle = 0

    def add(self, accepted: int, refused: bool) -> None:
        """So many draft tokens were right, and the one after them was not."""
        self._last.extend([True] * accepted + [False] * refused)
        self._idle = 0

    def pass_by(self, tokens: int) -> None:
        """So many tokens were written without it."""
        self._idle += tokens
        if self._idle >= RETRY_INTERVAL:
            self._last.clear()
            self._idle = 0

    @property
    def rate(self) -> float:
        """Part of the draft tokens that are right."""
        n = len(self._last)
        seen = sum(self._last) / n if n else 0.0
        return seen if n >= PRIOR_WEIGHT else PRIOR_RATE + (seen - PRIOR_RATE) * n / PRIOR_WEIGHT


def progress(rate: float, draft_tokens: int) -> float:
    """Tokens that a step is expected to write when it checks so many draft tokens (1 when there are none)."""
    return draft_tokens + 1.0 if rate >= 1 else (1 - rate ** (draft_tokens + 1)) / (1 - rate)


@dataclass(eq=False)
class Speculation:
    """What a sequence that speculates keeps.

    Attributes:
        draft_tokens: tokens that may follow `Sequence.token_ids`.
        source: the drafter of them: `NGRAM_DRAFTER`, or its bits.
        proposals: per draft token the distribution float32 `[vocabulary]` that it was drawn from, where it was drawn
            and rejection sampling decides; else empty.
        generator: what draft tokens are drawn with.
        outcomes: of the drafter where it is the model itself, those of all sequences; else None.
        drafted_by, accepted_by: per drafter the draft tokens that were checked, and how many of them were right.
        draft_bytes: bytes of weights and scales that draft rows read, at batch 1.
        text: what followed where in this sequence.
        proposed: what was last read for it, checked or not.
    """

    draft_tokens: list[int] = field(default_factory=list)
    source: int = NGRAM_DRAFTER
    proposals: list[torch.Tensor] = field(default_factory=list)
    generator: torch.Generator | None = None
    outcomes: AcceptanceStats | None = None
    drafted_by: Counter[int] = field(default_factory=Counter)
    accepted_by: Counter[int] = field(default_factory=Counter)
    draft_bytes: int = 0
    text: NgramTable = field(default_factory=NgramTable, repr=False)
    proposed: NgramProposal | None = field(default=None, repr=False)

    @property
    def drafted(self) -> int:
        """Draft tokens that were checked."""
        return self.drafted_by.total()

    @property
    def accepted(self) -> int:
        """Those of them that were right."""
        return self.accepted_by.total()

    def drop(self) -> None:
        """Forget the draft tokens."""
        self.draft_tokens.clear()
        self.proposals.clear()

    def right(self, position: int, token: int | None) -> bool:
        """Whether this token is what was drafted, by the draft token of this number."""
        return token in self.draft_tokens[position : position + 1]

    def checked(self, accepted: int, refused: bool) -> None:
        """The first `accepted` draft tokens were right; `refused`: the next one was not."""
        self.drafted_by[self.source] += len(self.draft_tokens)
        self.accepted_by[self.source] += accepted
        if self.outcomes is not None:
            self.outcomes.add(accepted, refused)
        self.drop()


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
        seconds = self._seconds.get((rows, round(bits)))
        return min(seconds) if seconds else None
