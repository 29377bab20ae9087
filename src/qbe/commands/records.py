"""`qbe records`: what past requests were given and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qbe.commands.console import err, out, print_json
from qbe.commands.options import Json
from qbe.errors import QBEError


def records(
    export: Annotated[Path | None, typer.Option(help="write all records to this file; - is standard output")] = None,
    format: Annotated[str, typer.Option(help="of --export: jsonl or parquet")] = "jsonl",
    limit: Annotated[int, typer.Option(help="how many to list, newest first")] = 20,
    as_json: Json = False,
) -> None:
    """List or export what past requests were given and what it cost."""
    from qbe.about import records_table
    from qbe.records import RecordStore
    from qbe.records import export as write

    store = RecordStore()
    if export is not None:
        count = write(store, None if str(export) == "-" else export, format)
        err.print(f"wrote {count} records to {export}", markup=False, highlight=False)
        return
    if format != "jsonl":
        raise QBEError("--format says how --export writes; give --export FILE too, or --json to list as JSON")
    if not 1 <= limit <= 1_000_000:
        raise QBEError(f"--limit {limit} is out of range; give 1 to 1000000, or --export for all")
    rows = store.list(limit)
    if as_json:
        print_json([r.describe() for r in rows])
    else:
        out.print(records_table(rows, store.count()))
