"""Answers that follow a grammar come to an end: whatever a model draws, within the tokens that there are."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import byte_tokenizer
from qbe.server.grammar import json_schema, lark
from qbe.server.grammar_constraint import MOST_DIGITS, MOST_ITEMS, Alphabet, GrammarConstraint, Limits
from qbe.server.json_scan import AnswerScan, JSONScan
from qbe.server.schemas import limits


def _tokenizer() -> llguidance.LLTokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.add_tokens(['{"', '":', '", "', "aaaa", "}}", "[[", '"}', '"]'])
    return llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=[tokenizer.eos_token_id])


TOKENIZER = _tokenizer()
ALPHABET = Alphabet(TOKENIZER)
TEXT: dict[str, Any] = {"type": "string"}
LEAVES = st.sampled_from([
    TEXT, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {"enum": ["red", "green", 5]},
    {"type": "string", "minLength": 3, "maxLength": 9}, {"type": "string", "pattern": "^[a-c]{4,}$"},
    {"type": "integer", "minimum": 10, "maximum": 99}, {"const": {"a": [1]}}, {"type": "object"}, {"type": "array"}, {},
])  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda s: st.one_of(
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, s, st.integers(0, 2)),
        st.builds(
            lambda properties, closed: {
                "type": "object", "properties": properties, "required": sorted(properties)[:3],
                "additionalProperties": not closed,
            },
            st.dictionaries(st.sampled_from("abcdef"), s, max_size=4), st.booleans(),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, s, s),
    ),
    max_leaves=6,
)  # fmt: skip


def constraint_of(grammar: str, bounds: Limits | None = None) -> GrammarConstraint:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return GrammarConstraint(matcher, ALPHABET, TOKENIZER.vocab_size, bounds)


def answer(constraint: GrammarConstraint, tokens: int, draw: Any) -> tuple[str, int]:
    """The text, and how many tokens were left. `draw` chooses of the allowed tokens."""
    found: list[int] = []
    for left in range(tokens, 0, -1):
        allowed = constraint.allowed().nonzero()[:, 0].tolist()
        assert allowed, constraint.error
        token = constraint.settle(draw(allowed, found), left)
        assert token in allowed
        ended = constraint.accept(token)
        if token == ALPHABET.eos:
            return TOKENIZER.decode_bytes(found).decode("utf-8", "replace"), left - 1
        found.append(token)
        if ended:
            return TOKENIZER.decode_bytes(found).decode("utf-8", "replace"), left - 1
    return TOKENIZER.decode_bytes(found).decode("utf-8", "replace"), 0


@settings(deadline=None, max_examples=120)
@given(schema=SCHEMAS, more=st.integers(0, 120), seed=st.integers(0, 99))
def test_what_is_drawn_ends_within_its_tokens(schema: dict[str, Any], more: int, seed: int) -> None:
    constraint = constraint_of(json_schema(schema, "x"), limits([schema], "all"))
    least = constraint._way_to_end(constraint._matcher, constraint._scan)
    assert least is not None
    source = random.Random(seed)
    text, _ = answer(constraint, len(least) + more, lambda allowed, _: source.choice(allowed))
    assert constraint.complete
    jsonschema.validate(json.loads(text), schema)


def test_what_ends_by_itself_is_not_touched() -> None:
    schema = {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False}
    constraint, said = constraint_of(json_schema(schema, "x"), limits([schema], "all")), b'{"a": "bcd"}'
    text, left = answer(constraint, len(said), lambda allowed, found: TOKENIZER.tokenize_str(chr(said[len(found)]))[0])
    assert (text, left, constraint.cut, constraint.complete) == (said.decode(), 0, None, True)


def test_what_cannot_end_is_let_go_on() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 30}}, "required": ["a"]}
    constraint = constraint_of(json_schema(schema, "x"), limits([schema], "all"))
    answer(constraint, 10, lambda allowed, found: allowed[0])
    assert (constraint.cut, constraint.complete) == (None, False)


def longest(token: str) -> Any:
    """Draws this token wherever it may come."""
    wanted = TOKENIZER.tokenize_str(token)[0]
    return lambda allowed, _: wanted if wanted in allowed else allowed[0]


@pytest.mark.parametrize(
    ("schema", "draw", "cut"),
    [
        ({"type": "array", "items": {"type": "number"}}, longest("1"), "too_long"),
        ({"type": "array", "items": TEXT}, longest("a"), "loop"),
        ({"type": "array", "items": {"enum": [0, 1]}}, longest("0"), "loop"),
        ({"type": "integer"}, longest("7"), "too_long"),
    ],
)
def test_what_grows_without_an_end_is_ended(schema: dict[str, Any], draw: Any, cut: str) -> None:
    wanted = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    constraint = constraint_of(json_schema(wanted, "x"), limits([wanted], "all"))
    text, left = answer(constraint, 9000, draw)
    assert left > 0
    assert constraint.cut == cut
    jsonschema.validate(json.loads(text), wanted)


def test_default_bounds_hold_and_larger_ones_of_the_schema_do() -> None:
    source = random.Random(0)
    digits = [TOKENIZER.tokenize_str(d)[0] for d in "0123456789"]

    def number(allowed: list[int], _: list[int]) -> int:
        return source.choice([d for d in digits if d in allowed] or allowed[:1])

    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"],
                              "additionalProperties": False}  # fmt: skip
    text, _ = answer(constraint_of(json_schema(schema, "x"), limits([schema], "all")), 4000, number)
    assert sum(c.isdigit() for c in text) <= MOST_DIGITS + 1
    items = {"type": "array", "items": {"enum": [0, 1, 2]}}
    bounds = [limits([one], "all").items for one in (items, items | {"maxItems": 5}, items | {"minItems": 5000})]
    assert bounds == [MOST_ITEMS, MOST_ITEMS, 5001]
    assert limits([{"maxLength": 10**5}], "all").string >= 10**5


def test_calls_end_and_text_before_them_is_free() -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
    call = f'"<tool_call>" %json {schema} "</tool_call>"'
    grammar = lark(f"start: FREE? (call)?\nFREE: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/\ncall: {call}")
    constraint = constraint_of(grammar, Limits(json="calls"))
    free, _ = answer(constraint, 700, longest("a"))
    assert free == "a" * 700  # a loop in text is the model's own affair
    assert constraint.cut is None

    begun = '<tool_call>{"a": "'

    def calling(allowed: list[int], found: list[int]) -> int:
        return longest(begun[len(found)] if len(found) < len(begun) else "z")(allowed, found)

    for tokens, cut in ((60, "max_tokens"), (400, "loop")):
        constraint = constraint_of(grammar, Limits(json="calls"))
        text, _ = answer(constraint, tokens, calling)
        assert constraint.cut == cut
        assert json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["a"].startswith("zzz")


def test_a_grammar_that_is_exhausted_says_so() -> None:
    constraint = constraint_of(lark('start: "é"'))
    constraint._mask = lambda matcher: __import__("numpy").zeros(TOKENIZER.vocab_size, "uint8")  # type: ignore[method-assign]
    assert not constraint.allowed().any()
    assert constraint.error is not None
    assert "exhausted" in constraint.error


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-1e9, 1e9), st.text(max_size=6)),
    lambda v: st.one_of(st.lists(v, max_size=4), st.dictionaries(st.text(max_size=4), v, max_size=4)), max_leaves=8,
)  # fmt: skip


@given(st.one_of(st.lists(VALUES, max_size=3), st.dictionaries(st.text(max_size=3), VALUES)), st.booleans())
def test_the_scan_knows_where_json_ends(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    scan = JSONScan()
    for n, byte in enumerate(text):
        assert not scan.ended
        assert scan.copy() == scan
        assert scan.feed(bytes([byte])) == 1, n
    assert scan.ended
    assert JSONScan().feed(text + b"}]rest") == len(text)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_calls_are_followed_one_after_the_other(cut: int) -> None:
    text = b'a "b [ <tool_call>{"a": "<tool_call>["}</tool_call>\n<tool_call>{"b": "'
    scan = AnswerScan("calls")
    for part in (text[:cut], text[cut:]):
        scan.feed(part)
    assert scan.in_string
    assert scan.copy().json == scan.json
    scan.feed(b'"}')
    assert scan.json is None
