"""`--json` of commands that print a table: alone it prints one JSON object instead, as everywhere; with a name it
writes that file beside the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from qbe.cli.console import print_json
from qbe.files import write_text

_STDOUT = Path("-")
JsonOrFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="[path]", help="print one JSON object on standard output; with a name, write it to that file"
    ),
]


class JsonCommand(TyperCommand):
    """A command with `JsonOrFile`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer has no option whose value can be left out: here it gets the name of standard output."""
        return super().parse_args(ctx, _named(args))


class JsonGroup(TyperGroup):
    """A group that is such a command itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Likewise."""
        return super().parse_args(ctx, _named(args))


def _named(args: Sequence[str]) -> list[str]:
    after = [*args, "--"][1:]
    return [
        f"--json={_STDOUT}" if arg == "--json" and following.startswith("-") and following != str(_STDOUT) else arg
        for arg, following in zip(args, after, strict=True)
    ]


def prints_json(as_json: Path | None) -> bool:
    """Whether standard output is for JSON alone."""
    return as_json == _STDOUT


def json_file(as_json: Path | None) -> Path | None:
    """The file that it is written to."""
    return None if prints_json(as_json) else as_json


def tell_json(as_json: Path | None, value: Any) -> None:
    """Print it, write it, or neither. Raises QBEError when the disk refuses."""
    if prints_json(as_json):
        print_json(value)
    elif as_json is not None:
        write_text(as_json, json.dumps(value, indent=1, allow_nan=False) + "\n")
