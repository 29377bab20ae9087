"""JSON schemas as people write them: other dialects made plain, and what no grammar can hold taken out.

Tools come with schemas of OpenAPI, Gemini, zod, pydantic and every draft of JSON Schema. `normal` makes one dialect of
them; `relaxed` leaves out what llguidance does not compile. What was left out is checked when the answer is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from qbe.server.errors import APIError
from qbe.server.grammar_constraint import MOST_DIGITS, MOST_ITEMS, MOST_STRING, Limits
from qbe.server.json_scan import Where

Schema = dict[str, Any]

_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_OTHER_TYPES = {"float": "number", "double": "number", "int": "integer", "long": "integer", "bool": "boolean",
                "str": "string", "dict": "object", "list": "array", "none": "null"}  # fmt: skip
_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames", "additionalItems",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "example")  # which may have anything in them
_ABOUT_PATTERNS = ("pattern", "patternProperties")
_ABOUT_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_HARD_PATTERN = re.compile(r"\(\?[=!<>#P]|\\[1-9bBkG]|\\[AZz]|[*+?}]\+")
_MOST_NUMBER = 2**53


def normal(schema: Any, param: str) -> Schema:
    """The schema in one dialect (2020-12, mostly). Raises APIError for what is no schema, about this field."""
    try:
        found = _normal(schema, param, "")
    except RecursionError:
        raise APIError(400, f"{param}: a schema is nested too deeply: make it simpler", param=param,
                       code="invalid_grammar") from None  # fmt: skip
    if not isinstance(found, dict):
        return {"not": {}} if found is False else {}
    _mapped(found, lambda one: _ends(one, found, param))
    return found


def _ends(schema: Schema, root: Schema, param: str) -> Schema:
    """The schema, of which no reference leads back to itself."""
    end, seen = schema, set[str]()
    while isinstance(reference := end.get("$ref"), str):
        if reference in seen:
            raise APIError(400, f"{param}: '{reference[:200]}' refers to itself: there is no text that it allows",
                           param=param, code="invalid_grammar")  # fmt: skip
        seen.add(reference)
        target = _target(reference, root)
        if not isinstance(target, dict):
            break
        end = target
    return dict(schema)


def _normal(schema: Any, param: str, path: str) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _no_schema(param, path, "must be an object")
    new: Schema = {k: v for k, v in schema.items() if v is not None or k in ("const", "default")}
    new.pop("x-guidance", None)  # the grammar library's own options
    _older(new, param, path)
    for key in _ONE:
        if key in new and not (key == "items" and isinstance(new[key], list)):
            new[key] = _normal(new[key], param, f"{path}/{key}")
    if isinstance(new.get("items"), list):  # a tuple of older drafts
        new["prefixItems"] = new.pop("items")
        if "additionalItems" in new:
            new["items"] = new.pop("additionalItems")
    for key in _MANY:
        if key in new:
            if not isinstance(new[key], list):
                raise _no_schema(param, f"{path}/{key}", "must be a list")
            new[key] = [_normal(part, param, f"{path}/{key}/{i}") for i, part in enumerate(new[key])]
            if not new[key]:
                del new[key]
    for key in _BY_NAME:
        if key in new:
            if not isinstance(new[key], dict):
                raise _no_schema(param, f"{path}/{key}", "must be an object")
            new[key] = {name: _normal(part, param, f"{path}/{key}/{name}") for name, part in new[key].items()}
    if not isinstance(new.get("required", []), list) or not all(isinstance(r, str) for r in new.get("required", [])):
        raise _no_schema(param, f"{path}/required", "must be a list of names")
    _bounds(new)
    return _types(new, param, path)


def _older(schema: Schema, param: str, path: str) -> None:
    """Keywords of older drafts as those of 2020-12, which the grammar library and the check of answers know.

    Both pass over a keyword that they do not know without a word.
    """
    if isinstance(schema.get("required"), bool):  # of draft 3, about the property itself
        del schema["required"]
    properties = schema.get("properties")
    needed = [n for n, s in properties.items() if _is_required(s)] if isinstance(properties, dict) else []
    if needed and isinstance(schema.get("required", []), list):
        schema["required"] = list(dict.fromkeys([*schema.get("required", []), *needed]))
    rules: list[Schema] = []
    if "divisibleBy" in schema:
        rules.append({"multipleOf": schema.pop("divisibleBy")})
    for disallowed in _listed(schema.pop("disallow", [])):
        if isinstance(disallowed, dict):
            rules.append({"not": disallowed})
        elif disallowed in ("any", *_TYPES):  # what is no type forbids nothing
            rules.append({"not": {"type": disallowed}})
    if schema.get("$recursiveRef") == "#":  # of 2019-09: this schema
        rules.append({"$ref": schema.pop("$recursiveRef")})
    schema.pop("$recursiveAnchor", None)
    for rule in rules:  # beside the schema's own, where there is one
        if schema.keys() & rule:
            schema["allOf"] = [*_listed(schema.get("allOf", [])), rule]
        else:
            schema |= rule
    if "extends" in schema:
        schema["allOf"] = [*_listed(schema.get("allOf", [])), *_listed(schema.pop("extends"))]
    dependencies = schema.pop("dependencies", {})
    if not isinstance(dependencies, dict):
        raise _no_schema(param, f"{path}/dependencies", "must be an object")
    for name, wanted in dependencies.items():
        names = isinstance(wanted, str | list)
        others = schema.setdefault("dependentRequired" if names else "dependentSchemas", {})
        if isinstance(others, dict):
            others.setdefault(name, _listed(wanted) if names else wanted)


def _is_required(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("required") is True


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _bounds(schema: Schema) -> None:
    """Bounds that were flags in draft 4."""
    for limit, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(flag), bool) and schema.pop(flag) and limit in schema:
            schema[flag] = schema.pop(limit)


def _types(schema: Schema, param: str, path: str) -> Schema:
    given = schema.get("type")
    if given is None:
        types: list[str] = []
    else:
        names = given if isinstance(given, list) else [given]
        schemas = [n for n in names if isinstance(n, dict)]
        if not all(isinstance(n, str | dict) for n in names):
            raise _no_schema(param, f"{path}/type", "must be the name of a type")
        lower = [_OTHER_TYPES.get(n.lower(), n.lower()) for n in names if isinstance(n, str)]
        types = [] if schemas or not all(n in _TYPES for n in lower) else lower
        del schema["type"]
        if types:
            schema["type"] = types if isinstance(given, list) else types[0]
        elif schemas and "anyOf" not in schema:
            schema["anyOf"] = [_normal(s, param, f"{path}/type") for s in schemas] + [
                {"type": n} for n in lower if n in _TYPES
            ]
    if schema.pop("nullable", False) is True and types and "null" not in types:  # of OpenAPI 3.0
        schema["type"] = [*types, "null"]
        if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
            schema["enum"] = [*schema["enum"], None]
    return schema


def _no_schema(param: str, path: str, problem: str) -> APIError:
    return APIError(400, f"{param}: {path[:200] or 'the schema'} {problem}", param=param, code="invalid_grammar")


def relaxed(schema: Schema) -> Iterator[Schema]:
    """The schema with less and less in it, until a grammar can be made of it: first without what is known to be too
    hard, then without all patterns, references that go round and bounds of numbers.
    """
    yield schema | {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    for rule in (_without_hard, _without_all):
        yield _mapped(schema, lambda s, rule=rule: rule(s, schema)) | {  # type: ignore[misc]
            "x-guidance": {"lenient": True, "coerce_one_of": True}
        }


def _without_hard(schema: Schema, root: Schema) -> Schema:
    kept = dict(schema)
    if isinstance(kept.get("pattern"), str) and _HARD_PATTERN.search(kept["pattern"]):
        del kept["pattern"]
    if any(_HARD_PATTERN.search(p) for p in kept.get("patternProperties", ())):
        del kept["patternProperties"]
        kept.pop("additionalProperties", None)
    for key in ("$ref", "$dynamicRef"):
        if key in kept and not _resolves(kept[key], root):
            del kept[key]
    for key in _ABOUT_NUMBERS:
        number = kept.get(key)
        if number is not None and (not isinstance(number, int | float) or not abs(number) <= _MOST_NUMBER):
            del kept[key]
    if kept.get("enum") == []:
        del kept["enum"]
    named = kept.get("properties", {}).keys()
    if kept.get("additionalProperties") is False and not set(kept.get("required", ())) <= named:
        del kept["additionalProperties"]
    return kept


def _without_all(schema: Schema, root: Schema) -> Schema:
    kept = _without_hard(schema, root)
    for key in (*_ABOUT_PATTERNS, *_ABOUT_NUMBERS, "minLength", "minProperties", "maxProperties"):
        kept.pop(key, None)
    return kept


def _resolves(reference: Any, root: Schema) -> bool:
    return isinstance(reference, str) and isinstance(_target(reference, root), dict | bool)


def _target(reference: str, root: Schema) -> Any:
    """What a reference within a schema is to; None for one that is not."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return None
    return node if reference in ("#", "#/") or "/" in reference else None


