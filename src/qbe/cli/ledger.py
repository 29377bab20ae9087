"""`qbe ledger`: what was served to whom and what it costs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from qbe.cli.console import out, print_json
from qbe.cli.options import Json
from qbe.errors import QBEError


def ledger(
    file: Annotated[
        Path | None, typer.Option("--ledger", "--file", help="the ledger's file; left out, $QBE_LEDGER or the cache's")
    ] = None,
    since: Annotated[str | None, typer.Option(help="requests from this time on: 2026-11-01 or 2026-11-01T12:00, UTC")]
    = None,
    until: Annotated[str | None, typer.Option(help="requests before this time")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Sum up tokens, precision and cost by key and tier."""
    from qbe.records.ledger import Ledger

    if file is not None and not file.exists():
        raise QBEError(f"--ledger {file} is not there: 'qbe serve --ledger FILE' makes it")
    book = Ledger(file)
    totals = book.totals(_moment("--since", since), _moment("--until", until))
    book.close()
    if as_json:
        print_json([asdict(t) for t in totals])
        return
    table = Table(box=None, padding=(0, 1, 0, 0), caption=str(book.path), caption_justify="left")
    for column in ("key", "tier"):
        table.add_column(column, overflow="fold")
    for column in ("requests", "open", "in", "cached", "out", "bits", "cost", "J/token"):
        table.add_column(column, justify="right", no_wrap=True)
    for t in totals:
        numbers = t.requests, t.unfinished, t.prompt_tokens, t.cached_tokens, t.completion_tokens
        joules = f"{t.joules_per_token:.3g} {t.energy}" if t.energy else "-"
        cost = f"{t.cost:.6f} {t.currency}"
        table.add_row(t.key, t.tier, *map(str, numbers), f"{t.average_weight_bits:.2f}", cost, joules)
    out.print(table)


def _moment(option: str, text: str | None) -> str | None:
    """As the ledger's times are written."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise QBEError(f"{option} '{text}' is no time: give 2026-11-01 or 2026-11-01T12:00") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC).isoformat(timespec="milliseconds")
