"""Whether a reply is right, and whether it has the form that it must have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qbe.datasets import answers
from qbe.datasets.function_calls import Expected, accepted
from qbe.datasets.sandbox import run
from qbe.regress.client import Reply
from qbe.regress.refusals import refuses

# Names of tokens that end or begin a turn. Where one is in an answer, whoever wrote it went past its end.
_MARKS = re.compile(
    r"<\|[a-z_]{2,24}\|>|</?s>|<(?:start|end)_of_turn>|<eos>|\[/?INST\]|<｜[^｜]{2,24}｜>", re.IGNORECASE
)


@dataclass(frozen=True)
class Grade:
    """What a reply is worth.

    Attributes:
        right: whether it is what was wanted.
        malformed: what is wrong with its form; "" for nothing.
    """

    right: bool
    malformed: str = ""


Grader = Callable[[Reply], Grade]


def text_grader(right: Callable[[str], bool]) -> Grader:
    """Of answers in words."""

    def grade(reply: Reply) -> Grade:
        wrong = malformed(reply)
        return Grade(not reply.error and right(reply.text), wrong)

    return grade


def malformed(reply: Reply) -> str:
    """What no answer may have, whatever was asked."""
    if reply.error:
        return f"no answer: {reply.error}"
    if found := _MARKS.search(reply.text):
        return f"a mark of a turn in the text: {found[0]}"
    if reply.valid is False and reply.finish != "length":
        return "not of the form that was asked for"
    return ""


def program_grader(head: str, test: str) -> Grader:
    """Of a Python function whose head is given; it must pass the test in `qbe.datasets.sandbox`."""
    return text_grader(lambda text: run(f"{answers.program(head, text)}\n{test}\n").passed)


def refusal_grader(refuse: bool) -> Grader:
    """Right: refused if it should be."""
    return text_grader(lambda text: refuses(text) is refuse)


def schema_grader(schema: Mapping[str, Any], values: Mapping[str, Any] | None) -> Grader:
    """Of JSON of this schema; right where it also has these values, as far as any are named."""
    from jsonschema import ValidationError, validate

    def grade(reply: Reply) -> Grade:
        wrong = malformed(reply)
        if wrong or reply.finish == "length":  # cut within: not wrong in form
            return Grade(False, wrong)
        try:
            value = json.loads(reply.text)
            validate(value, schema)
        except ValueError as error:
            return Grade(False, f"no JSON: {error}")
        except ValidationError as error:
            return Grade(False, f"not of the schema: {error.message[:200]}")
        return Grade(accepted(value, {k: [v] for k, v in values.items()}) if values else True)

    return grade


def call_grader(expected: Sequence[Expected]) -> Grader:
    """Of function calls: each expected one, in any order, and no other; none where none is expected."""

    def grade(reply: Reply) -> Grade:
        wrong = malformed(reply)
        if wrong:
            return Grade(False, wrong)
        calls = []
        for name, text in reply.calls:
            try:
                arguments = json.loads(text or "{}")
            except ValueError as error:
                return Grade(False, "" if reply.finish == "length" else f"{name}: arguments are no JSON: {error}")
            if not isinstance(arguments, dict):
                return Grade(False, f"{name}: arguments are no object")
            calls.append((name, arguments))
        return Grade(_all_expected(calls, expected))

    return grade


def _all_expected(calls: list[tuple[str, dict[str, Any]]], expected: Sequence[Expected]) -> bool:
    left = list(calls)
    for wanted in expected:
        found = next((c for c in left if c[0] in wanted and accepted(c[1], wanted[c[0]])), None)
        if found is None:
            return False
        left.remove(found)
    return not left
