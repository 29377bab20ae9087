"""The ledger: what was served to whom, at which precision, and what it costs. An SQLite file with a write-ahead log.

A row is one prompt of a request with its answers, and holds totals, never increments: written again it says the same,
so nothing is billed twice. The server writes it before the tokens go out (`qbe.server.billing`), so nothing served is
missing, and after a crash there is nothing to repair: a row without `finish` is an answer that was cut off there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from qbe.records.database import Database, Schema

APPLICATION_ID = 0x51424C31  # "QBL1"
UNIT = 10**12  # costs are whole numbers of trillionths, which add up without rounding


@dataclass(frozen=True)
class LedgerEntry:
    """One prompt of a request and its answers, as far as they were served.

    Attributes:
        id: of the row: the request's id and the number of the prompt in it.
        request: id that the client saw.
        key: name of the client's key.
        began: when the request came, UTC, ISO 8601.
        finish: the answers' finish reasons, with commas; None while one is written, or when it was cut off.
        cached_tokens: those of `prompt_tokens` that were not computed.
        weight_bits, kv_bits: averages over the tokens, of the weights and of the KV cache.
        tokens_by_bits: gear -> tokens computed at it.
        cost: in trillionths of the currency.
        joules, energy: what the answers took, and who says so: `nvml`, `rapl` or `model`; None in rows of version 1.
        arm: of the server's rollout, `stable` or `candidate`; None without one, and in rows of versions 1 and 2.
    """

    id: str
    request: str
    key: str
    tier: str
    model: str
    policy: str
    began: str
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    weight_bits: float
    kv_bits: float
    tokens_by_bits: Mapping[int, int] = field(hash=False)
    cost: int
    currency: str
    joules: float | None = None
    energy: str | None = None
    arm: str | None = None


@dataclass(frozen=True)
class Total:
    """The sum of the rows of one key, tier and currency.

    Attributes:
        requests: HTTP requests.
        unfinished: rows whose answers are being written or were cut off.
        average_weight_bits: over computed tokens.
        cost: in the currency.
        joules, energy: as far as they are known, and who says so, with commas.
        joules_per_token: of these, over computed tokens.
    """

    key: str
    tier: str
    currency: str
    requests: int
    unfinished: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    average_weight_bits: float
    tokens_by_bits: Mapping[int, int]
    cost: float
    joules: float
    joules_per_token: float
    energy: str


COLUMNS = tuple(f.name for f in fields(LedgerEntry))
_SCHEMA = Schema(
    application_id=APPLICATION_ID,
    version=3,  # 1 lacks joules and energy, 2 arm
    table="entries",
    columns=COLUMNS,
    make=(
        f"CREATE TABLE IF NOT EXISTS entries ({', '.join(COLUMNS)}, PRIMARY KEY (id)) WITHOUT ROWID",
        "CREATE INDEX IF NOT EXISTS entries_began ON entries (began)",
    ),
    name="the ledger",
    elsewhere="give the ledger another file",
)
_WRITE = (
    f"INSERT INTO entries ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT (id) DO UPDATE "
    "SET "
    + ", ".join(f"{c} = excluded.{c}" for c in COLUMNS if c != "id")
    + " WHERE finish IS NULL"  # what has ended stays
)
_PERIOD = "(:since IS NULL OR began >= :since) AND (:until IS NULL OR began < :until)"
_TOTALS = f"""
SELECT key, tier, currency, count(DISTINCT request), sum(finish IS NULL), sum(prompt_tokens), sum(cached_tokens),
    sum(completion_tokens), sum(cost / {UNIT}), sum(cost % {UNIT}),
    total(joules), coalesce(group_concat(DISTINCT energy), '')
