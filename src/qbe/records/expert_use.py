"""How often served tokens used each expert of a store: a row for each store and day, beside the records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import zip_longest

from qbe.errors import QBEError
from qbe.records.database import Database

TABLE = "CREATE TABLE IF NOT EXISTS expert_use (store, day, tokens, chosen, PRIMARY KEY (store, day)) WITHOUT ROWID"


@dataclass(frozen=True)
class ServedUse:
    """Counts of a store's experts.

    Attributes:
        store: digest of the store (`qbe.store.checkpoint.identity`).
        tokens: that went through the model.
        chosen: layer's module of experts -> for each expert how many of the tokens used it.
        day: UTC.
    """

    store: str
    tokens: int
    chosen: Mapping[str, Sequence[int]]
    day: date


def today() -> date:
    """In UTC."""
    return datetime.now(UTC).date()


def add(db: sqlite3.Connection, more: ServedUse) -> None:
    """Adds counts to the row of their store and day, as one transaction."""
    key = more.store, more.day.isoformat()
    db.execute("BEGIN IMMEDIATE")
    try:
        row = db.execute("SELECT tokens, chosen FROM expert_use WHERE store = ? AND day = ?", key).fetchone()
        tokens, before = (row[0], json.loads(row[1])) if row else (0, {})
        chosen = {
            layer: [a + b for a, b in zip_longest(before.get(layer, ()), counts, fillvalue=0)]
            for layer, counts in more.chosen.items()
        }
        text = json.dumps(chosen, separators=(",", ":"))
        db.execute("REPLACE INTO expert_use VALUES (?, ?, ?, ?)", (*key, tokens + more.tokens, text))
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def read(file: Database, store: str) -> list[ServedUse]:
    """The days of a store, oldest first.

    Raises:
        QBEError: the file cannot be read, or a row is damaged.
    """
    rows = file.read("SELECT day, tokens, chosen FROM expert_use WHERE store = ? ORDER BY day", (store,))
    try:
        return [
            ServedUse(store, int(tokens), {str(n): tuple(map(int, c)) for n, c in json.loads(text).items()},
                      date.fromisoformat(day))
            for day, tokens, text in rows
        ]  # fmt: skip
    except (ValueError, TypeError, AttributeError) as error:
        raise QBEError(f"the use of experts in {file.path} is damaged ({error!r}); delete the file") from error
