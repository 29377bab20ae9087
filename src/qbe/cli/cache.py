"""`qbe cache …`: blueprints for queries that have not come yet, and what is kept of those that have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qbe.cli.console import err, out, print_json
from qbe.cli.options import DEFAULT, Analysis, Json, Model, Policy, make_engine
from qbe.errors import QBEError

app = typer.Typer(no_args_is_help=True, help="The blueprint cache: fill it from a traffic log, look at it, empty it.")


@app.command()
def warm(
    file: Annotated[
        Path, typer.Argument(help="JSON lines: prompts, requests with 'prompt' or 'messages', or exported records")
    ],
    model: Model = DEFAULT, policy: Policy = "tiered", analysis_tier: Analysis = None,
    lengths: Annotated[
        Path | None, typer.Option(help="CSV trace (ContextTokens, GeneratedTokens) that gives the requests' lengths")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Choose the blueprints of past requests, so that queries like them find theirs in the cache."""
    from dataclasses import asdict

    from qbe.cache.traffic import read_traffic
    from qbe.progress import bar

    traffic = read_traffic(file, lengths)
    with make_engine(model, policy, "auto", "cpu", "device", analysis_tier=analysis_tier) as engine:
        with bar("requests", len(traffic), err.is_terminal) as tick:
            engine.warm(traffic, tick)
        numbers = engine.blueprint_cache
    if numbers is None:
        raise QBEError("the blueprint cache is off (QBE_BLUEPRINTS): unset that to warm it")
    if as_json:
        print_json({"requests": len(traffic), **asdict(numbers)})
    else:
        hits = numbers.exact + numbers.near
        out.print(f"{len(traffic)} requests: {numbers.misses} blueprints added, {hits} were there", highlight=False)


@app.command()
def info(as_json: Json = False) -> None:
    """Show whose blueprints the file holds. Those of an older store or policy are there, but are not served."""
    path = _path()
    from qbe.cache.disk import Disk

    rows = Disk(path).summary()
    size = path.stat().st_size if path.exists() else 0
    if as_json:
        print_json({"file": str(path), "bytes": size, "versions": rows})
        return
    table = Table(box=None, padding=(0, 2, 0, 0), caption=f"{path}, {size / 1e6:.1f} MB", caption_justify="left")
    for column in ("model", "policy", "version"):
        table.add_column(column)
    table.add_column("entries", justify="right")
    for row in rows:
        table.add_row(row["model"], row["policy"], row["version"][:8], str(row["entries"]))
    out.print(table)


@app.command()
def clear(as_json: Json = False) -> None:
    """Delete every entry. Engines that run keep what they have in memory."""
    path = _path()
    from qbe.cache.disk import Disk

    gone = Disk(path).clear()
    if as_json:
        print_json({"file": str(path), "deleted": gone})
    else:
        out.print(f"{gone} entries deleted", highlight=False)


def _path() -> Path:
    from qbe.cache.disk import default_path

    path = default_path()
    if path is None:
        raise QBEError("the blueprint cache is off (QBE_BLUEPRINTS): there is no file")
    return path