FROM entries WHERE {_PERIOD} GROUP BY key, tier, currency ORDER BY key, tier, currency"""
_USED = f"""
SELECT key, sum(prompt_tokens + completion_tokens), sum(cost / {UNIT}), sum(cost % {UNIT})
FROM entries WHERE began >= :since GROUP BY key"""
_BY_BITS = f"""
SELECT e.key, tier, currency, CAST(b.key AS INTEGER), sum(b.value)
FROM entries AS e, json_each(tokens_by_bits) AS b WHERE {_PERIOD} GROUP BY 1, 2, 3, 4 ORDER BY 4"""


def default_path() -> Path:
    """`$QBE_LEDGER`, else `ledger.sqlite` in the cache folder."""
    if given := os.environ.get("QBE_LEDGER"):
        return Path(given).expanduser()
    from qbe.files import cache_dir

    return cache_dir() / "ledger.sqlite"


class Ledger:
    """The ledger in one file, which the first `write` makes. Threads and processes may share it.

    Args:
        path: the file; None takes `default_path()`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path
        self._file = Database(self.path, _SCHEMA)

    def write(self, entries: Sequence[LedgerEntry]) -> None:
        """Write these rows, all or none; they outlive this process when this returns.

        Raises:
            QBEError: the file cannot be written, or is no ledger.
        """
        rows = [_row(e) for e in entries]
        with self._file.writing() as db:
            self._file.check_there()
            db.execute("BEGIN IMMEDIATE")
            try:
                db.executemany(_WRITE, rows)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def entries(self) -> list[LedgerEntry]:
        """All rows, in the order in which their requests came. Raises QBEError where they cannot be read."""
        rows = self._file.read(f"SELECT {', '.join(COLUMNS)} FROM entries ORDER BY began, id", {})
        described = (dict(zip(COLUMNS, row, strict=True)) for row in rows)
        return [LedgerEntry(**d | {"tokens_by_bits": _by_bits(d["tokens_by_bits"])}) for d in described]

    def totals(self, since: str | None = None, until: str | None = None) -> list[Total]:
        """Sums by key, tier and currency.

        Args:
            since, until: of requests that came from then on and before then, as in `LedgerEntry.began`.

        Raises:
            QBEError: the file cannot be read, or is no ledger.
        """
        period = {"since": since, "until": until}
        by_bits: dict[tuple[str, str, str], dict[int, int]] = {}
        for *group, bits, tokens in self._file.read(_BY_BITS, period):
            by_bits.setdefault((group[0], group[1], group[2]), {})[bits] = tokens
        totals = []
        for *named, whole, part, joules, energy in self._file.read(_TOTALS, period):
            spread = by_bits.get((named[0], named[1], named[2]), {})
            tokens = max(1, sum(spread.values()))
            bits = sum(b * n for b, n in spread.items()) / tokens
            cost = (whole * UNIT + part) / UNIT
            more: Any = (round(bits, 4), spread, cost, joules, joules / tokens, energy)
            totals.append(Total(*named, *more))
        return totals

    def used(self, since: str) -> list[tuple[str, int, int]]:
        """Key, tokens of prompts and answers, and cost in trillionths, of requests that came from then on.

        Raises:
            QBEError: the file cannot be read, or is no ledger.
        """
        rows = self._file.read(_USED, {"since": since})
        return [(key, tokens, whole * UNIT + part) for key, tokens, whole, part in rows]

    def probe(self) -> None:
        """Write nothing, but really to the file. Raises QBEError where rows could not be written."""
        with self._file.writing() as db:
            self._file.check_there()
            db.execute(f"PRAGMA user_version = {_SCHEMA.version}")

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        self._file.close()


def _row(entry: LedgerEntry) -> tuple[Any, ...]:
    values = entry.__dict__ | {"tokens_by_bits": json.dumps(entry.tokens_by_bits, separators=(",", ":"))}
    return tuple(map(values.__getitem__, COLUMNS))


def _by_bits(text: str) -> dict[int, int]:
    return {int(bits): tokens for bits, tokens in json.loads(text).items()}
