"""How a call of the Berkeley Function-Calling Leaderboard is graded, and what its functions become."""

from __future__ import annotations

import json

import pytest

from qbe.datasets.function_calls import graded, schema_of

EXPECTED = {"f": {"city": ["New York", "NYC"], "count": [3], "sure": ["", True], "box": [{"w": [1], "h": ["", 2]}]}}


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        ("f", {"city": "new york.", "count": 3, "box": {"w": 1}}, (True, True)),
        ("f", {"city": "NYC", "count": 3.0, "sure": True, "box": {"w": 1, "h": 2}}, (True, True)),
        ("f", {"city": "Boston", "count": 3, "box": {"w": 1}}, (True, False)),
        ("f", {"city": "NYC", "count": 3, "sure": 1, "box": {"w": 1}}, (True, False)),
        ("f", {"city": "NYC", "count": 3}, (True, False)),
        ("f", {"city": "NYC", "count": 3, "box": {"w": 1}, "more": 1}, (True, False)),
        ("g", {"city": "NYC", "count": 3, "box": {"w": 1}}, (False, False)),
    ],
)
def test_a_call_is_graded_by_name_and_accepted_arguments(name: str, arguments: object, right: object) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    assert graded(f"<tool_call>\n{call}\n</tool_call>", EXPECTED) == right
    assert graded(f"I call {call} now", EXPECTED) == right


def test_what_is_no_call_is_wrong() -> None:
    for text in ("", "f(3)", '{"name": "f"', '{"name": "f"}', '{"name": "f", "arguments": 3}'):
        assert not graded(text, EXPECTED)[1]


def test_types_become_json_schemas() -> None:
    given = {"type": "dict", "properties": {"a": {"type": "float", "optional": True}, "b": {"type": "any"}}}
    found = {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}}
    assert schema_of(given) == found
