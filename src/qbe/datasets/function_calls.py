"""Function calls of the Berkeley Function-Calling Leaderboard: its schemas, and whether a call is one it accepts."""

from __future__ import annotations

import json
import re
from typing import Any

KINDS = {"dict": "object", "float": "number", "tuple": "array"}
Expected = dict[str, dict[str, list[Any]]]  # function -> argument -> accepted values; "" among them: it may be missing


def schema_of(given: Any) -> Any:
    """BFCL's types are Python's."""
    if isinstance(given, list):
        return [schema_of(v) for v in given]
    if not isinstance(given, dict):
        return given
    found = {k: schema_of(v) for k, v in given.items() if k != "optional"}
    if isinstance(kind := given.get("type"), str):
        found["type"] = KINDS.get(kind, kind)
        if kind == "any":
            del found["type"]
    return found


def first_accepted(value: Any) -> Any:
    """Accepted objects hold lists of accepted values, too."""
    if isinstance(value, dict):
        return {k: first_accepted(v[0]) for k, v in value.items() if "" not in v}
    return value


def graded(text: str, expected: Expected) -> tuple[bool, bool]:
    """Whether the first call in an answer has the right name, and right arguments, too."""
    found = re.search(r'\{\s*"name".*', text, re.DOTALL)
    try:
        call, _ = json.JSONDecoder().raw_decode(found[0] if found else "")
        name, arguments = call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError):
        return False, False
    if name not in expected:
        return False, False
    return True, isinstance(arguments, dict) and accepted(arguments, expected[name])


def accepted(arguments: dict[str, Any], expected: dict[str, list[Any]]) -> bool:
    """Whether every argument has an accepted value and none is missing that must be there."""
    there = all(key in arguments or "" in values for key, values in expected.items())
    return there and all(
        key in expected and any(_same(value, a) for a in expected[key]) for key, value in arguments.items()
    )


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return _plain(value) == _plain(wanted)
    if isinstance(value, dict) and isinstance(wanted, dict):
        return accepted(value, wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^'\"]", "", text).lower()
