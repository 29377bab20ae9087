"""Schemas of every draft of JSON Schema: made one dialect, and no keyword passed over without a word."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from qbe.server.errors import APIError
from qbe.server.schemas import normal

VALUES: list[Any] = [
    None, True, 0, 2, 3, 6, 7.5, "", "a", "abc", [], [1], ["a"], ["a", 1], [1, "a"], {}, {"a": 1}, {"a": "x"},
    {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 2}, {"a": 1, "b": 2, "c": {"a": 1}}, {"a": {"a": {"a": 1}}},
]  # fmt: skip
A3, A4, A7, A19 = (jsonschema.Draft3Validator, jsonschema.Draft4Validator, jsonschema.Draft7Validator,
                   jsonschema.Draft201909Validator)  # fmt: skip
OLDER: list[tuple[Any, dict[str, Any]]] = [
    (A3, {"divisibleBy": 3}),
    (A3, {"type": "integer", "divisibleBy": 2, "minimum": 1}),
    (A3, {"disallow": "string"}),
    (A3, {"disallow": ["number", {"type": "object", "properties": {"a": {"required": True}}}]}),
    (A3, {"disallow": "any"}),
    (A3, {"extends": {"properties": {"a": {"type": "integer", "required": True}}}, "type": "object"}),
    (A3, {"extends": [{"type": "integer"}, {"minimum": 3}]}),
    (A3, {"type": "object", "properties": {"a": {"required": True}, "b": {"required": False}}}),
    (A3, {"dependencies": {"a": "b"}}),
    (A3, {"type": ["string", {"type": "object", "properties": {"a": {"type": "integer", "required": True}}}]}),
    (A4, {"dependencies": {"a": ["b", "c"]}, "required": ["a"]}),
    (A4, {"minimum": 2, "exclusiveMinimum": True}),
    (A7, {"dependencies": {"a": {"required": ["b"]}, "c": False}}),
    (A7, {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}],
          "additionalItems": False, "dependencies": {"a": ["b"]}}),
    (A7, {"additionalItems": False, "items": {"type": "string"}}),
    (A19, {"properties": {"a": {"$recursiveRef": "#"}, "b": {"type": "string"}}, "$recursiveAnchor": True,
           "additionalProperties": {"type": "integer"}, "type": ["object", "integer"]}),
]  # fmt: skip


@pytest.mark.parametrize(("draft", "schema"), OLDER)
def test_older_drafts_mean_what_they_meant(draft: Any, schema: dict[str, Any]) -> None:
    given = json.dumps(schema)
    now = Draft202012Validator(normal(schema, "tools"))
    assert [v for v in VALUES if now.is_valid(v)] == [v for v in VALUES if draft(schema).is_valid(v)]
    assert json.dumps(schema) == given, "the request's own is left as it is"


def test_no_keyword_of_a_draft_is_left_that_only_older_ones_know() -> None:
    known = Draft202012Validator.VALIDATORS.keys()
    drafts = (A3, A4, jsonschema.Draft6Validator, A7, A19)
    older = {k for draft in drafts for k in draft.VALIDATORS} - known
    assert older == {"divisibleBy", "disallow", "extends", "dependencies", "additionalItems", "$recursiveRef"}
    values: dict[str, Any] = {"divisibleBy": 2, "disallow": "null", "dependencies": {}, "additionalItems": False,
                              "extends": [], "$recursiveRef": "#"}  # fmt: skip
    for key in older:
        kept = normal({"properties": {"a": {"items": [{}], key: values[key]}}}, "tools")["properties"]["a"]
        assert key not in kept, "translated, or without a meaning beside others"


BROKEN: dict[str, tuple[Any, Any]] = {  # keyword -> its value, and what breaks it
    "$dynamicRef": ("#none", 1), "$ref": ("#/$defs/none", 1), "additionalProperties": (False, {"a": 1}),
    "allOf": ([{"type": "string"}], 1), "anyOf": ([{"type": "string"}], 1), "const": (1, 2),
    "contains": ({"const": 1}, [2]), "dependentRequired": ({"a": ["b"]}, {"a": 1}),
    "dependentSchemas": ({"a": {"required": ["b"]}}, {"a": 1}), "enum": ([1], 2), "exclusiveMaximum": (1, 1),
    "exclusiveMinimum": (1, 1), "format": ("date", "x"), "if": ({"then": False}, 1), "items": ({"const": 1}, [2]),
    "maxItems": (1, [1, 2]), "maxLength": (1, "ab"), "maxProperties": (1, {"a": 1, "b": 1}), "maximum": (1, 2),
    "minItems": (1, []), "minLength": (1, ""), "minProperties": (1, {}), "minimum": (1, 0), "multipleOf": (2, 3),
    "not": ({"type": "integer"}, 1), "oneOf": ([{"type": "string"}], 1), "pattern": ("^a$", "b"),
    "patternProperties": ({"^a": {"const": 1}}, {"a": 2}), "prefixItems": ([{"const": 1}], [2]),
    "properties": ({"a": {"const": 1}}, {"a": 2}), "propertyNames": ({"pattern": "^b"}, {"a": 1}),
    "required": (["a"], {}), "type": ("string", 1), "unevaluatedItems": (False, [1]),
    "unevaluatedProperties": (False, {"a": 1}), "uniqueItems": (True, [1, 1]),
}  # fmt: skip


def test_the_grammar_library_keeps_to_each_keyword_or_refuses_it() -> None:
    assert BROKEN.keys() == Draft202012Validator.VALIDATORS.keys()
    tokenizer = LLTokenizer("byte")
    for key, (value, breaks) in BROKEN.items():
        schema = normal({key: value}, "tools")
        grammar = json.dumps({"grammars": [{"json_schema": schema}]})
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            continue
        taken = all(matcher.consume_token(t) for t in tokenizer.tokenize_str(json.dumps(breaks)))
        assert not (taken and matcher.is_accepting()), key


@pytest.mark.parametrize("schema", [
    {"dependencies": 3}, {"extends": 3}, {"extends": [1]}, {"disallow": {"type": 3}},
    {"properties": {"a": {"allOf": 3}}},
])  # fmt: skip
def test_what_is_no_schema_is_one_line(schema: Any) -> None:
    with pytest.raises(APIError) as e:
        normal(schema, "tools")
    assert (e.value.status, e.value.code) == (400, "invalid_grammar")
    assert "must be" in e.value.message


@pytest.mark.parametrize("schema", [{"disallow": [[1]]}, {"disallow": "colour"}, {"disallow": []}])
def test_types_that_are_none_forbid_nothing(schema: Any) -> None:
    assert normal(schema, "tools") == {}
