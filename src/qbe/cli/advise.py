"""`qbe advise`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from qbe.cli.console import out, print_json
from qbe.cli.options import Json
from qbe.errors import QBEError

if TYPE_CHECKING:
    from qbe.advise.advice import Advice, Considered

_EXIT = {"holds": 0, "unknown": 3}  # the others: 1


def advise(
    metrics: Annotated[str, typer.Option(help="address of a server, or a file with the text of its /metrics")],
    slo: Annotated[Path, typer.Option(help="TOML file with the table [slo]")],
    records: Annotated[
        Path | None, typer.Option(help="records of the server; left out, this machine's of the same model")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what keeps a server from its service level, and the mildest change that is enough.

    Exit code 0: the objective holds; 1: it does not; 2: bad input; 3: too little was counted.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise QBEError("qbe advise needs prometheus_client: pip install 'qbe[serve]'")
    from qbe.advise.advice import advise as decide
    from qbe.advise.observed import fetch, observe
    from qbe.advise.slo import load
    from qbe.records import RecordStore

    if records is not None and not records.is_file():
        raise QBEError(f"--records {records}: there is no such file")
    wanted = load(slo)
    advice = decide(observe(fetch(metrics), wanted.quantile, RecordStore(records)), wanted)
    if as_json:
        print_json(advice.describe())
    else:
        _print(advice)
    if code := _EXIT.get(advice.outcome, 1):
        raise typer.Exit(code)


def _print(advice: Advice) -> None:
    out.print(Text(advice.line))
    if advice.do:
        out.print(Text(f"set: {advice.do}"))
    if advice.suite:
        out.print(Text(f"must pass first: {advice.suite}"))
    if advice.considered:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for one in advice.considered:
            table.add_row(one.rung, one.verdict, _bytes(one))
        out.print(table)


def _bytes(one: Considered) -> str:
    """The predicted bytes."""
    if one.predicted is None:
        return ""
    parts = {"a step reads": one.predicted.step_bytes, "memory": one.predicted.memory}
    return ", ".join(f"{what} {size / 1e9:.3g} GB" for what, size in parts.items() if size is not None)
