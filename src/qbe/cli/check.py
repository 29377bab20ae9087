"""`qbe check`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qbe.cli.console import err, print_json
from qbe.cli.options import Json
from qbe.errors import QBEError

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "not run": "dim"}


def check(
    model: Annotated[str, typer.Argument(help="hub id, transformers folder, GGUF file, QBE folder or built-in name")],
    target: Annotated[
        str, typer.Option(help="cpu or cuda of this machine, or a GPU by name, as h100, h200, b200, a100, l40s or l4")
    ],
    serve: Annotated[Path | None, typer.Option(help="settings file that it will be served with (TOML)")] = None,
    runtime: Annotated[str, typer.Option(help="qbe, or vllm for the plug-in")] = "qbe",
    smoke: Annotated[bool, typer.Option("--smoke", help="run a small batch on this machine, too")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say whether a model will run on a target as it is to be served: seven layers, each pass, warn or fail.

    Exit code 0: pass or warn; 1: fail; 2: bad input.
    """
    if importlib.util.find_spec("pydantic") is None:
        raise QBEError("qbe check needs pydantic: pip install 'qbe[serve]'")
    from qbe.check.report import describe
    from qbe.check.run import check as look
    from qbe.models.load import quiet

    with quiet():
        described = describe(look(model, target, serve, runtime, smoke, err.is_terminal))
    if as_json:
        print_json({"model": model, "target": target, "runtime": runtime, **described})
    else:
        _print(described)
    if described["status"] == "fail":
        raise typer.Exit(1)


def _print(described: Mapping[str, Any]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for layer in described["layers"]:
        if not layer["findings"]:
            table.add_row(Text("not run", style=_STYLES["not run"]), layer["layer"], "")
        for found in layer["findings"]:
            said = found["saw"] + (f": {found['remedy']}" if found["remedy"] else "")
            table.add_row(Text(found["status"], style=_STYLES[found["status"]]), layer["layer"], Text(said))
    out = Console()
    out = out if out.is_terminal else Console(width=max(out.width, 150))  # a file need not fold its lines
    out.print(table)
    out.print(Text(described["status"], style=_STYLES[described["status"]]))
