"""Writes the reference pages of the documentation from the code: the command line, HTTP, settings, Python.

    python scripts/docs_reference.py docs/reference

The command line comes from typer's application, HTTP from FastAPI's OpenAPI document, settings from the classes that
check the file, Python from the dataclasses that callers make. `make docs` runs this first.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import runpy
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

MADE = "<!-- Made by scripts/docs_reference.py: change the code that it is read from. -->\n"
BODIES = [
    "ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest", "CountTokensRequest", "BatchRequest",
    "FeedbackRequest", "RolloutRequest",
]  # fmt: skip
Rows = list[tuple[str, ...]]

# Where each variable is read is found by its name; what it does is said here once.
ENVIRONMENT = {
    "QBE_CACHE": "folder for models, measurements and kernels; else `$XDG_CACHE_HOME/qbe`, else `~/.cache/qbe`",
    "QBE_RECORDS": "file of the records; else `records.sqlite` in the cache folder",
    "QBE_LEDGER": "file of the server's ledger; else `ledger.sqlite` in the cache folder",
    "QBE_BLUEPRINTS": "file of the blueprint cache, or `off`; else a file in the cache folder",
    "QBE_DATA": "folder with the data sets of `qbe eval`, `qbe train` and `qbe bench serve`",
    "QBE_CPU_KERNEL": "which CPU kernel runs; else the best one: `torch`, `scalar`, `avx2`, `avx512` or `amx`",
}


def table(head: tuple[str, ...], rows: Rows) -> str:
    """A Markdown table; nothing for no rows."""
    if not rows:
        return ""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(c) for c in line) + " |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text that does not end its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def attributes(doc: str | None, heading: str = "Attributes") -> dict[str, str]:
    """What a docstring's section says of each name; names that share a line share what it says."""
    found: dict[str, str] = {}
    section = re.search(rf"^ *{heading}:\n((?:(?: +.*)?\n?)*)", inspect.cleandoc(doc or "") + "\n", re.MULTILINE)
    if section is None:
        return found
    names: list[str] = []
    for line in textwrap.dedent(section[1]).splitlines():
        begun = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if begun:
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif line.startswith(" ") and names:
            found |= {n: f"{found[n]} {line.strip()}" for n in names}
        elif line.strip():
            break
    return found


def summary(doc: str | None) -> str:
    """A docstring up to its first section."""
    return re.split(r"\n *(?:Attributes|Args|Returns|Raises):\n", inspect.cleandoc(doc or "") + "\n")[0].strip()


# The command line


def cli_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from qbe.cli.main import app

    root = typer.main.get_group(app)
    codes = "Exit codes: 0, 2 for bad input (one line on standard error), 130 after Ctrl-C, 143 after SIGTERM.\n"
    parts = [MADE, "# Command line\n", f"{summary(root.help)}\n", codes]
    for path, command in _commands("qbe", root):
        parts += [f"## {path}\n", f"{summary(command.help)}\n", f"    {_usage(path, command)}\n"]
        rows = [_parameter(p) for p in command.params if not p.hidden]
        parts.append(table(("option", "default", "meaning"), rows))
    return "\n".join(parts)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """All commands below `command`, in the order in which `--help` lists them, those that only hold others left out."""
    below = getattr(command, "commands", {})
    if path == "qbe" or not below or command.invoke_without_command:
        yield path, command
    for name, one in below.items():
        yield from _commands(f"{path} {name}", one)


def _usage(path: str, command: Any) -> str:
    given = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in command.params if not _is_option(p)]
    options = ["[OPTIONS]"] if any(_is_option(p) for p in command.params) else []
    below = ["COMMAND ..."] if getattr(command, "commands", {}) else []
    return " ".join([path, *options, *given, *below])


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("-")


def _parameter(p: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts)) if _is_option(p) else f"`{p.name.upper()}`"
    default = "" if p.default is None or p.default is False or callable(p.default) else f"`{p.default}`"
    return names, "required" if p.required else default, p.help or ""


# HTTP


