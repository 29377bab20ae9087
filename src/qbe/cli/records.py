"""`qbe records`: what past requests were given and what it cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbe.cli.console import err, out, print_json
from qbe.cli.options import Json
from qbe.errors import QBEError

if TYPE_CHECKING:
    from qbe.records import RecordStore


def records(
    export: Annotated[Path | None, typer.Option(help="write all records to this file; - is standard output")] = None,
    format: Annotated[str, typer.Option(help="of --export: jsonl or parquet")] = "jsonl",
    limit: Annotated[int, typer.Option(help="how many to list, newest first")] = 20,
    learn_refresh: Annotated[
        bool, typer.Option("--learn-refresh", help="learn from past answers when --refresh finds one hard or easy")
    ] = False,
    as_json: Json = False,
) -> None:
    """List or export what past requests were given and what it cost."""
    from qbe.cli.info import records_table
    from qbe.records import RecordStore
    from qbe.records import export as write

    store = RecordStore()
    if learn_refresh:
        _learn(store, as_json)
        return
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


def _learn(store: RecordStore, as_json: bool) -> None:
    """Thresholds of every model that has records enough."""
    from qbe.refresh import thresholds

    learned = thresholds.learn(store)
    if not learned:
        raise QBEError(
            f"no model has records of {thresholds.LEAST * thresholds.WINDOW} tokens whose entropy was measured: "
            "let some answers be written with --refresh first, or a server score them (health.sample)"
        )
    path = thresholds.save(learned)
    if as_json:
        print_json({model: asdict(values) for model, values in learned.items()})
        return
    for model, t in learned.items():
        by = f"by the divergence of {t.scored} scored ones" if t.scored else "the outer quarters of them"
        out.print(
            f"{model}: hard above {t.hard_entropy:.3f} nats and below a margin of {t.hard_margin:.2f}, easy below "
            f"{t.easy_entropy:.3f} and above {t.easy_margin:.2f} ({t.windows} windows, {by})",
            highlight=False, markup=False,
        )  # fmt: skip
    err.print(f"wrote {path}", markup=False, highlight=False)
