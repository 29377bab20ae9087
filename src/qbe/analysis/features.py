"""Features of a query: what tiers 1 and 2 read from its text and its tokens. Plain Python and numpy, no torch.

The instruction of a prompt stands at its beginning or its end, so cue words are read there only, which also keeps
words of a pasted text from counting. Character statistics come from one histogram of the UTF-8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HEAD_CHARS, TAIL_CHARS = 400, 200  # where cue words are read
TEXT_CHARS = 16384  # character statistics read at most this much at each end, which bounds the time
_STRIDE_TOKENS = 4096  # token statistics read at most this many tokens, evenly spaced

# Cue words and two-word phrases by the feature that counts them.
_CUES: dict[str, str] = {
    "cue_summarisation": "summarize summarise summarized summarised summary summaries summarization summarisation "
    "condense shorten gist abstract recap digest tldr tl_dr key_points main_idea main_points sum_up sum_this "
    "sum_it in_brief headline title",
    "cue_greeting": "hi hello hey thanks thank sorry lol haha yo bye morning night pretend chat talk friend roleplay "
    "role_playing conversation feel feeling nice glad advice act_as user customer agent",
    "cue_first_person": "i i'm i'd i've i'll my me we our us mine",
    "cue_second_person": "you your you're yourself yours",
    "cue_code": "function functions code python javascript typescript java c++ rust golang program script class method "
    "implement bug debug sql query regex regular_expression api compile algorithm css bash git dockerfile react "
    "unit_test unit_tests refactor loop def import typeerror database linked_list array arrays pandas leetcode "
    "printf include boolean string component interface stack_trace exception",
    "cue_mathematics": "calculate compute solve solving equation equations sum plus minus times multiply multiplied "
    "divide divided percent percentage total how_many how_much average probability area integral derivative simplify "
    "prove remainder fraction altogether twice half cost costs speed radius evaluate math mathematics left each per",
    "cue_structured": "json yaml csv xml table tables schema column columns row rows markdown bullet bullets bulleted "
    "numbered format template keys field fields entities array_of list lists checklist object schedule budget",
    "cue_fact": "who when where which whose what_is what_was what_are what_does how_old how_tall how_long is_the name "
    "capital year",
    "cue_open": "why how explain describe discuss compare analyze analyse tell_me essay story think opinion suggest "
    "recommend causes effects important affect create generate",
    "cue_reasoning": "if then therefore suppose assume statements options argument premises logically valid true false "
    "order arranged consistent instructions lies truth",
    "asks_list": "list lists bullet bullets bulleted numbered checklist examples ideas items",
    "asks_table": "table tables columns rows csv spreadsheet",
    "asks_json": "json yaml xml schema",
    "asks_steps": "steps step_by recipe reasoning show_your plan procedure tutorial",
    "asks_short": "briefly brief short one_word one_sentence single yes_or true_or yes_no only concise final_answer "
    "options one_line output_yes",
    "asks_long": "detailed detail essay story article comprehensive in_depth letter thorough report everything long "
    "tutorial speech paragraphs",
}
_CODE_MARKS = (
    "```", "()", "=>", "==", "!=", "->", "::", "+=", ";\n", "def ", "):", "#include", "</", "\n    ", "//", "&&",
)  # fmt: skip

CUES = tuple(_CUES)
FEATURES = (
    "tokens", "vocabulary_diversity", "punctuation_density", "question_marks", "digit_density", "numbers",
    "code_marks", "bracket_density", "quote_density", "math_marks", "uppercase_density", "lines", "non_ascii_density",
    "semantic_entropy", *CUES,
)  # fmt: skip
# Counts enter the classifier as log(1 + count): the tenth code mark says less than the first.
LOGARITHMIC = ("tokens", "question_marks", "numbers", "code_marks", "math_marks", "lines", *CUES)

_words = re.compile(r"[\w']+(?:\+\+)?").findall
_numbers = re.compile(r"\d+(?:[.,]\d+)*").findall


def _cue_table() -> dict[str, tuple[int, ...]]:
    table: dict[str, tuple[int, ...]] = {}
    for i, words in enumerate(_CUES.values()):
        for w in words.split():
            key = w.replace("_", " ")
            table[key] = (*table.get(key, ()), i)
    return table


_CUE_TABLE = _cue_table()


def _bytes(chars: str) -> npt.NDArray[np.intp]:
    return np.frombuffer(chars.encode(), np.uint8).astype(np.intp)


_PUNCTUATION = _bytes("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_BRACKETS, _QUOTES, _MATH = _bytes("{}[]()<>"), _bytes("\"'`"), _bytes("=+*^$%/")


def ends(text: str, head: int, tail: int) -> str:
    """The first `head` and the last `tail` characters; the whole text when it is not longer."""
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def cue_counts(text: str) -> list[int]:
    """How often each of `CUES` occurs at the beginning and the end of the text; words and two-word phrases."""
    words = _words(ends(text, HEAD_CHARS, TAIL_CHARS).lower().replace("’", "'"))
    counts = [0] * len(CUES)
    previous = ""
    for w in words:
        for i in _CUE_TABLE.get(w, ()):
            counts[i] += 1
        for i in _CUE_TABLE.get(f"{previous} {w}", ()):
            counts[i] += 1
        previous = w
    return counts


def count_code_marks(text: str) -> int:
    """Occurrences of marks that are frequent in programs and rare in prose."""
    return sum(map(text.count, _CODE_MARKS))


def count_numbers(text: str) -> int:
    """Runs of digits, with their decimal points and thousands separators."""
    return len(_numbers(text))


def count_question_marks(text: str) -> int:
    """Question marks of the Latin, full-width, Arabic and Greek scripts."""
    return text.count("?") + text.count("？") + text.count("؟") + text.count("\u037e")


def extract(text: str, token_ids: Sequence[int], semantic_entropy: float = 0.0) -> npt.NDArray[np.float64]:
    """The tier-2 features in the order of `FEATURES`.

    Args:
        text: the query; any Unicode, lone surrogates included.
        token_ids: its tokens.
        semantic_entropy: of the tokens' embeddings, in [0, 1]; 0 when there is no embedding.

    Returns:
        float64 [len(FEATURES)], every value finite.
    """
    n = len(token_ids)
    sample = token_ids if n <= _STRIDE_TOKENS else token_ids[:: -(-n // _STRIDE_TOKENS)]
    body = ends(text, TEXT_CHARS, TEXT_CHARS)
    raw = np.frombuffer(body.encode("utf-8", "surrogatepass"), np.uint8)
    histogram = np.bincount(raw, minlength=256)
    chars = max(1, len(raw))
    digits = int(histogram[48:58].sum())
    values = [
        n,
        len(set(sample)) / max(1, len(sample)),
        histogram[_PUNCTUATION].sum() / chars,
        count_question_marks(body),
        digits / chars,
        count_numbers(body) if digits else 0,
        count_code_marks(body),
        histogram[_BRACKETS].sum() / chars,
        histogram[_QUOTES].sum() / chars,
        histogram[_MATH].sum(),
        histogram[65:91].sum() / chars,
        histogram[10],
        histogram[128:].sum() / chars,
        semantic_entropy,
        *cue_counts(body),
    ]
    return np.array(values, np.float64)