def _mapped(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """The schema with every schema within it changed, from the outside in."""

    def each(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        new = change(schema)
        for key in _ONE:
            if key in new:
                new[key] = each(new[key])
        for key in _MANY:
            if key in new:
                new[key] = [each(s) for s in new[key]]
        for key in _BY_NAME:
            if key in new:
                new[key] = {name: each(s) for name, s in new[key].items()}
        return new

    changed: Schema = each(schema)
    return changed


def limits(schemas: list[Schema], json_in: Where) -> Limits:
    """What JSON of these schemas may grow to: the default, or what they say themselves where that is more.

    Args:
        json_in: see `Limits.json`.
    """
    most = {"maxLength": 0, "minLength": 0, "maxItems": 0, "minItems": 0}
    seen = list[Any](schemas)
    while seen:
        part = seen.pop()
        if isinstance(part, dict):
            for key, value in part.items():
                if key in most and isinstance(value, int | float) and not isinstance(value, bool):
                    most[key] = max(most[key], min(int(value), 2**31))
                elif key in ("enum", "const"):
                    most["maxLength"] = max(most["maxLength"], len(json.dumps(value)))
                elif isinstance(value, dict | list):
                    seen.append(value)
        elif isinstance(part, list):
            seen += part
    string, items = max(most["maxLength"], most["minLength"]), max(most["maxItems"], most["minItems"])
    # A character may take six bytes, as an escape.
    return Limits(max(MOST_STRING, 6 * string + 1), max(MOST_ITEMS, items + 1), MOST_DIGITS, json_in)
