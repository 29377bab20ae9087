"""Whether an answer is right: the same number, the same choice, or a program that passes its tests."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qbe.datasets.sandbox import run

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_CODE = re.compile(r"```(?:[Pp]ython|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def last_number(text: str) -> float | None:
    """The last number after `####`, else the last one at all; None where there is none."""
    for part in (text.rpartition("####")[2] if "####" in text else "", text):
        if numbers := _NUMBER.findall(part):
            # After `####` the number itself is the first one.
            return float((numbers[0] if part is not text else numbers[-1]).replace(",", ""))
    return None


def same_number(target: str, text: str) -> bool:
    """Whether the answer's number is the target's."""
    return last_number(text) == last_number(target)


def first_choice(target: str, choices: Sequence[str], text: str) -> bool:
    """Whether, of all choices, the answer names the target first; letter case does not count."""
    mentions = [(m.start(), -len(c), c) for c in choices if (m := re.search(_word(c), text, re.IGNORECASE))]
    return bool(mentions) and min(mentions)[2] == target


def _word(choice: str) -> str:
    """A pattern for the choice as a word of its own; of '(B)' the letter alone will do at the beginning."""
    if re.fullmatch(r"\([A-Z]\)", choice):
        return rf"{re.escape(choice)}|\A\s*{choice[1]}(?![\w'])"
    return rf"(?<!\w){re.escape(choice)}(?!\w)"


def program(prompt: str, answer: str) -> str:
    """What an answer to a HumanEval prompt makes of it: a code block, or the continuation of the prompt."""
    if block := _CODE.search(answer):
        return f"{prompt}    pass\n\n{block[1]}\n"  # the prompt has imports; its function is defined again
    return f"{prompt}{answer}\n"


def passes(prompt: str, test: str, entry: str, answer: str) -> bool:
    """Whether the program passes HumanEval's test of the function `entry`, in `qbe.datasets.sandbox`."""
    return run(f"{program(prompt, answer)}\n{test}\n\ncheck({entry})\n").passed
