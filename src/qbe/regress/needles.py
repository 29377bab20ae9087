"""Facts hidden in long text: one, several, and one that leads to another (after RULER, Hsieh et al. 2024)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qbe.datasets.haystack import Haystack
from qbe.errors import QBEError
from qbe.regress.grading import text_grader
from qbe.regress.passages import prose
from qbe.regress.task import Task, contains

DEPTHS = (0.05, 0.3, 0.55, 0.8)
_NAMES = ("Anna", "Boris", "Clara", "Dario", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon")
_CHARACTERS = 4  # of a token, about


class _Characters:
    """In place of a tokenizer: a server need not say which it has."""

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[range]]:
        return {"input_ids": [range(max(1, len(t) // _CHARACTERS)) for t in texts]}


def needles(domain: str, path: Path | None, characters: Sequence[int]) -> list[Task]:
    """For each length and depth one needle, and for each length one task of several and one of two hops.

    Args:
        path: a text or a folder of *.txt; None takes the built-in text.
        characters: lengths of the texts.

    Raises:
        QBEError: there is no text.
    """
    text = prose() if path is None else _read(path)
    tasks = []
    for length in characters:
        haystack = Haystack(text, _Characters(), length // _CHARACTERS)
        for i, depth in enumerate(DEPTHS):
            rng = random.Random(f"{length}/{i}")
            name, number = rng.choice(_NAMES), rng.randrange(1000, 10000)
            hidden = haystack.hide(f"The secret number of {name} is {number}.", depth, length // _CHARACTERS)
            tasks.append(_task(domain, f"one/{length}/{depth:.0%}", hidden, f"What is the secret number of {name}?",
                               f"The secret number of {name} is", [str(number)]))  # fmt: skip
        rng = random.Random(f"{length}")
        names, numbers = rng.sample(_NAMES, 3), rng.sample(range(1000, 10000), 3)
        hidden = text_with(
            haystack, length, [f"The secret number of {n} is {x}." for n, x in zip(names, numbers, strict=True)]
        )
        whose = f"{names[0]}, {names[1]} and {names[2]}"
        tasks.append(_task(domain, f"several/{length}", hidden, f"What are the secret numbers of {whose}?",
                           f"The secret numbers of {whose} are", [str(x) for x in numbers]))  # fmt: skip
        hidden = text_with(haystack, length, [f"{names[0]} gave the letter to {names[1]}.",
                                              f"{names[1]} lives at house number {numbers[0]}."])  # fmt: skip
        tasks.append(_task(domain, f"two-hops/{length}", hidden,
                           f"At which house number is the letter that {names[0]} gave away?",
                           f"The letter that {names[0]} gave away is at house number", [str(numbers[0])]))  # fmt: skip
    return tasks


def text_with(haystack: Haystack, characters: int, facts: Sequence[str]) -> str:
    """The facts in their order, spread over the text."""
    part = characters // _CHARACTERS // len(facts)
    return " ".join(haystack.hide(fact, (i + 1) / (len(facts) + 1), part) for i, fact in enumerate(facts))


def _task(domain: str, name: str, text: str, asks: str, begins: str, wanted: list[str]) -> Task:
    said = f"{text}\n\n{asks} Answer with what the text says."
    return Task(domain, f"needles/{name}", [{"role": "user", "content": said}], f"{text}\n\n{begins}",
                text_grader(lambda answer: contains(wanted, answer)), 32)  # fmt: skip


def _read(path: Path) -> str:
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    try:
        text = "\n\n".join(f.read_text(encoding="utf-8").strip() for f in files)
    except (OSError, UnicodeDecodeError) as error:
        raise QBEError(f"the text of '{path}' cannot be read: {error}") from None
    if not text.strip():
        raise QBEError(f"there is no text in '{path}' to hide needles in: give a text or a folder of *.txt")
    return text
