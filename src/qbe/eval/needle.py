"""Needle in a haystack: which facts an answer still finds when keys and values have fewer bits.

A sentence with a number is hidden in essays, at several depths of prompts of several lengths, and the model is asked
for the number. Weights keep 16 bits, so that the KV cache alone makes the difference; 16-bit keys and values go first,
and every other setting is held against what they find.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qbe.budget import Budget
from qbe.datasets.haystack import Haystack
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.errors import QBEError
from qbe.sites import FULL_BITS

CITIES = (
    "Amsterdam", "Bogota", "Cairo", "Dublin", "Hanoi", "Istanbul", "Jakarta", "Lisbon", "Madrid", "Nairobi", "Oslo",
    "Quito", "Rome", "Sydney", "Vienna", "Warsaw",
)  # fmt: skip
DIGITS = 5
ANSWER_TOKENS = 24

Setting = int | str | None
"""Bits of the KV cache or a name that budgets have for them; None leaves them to the policy."""


@dataclass(frozen=True)
class Grid:
    """What is asked.

    Attributes:
        lengths: tokens of a prompt with its answer.
        depths: share of the text before the needle, 0 to 1.
        needles: different ones for each length and depth.
        limit: cells at most, spread over the grid; None takes all.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: int = 2
    limit: int | None = None

    def cells(self) -> list[Needle]:
        """Longest and deepest first: those after them then find most of their pages known."""
        cells = [
            Needle(length, depth, i)
            for length in sorted(self.lengths, reverse=True)
            for depth in sorted(self.depths, reverse=True)
            for i in range(self.needles)
        ]
        if self.limit is None or self.limit >= len(cells):
            return cells
        return [cells[i * len(cells) // self.limit] for i in range(self.limit)]


@dataclass(frozen=True)
class Needle:
    """One needle: its place, and a city and a number that depend on nothing else."""

    length: int
    depth: float
    number: int

    @property
    def city(self) -> str:
        return self._random().choice(CITIES)

    def secret(self, haystack: str) -> str:
        """Digits that the haystack does not have."""
        draw = self._random()
        draw.choice(CITIES)
        while (secret := str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))) in haystack:
            pass
        return secret

    def _random(self) -> random.Random:
        return random.Random(f"{self.length} {self.depth:g} {self.number}")


@dataclass(frozen=True)
class NeedleResult:
    """What became of a needle at a setting.

    Attributes:
        found: whether the answer contains the number.
        average_kv_bits: of the numbers in the request's pages when it ended.
        cached_tokens: of the prompt, whose pages were known.
        error: one line where the answer failed.
    """

    cell: Needle
    setting: Setting
    found: bool
    secret: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    average_kv_bits: float
    error: str | None = None

    def describe(self) -> dict[str, Any]:
        """The row as JSON."""
        return {
            "kv_bits": name_of(self.setting),
            "length": self.cell.length,
            "depth": self.cell.depth,
            "needle": self.cell.number,
            "found": self.found,
            "expected": self.secret,
            "answer": self.answer,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "average_kv_bits": round(self.average_kv_bits, 4),
            "error": self.error,
        }


def name_of(setting: Setting) -> int | str:
    """A setting as options and JSON name it."""
    return "default" if setting is None else setting


@dataclass
class NeedleResults:
    """All rows of a run; those of 16 bits come first."""

    settings: tuple[Setting, ...]
    rows: list[NeedleResult] = field(default_factory=list)

    def of(self, setting: Setting) -> dict[Needle, NeedleResult]:
        """Its rows by cell."""
        return {r.cell: r for r in self.rows if r.setting == setting}

    def lost(self, setting: Setting) -> list[Needle]:
        """Needles that 16 bits find and this setting does not."""
        full, lowered = self.of(FULL_BITS), self.of(setting)
        return [c for c, row in full.items() if row.found and not lowered[c].found]

    def verdict(self, setting: Setting) -> bool | None:
        """Whether every needle that 16 bits find is found; None when they find none."""
        return not self.lost(setting) if any(r.found for r in self.of(FULL_BITS).values()) else None

    def describe(self) -> dict[str, Any]:
        """Rows and verdicts as JSON."""
        verdicts = [
            {
                "kv_bits": name_of(s),
                "found": sum(r.found for r in self.of(s).values()),
                "of": len(self.of(s)),
                "lost": len(self.lost(s)),
                "finds_all_that_16_bits_find": self.verdict(s),
            }
            for s in self.settings
        ]
        return {"verdicts": verdicts, "rows": [r.describe() for r in self.rows]}


def run(
    engine: Engine, text: str, grid: Grid, settings: Sequence[Setting], on_cell: Callable[[], None] = lambda: None
) -> NeedleResults:
    """Ask for every needle at 16 bits and then at each setting.

    Args:
        engine: with the default policy.
        text: the haystack.
        on_cell: called after each answer.

    Raises:
        QBEError: a length that the model's context or the KV cache does not hold or that leaves no room for a
            haystack, or an answer at 16 bits that fails.
    """
    context = engine.core.context
    for length in grid.lengths:
        if context is not None and length > context:
            raise QBEError(f"--lengths has {length}, but the model's context is {context} tokens: give shorter ones")
    haystack = Haystack(text, engine.tokenizer, max(grid.lengths))
    asked = []
    for cell in grid.cells():
        secret = cell.secret(text)
        asked.append((cell, secret, prompt_for(engine, haystack, cell, secret)))
    outcome = NeedleResults((FULL_BITS, *(s for s in settings if s != FULL_BITS)))
    params = SamplingParams(max_tokens=ANSWER_TOKENS)
    for setting in outcome.settings:
        budget = Budget(bits=FULL_BITS, kv_bits=setting)
        for cell, secret, prompt in asked:
            # Pages of a setting with more bits must not serve this one.
            request = Request(prompt, params, budget, cache_salt=f"needle {setting}".encode())
            result = engine.generate_batch([request])[0]
            if result.error is not None and setting == FULL_BITS:
                raise QBEError(result.error)
            outcome.rows.append(NeedleResult(
                cell, setting, secret in result.text, secret, result.text, result.prompt_tokens, result.cached_tokens,
                result.average_kv_bits, result.error,
            ))  # fmt: skip
            on_cell()
    return outcome


def prompt_for(engine: Engine, haystack: Haystack, cell: Needle, secret: str) -> Any:
    """A prompt that leaves room for the answer in the cell's length: a message where the model has a chat template."""
    needle = f"The special magic number for {cell.city} is {secret}."
    question = f"What is the special magic number for {cell.city}?"
    chat = getattr(engine.tokenizer, "chat_template", None)

    def asked(text: str) -> Any:
        if chat:
            return [{"role": "user", "content": f"{text}\n\n{question} Answer with the number that the text gives."}]
        return f"{text}\n\nQuestion: {question}\nAnswer: The special magic number for {cell.city} is"

    context_limit = cell.length - ANSWER_TOKENS
    text = haystack.fitting(needle, cell.depth, context_limit, lambda t: engine.explain(asked(t)).prompt_tokens)
    if text is None:
        raise QBEError(f"--lengths has {cell.length}, which leaves no room for a haystack: give longer ones")
    return asked(text)
