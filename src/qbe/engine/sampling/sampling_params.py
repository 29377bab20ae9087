"""How a request's tokens are chosen, and when its answer stops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qbe.errors import QBEError

MOST_ANSWERS = 1024  # to one prompt


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Attributes:
        max_tokens: tokens to write at most.
        temperature: 0 takes the likeliest token (greedy); otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities reach this sum (nucleus sampling).
        min_p: keep tokens at least this fraction as likely as the likeliest.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely (CTRL, Keskar et al. 2019).
        logit_bias: token id -> number added to its logit.
        seed: of this request's own random numbers; None draws one.
        stop: texts that end the answer; not part of it.
        ignore_eos: go on after an end-of-sequence token.
        presence_penalty: taken from the logits of tokens that the answer has.
        frequency_penalty: the same, times how often it has them.
        logprobs: keep each new token's logarithm and those of so many of the likeliest; None keeps none.
        prompt_logprobs: the same for the prompt's tokens, from the second on. Such a prompt begins on nobody's pages.
        speculate: draft tokens and check several at once, where that is faster (`qbe.engine.speculation.speculator`).
            Greedy answers and those with a seed are what they are without; others have the same distribution.

    Raises:
        QBEError: a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculate: bool = False

    def __post_init__(self) -> None:
        for ok, name, allowed in (
            (_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "a whole number, 1 or more"),
            (_is_finite(self.temperature) and self.temperature >= 0, "temperature", "a number, 0 or more"),
            (_is_int(self.top_k) and self.top_k >= 0, "top_k", "a whole number, 0 (off) or more"),
            (_is_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (_is_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "between 0 and 1"),
            (
                _is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "repetition_penalty",
                "a number above 0",
            ),
            (
                self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
                "seed",
                "a whole number from 0 to 2^63 - 1",
            ),
            (
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "stop",
                "a tuple of texts that are not empty",
            ),
            (
                isinstance(self.logit_bias or {}, dict)
                and all(_is_int(t) and t >= 0 and _is_finite(b) for t, b in (self.logit_bias or {}).items()),
                "logit_bias",
                "token ids with finite numbers",
            ),
            (_is_finite(self.presence_penalty), "presence_penalty", "a number"),
            (_is_finite(self.frequency_penalty), "frequency_penalty", "a number"),
            (_is_count(self.logprobs), "logprobs", "a whole number, 0 or more"),
            (_is_count(self.prompt_logprobs), "prompt_logprobs", "a whole number, 0 or more"),
        ):
            if not ok:
                raise QBEError(f"{name} is {getattr(self, name)!r}, but must be {allowed}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken. So small a temperature leaves float32 nothing else."""
        return self.temperature < 1e-5


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return value is None or (_is_int(value) and value >= 0)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
