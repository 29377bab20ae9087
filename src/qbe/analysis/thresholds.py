"""Tier 1: thresholds on the token count and a few cheap marks, in microseconds and without numpy.

Queries under `SHORT_TOKENS` get aggressive and queries over `LONG_TOKENS` conservative quantisation. In between the
level rises with the logarithm of the length. Length alone puts a one-line fact, a one-line sum and a one-line program
at the same level, so marks add to it; what each adds was fitted on the measured damage (see `classifier.json`,
"thresholds").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from qbe.analysis.features import CUES, count_code_marks, count_numbers, count_question_marks, cue_counts, ends
from qbe.analysis.profile import QueryProfile

SHORT_TOKENS = 16
LONG_TOKENS = 256
_END_CHARS = 1024  # marks are counted in this much of either end

MARKS = (
    "length", "code", "mathematics", "summarisation", "dialogue", "structured_output", "open_question", "fact",
    "asks_short", "asks_long",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(CUES)}


def marks(text: str, tokens: int) -> tuple[str, list[float]]:
    """The prompt class by rule and the values of `MARKS`, each in [0, 1].

    Args:
        text: the query.
        tokens: how many tokens it has.
    """
    body = ends(text, _END_CHARS, _END_CHARS)
    cue = cue_counts(body)
    numbers, code_marks = count_numbers(body), count_code_marks(body)

    def count(name: str) -> int:
        return cue[_AT[name]]

    structure = count("asks_table") + 2 * count("asks_json")
    votes = {
        "question_answering": 0.9 + count("cue_fact") + 0.5 * count("cue_reasoning"),
        "dialogue": 1.5 * count("cue_greeting") + 0.5 * count("cue_first_person") + 0.3 * count("cue_second_person"),
        "summarisation": 5.0 * count("cue_summarisation"),
        "code": 1.5 * count("cue_code") + code_marks - 2 * structure,
        "mathematics": (1.2 * min(count("cue_mathematics"), 4) + 0.5 * min(numbers, 4)) * (numbers > 1),
        "structured_output": 2.0 * structure + 0.7 * count("cue_structured"),
    }
    name = max(votes, key=votes.__getitem__)
    length = log(max(tokens, 1) / SHORT_TOKENS) / log(LONG_TOKENS / SHORT_TOKENS)
    question = count_question_marks(body) > 0
    return name, [
        min(1.0, max(0.0, length)),
        float(name == "code"),
        float(name == "mathematics"),
        float(name == "summarisation"),
        float(name == "dialogue"),
        float(name == "structured_output"),
        float(count("cue_open") > 0),
        float(name == "question_answering" and question and count("cue_fact") > 0 and count("cue_open") == 0),
        float(count("asks_short") > 0),
        float(count("asks_long") > 0),
    ]


def analyze(text: str, token_ids: Sequence[int], weights: Mapping[str, float], level: float) -> QueryProfile:
    """The tier-1 profile.

    Args:
        text: the query.
        token_ids: its tokens; only their number is read.
        weights: what each of `MARKS` adds to the score.
        level: score of a short query without marks.
    """
    name, values = marks(text, len(token_ids))
    score = level + sum(weights[m] * v for m, v in zip(MARKS, values, strict=True))
    features = {"tokens": float(len(token_ids)), **dict(zip(MARKS, values, strict=True))}
    return QueryProfile(min(1.0, max(0.0, score)), name, 1, features)
