"""Draft tokens that are read instead of computed: what followed where the last tokens stood before. No torch.

Prompt lookup (Saxena 2023) finds them in the sequence itself. What an engine has read and written for all its requests
is a second text to find them in, as in suffix decoding (Oliaro et al. 2024). A longer match is right more often than a
short one, so that each kind of match has a rate of its own, which says how many draft tokens pay.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass

NGRAM_SIZES = (4, 3, 2, 1)  # tokens that must have stood before, in the same order
TABLE_SIZE = 1 << 18  # n-grams that an engine remembers: those of some 65 000 tokens, 40 MB
MIN_PROBABILITY = 0.05  # draft tokens that are less likely to be right are not made
PRIOR_RATE = 0.5  # rate of a kind that nothing is known of
RATE_WINDOW = 64  # outcomes that a rate is about the mean of

Kind = tuple[bool, int]  # whether it is from other sequences; tokens that matched


class NgramTable:
    """Which token came last after each n-gram.

    Args:
        most: n-grams that are kept, some of the last ones; None: all of them.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._new: dict[tuple[int, ...], int] = {}
        self._old: dict[tuple[int, ...], int] = {}  # gone at once when there are enough new ones
        self._read = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def read(self, tokens: collections.abc.Sequence[int], start: int) -> None:
        """Learn what the tokens from number `start` on followed."""
        for position in range(max(start, 1), len(tokens)):
            for n in NGRAM_SIZES:
                if position >= n:
                    self._new[tuple(tokens[position - n : position])] = tokens[position]
        if self._most is not None and len(self._new) > self._most // 2:
            self._old, self._new = self._new, {}

    def read_on(self, tokens: collections.abc.Sequence[int]) -> int:
        """`read` what has come since the last call, of one sequence; returns where that began."""
        start, self._read = self._read, len(tokens)
        self.read(tokens, start)
        return start

    def after(self, gram: tuple[int, ...]) -> int | None:
        token = self._new.get(gram)
        return self._old.get(gram) if token is None else token


@dataclass(frozen=True)
class NgramProposal:
    """Draft tokens for the tokens of a sequence from number `start` on, each with its kind."""

    start: int
    draft_tokens: list[tuple[int, Kind]]


class NgramProposer:
    """Reads for the sequences of an engine.

    Attributes:
        memory: of all of them.
        rates: per kind the part of draft tokens that were right, of those whose draft tokens before them were.
    """

    def __init__(self) -> None:
        self.memory = NgramTable(TABLE_SIZE)
        self.rates: dict[Kind, float] = {}

    def propose(
        self, text: NgramTable, tokens: collections.abc.Sequence[int], most: int
    ) -> tuple[NgramProposal, list[float]]:
        """At most `most` tokens that may follow, and for each the probability that it and all before it are right.

        Args:
            text: of this sequence; what is new in `tokens` becomes part of it and of the memory.
            tokens: of this sequence.
        """
        self.memory.read(tokens, text.read_on(tokens))
        last, draft_tokens, likely = list(tokens[-max(NGRAM_SIZES) :]), list[tuple[int, Kind]](), list[float]()
        probability = 1.0
        while len(draft_tokens) < most and (draft := self._next(text, last)) is not None:
            probability *= self.rates.get(draft[1], PRIOR_RATE)
            if probability < MIN_PROBABILITY:
                break
            draft_tokens.append(draft)
            likely.append(probability)
            last = [*last[1 - max(NGRAM_SIZES) :], draft[0]]
        return NgramProposal(len(tokens), draft_tokens), likely

    def learn(self, proposed: NgramProposal, tokens: collections.abc.Sequence[int]) -> None:
        """What was foreseen has come, or something else."""
        for (draft_token, kind), token in zip(proposed.draft_tokens, tokens[proposed.start :], strict=False):
            rate = self.rates.get(kind, PRIOR_RATE)
            self.rates[kind] = rate + ((draft_token == token) - rate) / RATE_WINDOW
            if draft_token != token:
                break

    def _next(self, text: NgramTable, last: list[int]) -> tuple[int, Kind] | None:
        """The longest match, of the sequence itself rather than of others."""
        for n in NGRAM_SIZES:
            gram = tuple(last[-n:])
            for others, source in enumerate((text, self.memory)):
                token = source.after(gram)
                if token is not None and len(gram) == n:
                    return token, (bool(others), n)
        return None
