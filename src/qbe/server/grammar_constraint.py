"""One answer's way through a grammar, and to its end: tokens that close it are kept in reserve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import llguidance
import numpy as np
import torch

from qbe.server.json_scan import AnswerScan, Where

Cut = Literal["max_tokens", "loop", "too_long"]

# What JSON may grow to where its schema says nothing: more is no answer any more.
MOST_STRING = 16384  # bytes
MOST_DIGITS = 40
MOST_ITEMS = 1024
_LOOP = 256  # tokens that repeat at most so many before them, at least eight times: a loop
_LONGEST_PERIOD = 32
_SLACK = 64  # tokens more than three times the longest way to an end that was seen: from there on every step is checked
_LOOK = 16  # tokens between two looks at that way before
_MOST_STEPS = 512  # of a way to the end
# What ends soonest comes first.
_IN_STRING = ('"', "a", "0", "A", "-")
_OUTSIDE = ("}", "]", "0", "1", '"', "[", "{", "n", "f", "t", ",", ":", "\n", " ", *_IN_STRING[1:])


@dataclass(frozen=True)
class Limits:
    """Of what is not bounded by its schema; a schema's own larger bounds hold.

    Attributes:
        string, items, digits: bytes of a string, items of an array, digits of a number.
        json: whether all of the answer is JSON, or only calls; None: nothing of it.
    """

    string: int = MOST_STRING
    items: int = MOST_ITEMS
    digits: int = MOST_DIGITS
    json: Where | None = None


class Alphabet:
    """The tokens of single characters that a way to the end is made of."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos: int = tokenizer.eos_token
        tokens = {c: tokenizer.tokenize_str(c) for c in {*_IN_STRING, *_OUTSIDE}}
        self._ids = {c: t[0] for c, t in tokens.items() if len(t) == 1 and tokenizer.decode_bytes(t) == c.encode()}
        self.in_string = [self._ids[c] for c in _IN_STRING if c in self._ids]
        self.outside = [self._ids[c] for c in _OUTSIDE if c in self._ids]