def http_page() -> str:
    """Every route, and every object of a request's body."""
    from qbe.server.app import make_app

    def no_service() -> Any:
        raise RuntimeError("the document needs no service")

    document = make_app(no_service).openapi()
    schemas = document["components"]["schemas"]
    parts = [MADE, "# HTTP\n", f"{document['info']['description']} A running server has the same as "
             "`/openapi.json`. How to use it: [Serving](../serving.md).\n", "## Routes\n"]  # fmt: skip
    rows: Rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            body = content.get("application/json", {}).get("schema", {})
            body = body or ({"type": "form"} if content else {})
            rows.append((f"`{method.upper()} {path}`", _kind(body) if body else "", operation.get("description", "")))
    parts.append(table(("route", "body", "what it answers"), rows))
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    errors = [(f"`{status}`", of["description"]) for status, of in chat.items() if status not in ("200", "422")]
    parts += ["## Errors\n", table(("status", "when"), errors), "## Objects of a request\n"]
    for name in _reached(BODIES, schemas):
        schema = schemas[name]
        said = attributes(schema.get("description"))
        needed = schema.get("required", [])
        fields = [
            (f"`{n}`", _kind(f), "required" if n in needed else _default(f), said.get(n, ""))
            for n, f in schema.get("properties", {}).items()
        ]
        parts += [f"### {name}\n", f"{summary(schema.get('description'))}\n"]
        parts.append(table(("field", "type", "default", "meaning"), fields))
    return "\n".join(parts)


def _reached(names: list[str], schemas: Mapping[str, Any]) -> list[str]:
    """These schemas and all that they name, each once, in the order in which they are named."""
    found: list[str] = []
    while names:
        name = names.pop(0)
        if name not in found:
            found.append(name)
            names += re.findall(r"'#/components/schemas/(\w+)'", repr(schemas[name]))
    return found