class GrammarConstraint:
    """One answer's way through a grammar (`qbe.engine.sampling.constraint.Constraint`).

    Args:
        matcher: at the grammar's start; belongs to the answer.
        alphabet: of its tokenizer.
        vocabulary: logits of a step.
        limits: of JSON.

    Attributes:
        cut: why tokens were put in that the model had not chosen, so that the answer ends; None where none were.
        complete: whether the answer is a whole text of the grammar.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, alphabet: Alphabet, vocabulary: int, limits: Limits | None = None
    ) -> None:
        self._matcher, self._alphabet, self._vocabulary = matcher, alphabet, vocabulary
        self._limits = limits or Limits()
        self.error: str | None = None
        self.cut: Cut | None = None
        self.complete = False
        self._scan = AnswerScan(self._limits.json)
        self._taken: list[int] = []
        self._same = [0] * (_LONGEST_PERIOD + 1)
        self._loops = False
        self._way: list[int] | None = None  # to the end from here, if it is known
        self._longest = 0

    def allowed(self) -> torch.Tensor:
        """bool `[vocabulary]`; nothing once the grammar has turned out too complex, which is `error` then."""
        allowed = self._mask(self._matcher)
        if not self._failed() and not allowed.any():
            self.error = "the grammar is exhausted: no token of this model can follow"
        return torch.from_numpy(allowed).view(torch.bool)

    def settle(self, token: int, left: int) -> int:
        """The token to take where the model has chosen this one: another if the answer could not end with it.

        Args:
            left: tokens that the answer may still have, this one included.
        """
        why = self._too_much()
        if why is None and left > 3 * self._longest + _SLACK:
            if len(self._taken) % _LOOK == 0:
                self._way = self._way_to_end(self._matcher, self._scan)
            return token
        way = self._way = self._way_to_end(self._matcher, self._scan)
        if way is None or len(way) > left or token == self._alphabet.eos:
            return token  # it cannot come to an end, or is there
        if why is None:
            after = self._matcher.deep_copy()
            if after.consume_token(token) and self._fits(after, token, left - 1):
                return token
            why = "max_tokens"
        nearest = way[0] if way else self._alphabet.eos
        if token != nearest:
            self.cut = self.cut or why
        return nearest

    def accept(self, token: int) -> bool:
        """Whether the grammar allows nothing more after this token."""
        self._matcher.consume_token(token)
        self._way = self._way[1:] if self._way and self._way[0] == token else self._way
        self._scan.feed(self._alphabet.tokenizer.decode_bytes([token]))
        self._taken.append(token)
        self._notice_loops()
        ended = not self._failed() and self._matcher.is_stopped()
        self.complete = ended or (not self._failed() and self._matcher.is_accepting())
        return ended

    def _mask(self, matcher: llguidance.LLMatcher) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return np.zeros(self._vocabulary, np.uint8)
        return np.unpackbits(bits, bitorder="little", count=self._vocabulary)

    def _failed(self) -> bool:
        if self._matcher.is_error():
            self.error = f"the grammar is exhausted: it is too complex here: {line(self._matcher.get_error())}"
        return self.error is not None

    def _notice_loops(self) -> None:
        taken = self._taken
        if self._limits.json == "calls" and self._scan.json is None:
            self._same = [0] * (_LONGEST_PERIOD + 1)
            return
        for period in range(1, min(_LONGEST_PERIOD, len(taken) - 1) + 1):
            self._same[period] = self._same[period] + 1 if taken[-1] == taken[-1 - period] else 0
        self._loops = self._loops or max(self._same) >= _LOOP

    def _too_much(self) -> Cut | None:
        """Why it has to come to an end, or what is open in it has to."""
        if self._loops:
            return "loop"
        scan, limits = self._scan.json, self._limits
        if scan is None:
            return None
        long = (scan.string or 0) >= limits.string or scan.digits >= limits.digits or scan.items > limits.items
        return "too_long" if long else None

    def _fits(self, matcher: llguidance.LLMatcher, token: int, left: int) -> bool:
        """Whether the answer can end within so many tokens after this one."""
        if matcher.is_stopped():
            return True
        scan = self._scan.copy()
        scan.feed(self._alphabet.tokenizer.decode_bytes([token]))
        way = self._way_to_end(matcher, scan)
        return way is not None and len(way) <= left

    def _way_to_end(self, matcher: llguidance.LLMatcher, scan: AnswerScan) -> list[int] | None:
        """Tokens that end the answer, if need be; not the fewest, but few. None where none were found."""
        if self._way is not None and self._leads_to_end(matcher, self._way):
            return self._way
        state, scan, way = matcher.deep_copy(), scan.copy(), list[int]()
        while not state.is_stopped() and len(way) < _MOST_STEPS:
            if state.is_accepting():
                break
            forced = state.compute_ff_tokens()
            step = forced or [self._nearest(state, scan)]
            if step[0] < 0 or not state.consume_tokens(step):
                return None
            way += step
            scan.feed(self._alphabet.tokenizer.decode_bytes(step))
        self._longest = max(self._longest, len(way))
        return way if state.is_accepting() and not state.is_error() else None

    def _nearest(self, matcher: llguidance.LLMatcher, scan: AnswerScan) -> int:
        """The allowed token that is nearest to an end, by its looks; -1 where there is none."""
        mask = self._mask(matcher)
        wanted = self._alphabet.in_string if scan.in_string else self._alphabet.outside
        nearest = next((t for t in wanted if mask[t]), None)
        if nearest is None:
            allowed = np.flatnonzero(mask)
            nearest = int(allowed[0]) if len(allowed) else -1
        return nearest

    def _leads_to_end(self, matcher: llguidance.LLMatcher, way: list[int]) -> bool:
        state = matcher.deep_copy()
        return all(state.consume_token(t) for t in way) and state.is_accepting()


def line(text: str) -> str:
    """What llguidance says, without the state of its parser."""
    said = " ".join(text.partition("<state>")[0].split())[:300]
    return "there is no text that it allows" if said == "NoExtensionBias" else said