def _kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema's type in a few words, with its bounds."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = [_kind(s) for s in schema[several] if s.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds)) or "null"
    if "enum" in schema:
        return ", ".join(f"`{v}`" for v in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [
        f"{sign} {_number(schema[key])}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    return " ".join([str(schema.get("type", "any")), ", ".join(bounds)]).strip()


def _number(value: float) -> str:
    for power in (31, 63):
        if abs(value) == 2**power:
            return f"{'-' if value < 0 else ''}2^{power}"
    return f"{value:g}"


def _default(schema: Mapping[str, Any]) -> str:
    return f"`{str(schema['default']).lower()}`" if "default" in schema else ""


# Settings and Python


def settings_page() -> str:
    """The tables of the server's TOML file, and the environment."""
    from pydantic import BaseModel

    from qbe.server.rollout.settings import Candidate, Rollout, RolloutLimits, Step
    from qbe.server.settings import Key, Settings, Tier

    parts = [MADE, "# Settings\n", "The file of `qbe serve --config`. Every table may be left out. The file is checked "
             "whole before it is used and read again when it changes; one that is wrong is not taken.\n"]  # fmt: skip
    tables: list[tuple[str, Any]] = []
    for name, field in Settings.model_fields.items():
        of = {"tiers": ("tiers.flex, tiers.default, tiers.priority", Tier), "keys": ("keys.NAME", Key)}
        tables.append(of.get(name, (name, field.annotation)))
        if name == "rollout":
            tables[-1:] = [
                (name, Rollout), ("rollout.steps", Step), ("rollout.candidate", Candidate),
                ("rollout.limits", RolloutLimits),
            ]  # fmt: skip
    for name, of in tables:
        assert issubclass(of, BaseModel)
        said = attributes(of.__doc__)
        rows = [
            (f"`{n}`", _type(f.annotation), _given(of is Tier, f.is_required(), f.default), said.get(n, ""))
            for n, f in of.model_fields.items()
        ]
        parts += [f"## {name}\n", f"{summary(of.__doc__)}\n", table(("key", "type", "default", "meaning"), rows)]
    environment = [(f"`{n}`", what) for n, what in ENVIRONMENT.items()]
    parts += ["## Environment\n", table(("variable", "meaning"), environment)]
    return "\n".join(parts)


def _type(annotation: Any) -> str:
    """A type as TOML's users say it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "model_fields"):
        return "table"
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (Union, UnionType):
        return " or ".join(_type(a) for a in args if a is not NoneType)
    if origin is tuple:
        return f"list of {_type(args[0])}"
    return {float: "number", int: "whole number", str: "text", bool: "true or false"}.get(annotation, str(annotation))


def _given(tier: bool, required: bool, default: Any) -> str:
    """What a key is where the file does not say; each tier has bits of its own."""
    return f"`{_toml(default)}`" if not required else "the tier's" if tier else "required"


def _toml(value: Any) -> str:
    if value is None:
        return "left out"
    if hasattr(value, "model_fields"):
        return "its defaults"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def python_page() -> str:
    """What callers of the library make, and the engine's methods."""
    import qbe
    from qbe import NestedWeightConfig

    parts = [MADE, "# Python\n", "`import qbe`. What is not listed here may change.\n"]
    for of in (qbe.Request, qbe.Budget, qbe.SamplingParams, NestedWeightConfig):
        said = attributes(of.__doc__) | attributes(of.__doc__, "Args")
        rows = [(f"`{f.name}`", _field_default(of, f), said.get(f.name, "")) for f in dataclasses.fields(of)]
        parts += [f"## {of.__name__}\n", f"{summary(of.__doc__)}\n", table(("field", "default", "meaning"), rows)]
    engine = qbe.Engine
    parts += ["## Engine\n", f"{summary(engine.__doc__)}\n"]
    said = attributes(engine.__doc__, "Args")
    rows = [
        (f"`{name}`", "required" if p.default is p.empty else f"`{p.default}`", said.get(name, ""))
        for name, p in inspect.signature(engine).parameters.items()
    ]
    parts.append(table(("argument", "default", "meaning"), rows))
    methods = [
        (f"`{name}{_signature(method)}`", summary(method.__doc__).partition("\n\n")[0])
        for name, method in inspect.getmembers(engine, inspect.isfunction)
        if not name.startswith("_") and method.__doc__
    ]
    parts += ["### Methods\n", table(("method", "what it does"), methods)]
    return "\n".join(parts)


def _signature(method: Any) -> str:
    names = [n for n in inspect.signature(method).parameters if n != "self"]
    return f"({', '.join(names)})"


def _field_default(of: type, field: dataclasses.Field[Any]) -> str:
    """What its constructor says, unless the constructor makes a new one each time."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    default = inspect.signature(of).parameters[field.name].default
    if default is inspect.Parameter.empty:
        return "required"
    return f"`{type(default).__name__}()`" if dataclasses.is_dataclass(default) else f"`{default!r}`"


# What has which effect where


def compatibility_page() -> str:
    """Every option that does not work everywhere, in every situation, and what is said of it there."""
    from qbe.compatibility import ANYWHERE, ENGINE, REQUEST, SITUATIONS, Situation, limit

    parts = [MADE, "# Compatibility\n", "Options that need something of the model, the device or the engine. "
             "*refused*: in one line, which becomes a 400 over HTTP; with `best_effort` the option is left out, and "
             "the result names it (`ignored`; over HTTP `usage.qbe.ignored`). *said*: it does nothing, and a warning "
             "as the engine starts, or the result, says so. Empty: it does what it says.\n"]  # fmt: skip
    untrained = Situation(
        no_cascade="it has not been trained for this model; run 'qbe train cascade', or leave it out",
        below_floors="8 bits are below the floor of every layer's recurrent state, the lowest of which is layer 4's "
        "with 10 bits (measured by 'qbe quantize'); ask for 10 or more, or leave it out",
    )
    for heading, of in (("What a request asks for", REQUEST), ("What an engine is started with", ENGINE)):
        shown = {n: s for n, s in SITUATIONS.items() if of is REQUEST or not s.vllm}
        rows: Rows = []
        for option in dict.fromkeys(found.option for found in of):
            met = (limit(option, situation, of) for situation in shown.values())
            rows.append((f"`{option}`", *("" if one is None else one.outcome for one in met)))
        parts += [f"## {heading}\n", table(("option", *shown), rows)]
        lines = [(f"`{x.option}`", x.outcome, x.line(untrained)) for x in of]
        parts.append(table(("option", "otherwise", "what is said"), lines))
    parts.append(f"Everywhere: {', '.join(f'`{name}`' for name in ANYWHERE)}.\n")
    return "\n".join(parts)


health = runpy.run_path(str(Path(__file__).with_name("docs_health.py")))["page"]
PAGES = {
    "cli.md": cli_page, "http.md": http_page, "settings.md": settings_page, "python.md": python_page,
    "compatibility.md": compatibility_page, "health.md": lambda: health(MADE, table),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
