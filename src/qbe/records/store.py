"""The record store: an SQLite file to which several engines may append at once (`qbe.records.database`).

Records are evidence, not state: an engine that cannot write them goes on serving (`try_append`).
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from qbe.errors import QBEError
from qbe.records import expert_use
from qbe.records.database import Database, Schema
from qbe.records.expert_use import ServedUse
from qbe.records.record import FIELDS, Quality, Record

SCHEMA_VERSION = 11  # 1 lacks tokens_by_activation_bits and what bounded mode did, 2 cluster and cache, 3 margins,
# refreshes and what was drafted, 4 first_kv_bits, 5 read_weight_bits, 6 what was asked and what was cached,
# 7 precision_misses and the table of experts' use, 8 state_bits, 9 quality, 10 arm
PAUSE_S = 5.0  # after a failed `try_append`: a stuck disk or lock may cost the engine one wait in this time
PAGE = 500  # rows read at once
T = TypeVar("T")

# No type affinity is declared for the columns: a value comes back as it was given.
_SCHEMA = Schema(
    application_id=0x51424531,  # "QBE1"
    version=SCHEMA_VERSION,
    table="records",
    columns=FIELDS,
    make=(
        f"CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY AUTOINCREMENT, {', '.join(FIELDS)})",
        "CREATE UNIQUE INDEX IF NOT EXISTS records_id ON records (id)",
        expert_use.TABLE,
    ),
    name="records",
    elsewhere="set QBE_RECORDS to another path",
)
_COLUMNS = ", ".join(FIELDS)
_INSERT = f"INSERT INTO records ({_COLUMNS}) VALUES ({', '.join('?' * len(FIELDS))})"


def default_path() -> Path:
    """`$QBE_RECORDS`, else `records.sqlite` in the cache folder."""
    if given := os.environ.get("QBE_RECORDS"):
        return Path(given).expanduser()
    from qbe.files import cache_dir

    return cache_dir() / "records.sqlite"


class RecordStore:
    """The records of one file. The file is opened on first use and made by the first `append`.

    One store may be used by several threads; a process makes its own store (SQLite connections do not survive a fork).

    Args:
        path: the SQLite file; None takes `default_path()`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else Path(path)
        self._file = Database(self.path, _SCHEMA)
        self._warned = False
        self._paused_until = 0.0

    def append(self, record: Record) -> None:
        """Adds one record; it is in the file when this returns.

        Raises:
            QBEError: the file can't be written (full disk, no permission, locked for 5 s), is not a record file of
                this version, or holds this id already.
        """
        self._insert(record.to_row())

    def try_append(self, record: Record) -> bool:
        """`append` for an engine: False instead of an error, with one warning per store.

        After a failure of the file the next attempt comes `PAUSE_S` later; the records in between are dropped.
        """
        return self._try(record.to_row, self._insert)

    def set_quality(self, quality: Quality) -> None:
        """Writes how an answer was scored into its record; nothing where that is not in the file.

        Raises:
            QBEError: as `append`, or numbers that JSON cannot hold.
        """
        value = quality.to_column()
        with self._file.writing() as db:
            db.execute("UPDATE records SET quality = ? WHERE id = ?", (value, quality.id))

    def try_set_quality(self, quality: Quality) -> bool:
        """`set_quality` as `try_append`."""
        return self._try(lambda: quality, self.set_quality)

    def add_use(self, more: ServedUse) -> None:
        """Adds what was counted of a store's experts to the row of its day. Raises QBEError as `append` does."""
        with self._file.writing() as db:
            expert_use.add(db, more)

    def try_add_use(self, more: ServedUse) -> bool:
        """`add_use` as `try_append`."""
        return self._try(lambda: more, self.add_use)

    def use_of(self, store: str) -> list[ServedUse]:
        """What was counted of this store's experts, a row for each day, oldest first. Raises QBEError if unreadable."""
        return expert_use.read(self._file, store)

    def _try(self, make: Callable[[], T], write: Callable[[T], None]) -> bool:
        if time.monotonic() < self._paused_until:
            return False
        try:
            made = make()
            try:
                write(made)
            except QBEError:
                self._paused_until = time.monotonic() + PAUSE_S
                raise
        except QBEError as e:
            if not self._warned:
                self._warned = True
                warnings.warn(f"{e}; serving goes on without records", RuntimeWarning, stacklevel=2)
            return False
        return True

    def list(
        self, limit: int = 20, offset: int = 0, policy: str | None = None, model: str | None = None
    ) -> list[Record]:
        """At most `limit` records, newest first, after skipping `offset`; only those of a policy or model if given."""
        if limit < 0 or offset < 0:
            raise QBEError(f"cannot list {limit} records from {offset}: give numbers of at least 0")
        where, values = "", []
        for column, value in (("policy", policy), ("model", model)):
            if value is not None:
                where += f"{' AND' if where else 'WHERE'} {column} = ?"
                values.append(value)
        rows = self._file.read(
            f"SELECT {_COLUMNS} FROM records {where} ORDER BY seq DESC LIMIT ? OFFSET ?", (*values, limit, offset)
        )
        return [Record.from_row(r) for r in rows]

    def count(self) -> int:
        """Number of records."""
        rows = self._file.read("SELECT count(*) FROM records")
        return int(rows[0][0]) if rows else 0

    def get(self, prefix: str) -> Record:
        """The one record whose id begins with `prefix`.

        Raises:
            QBEError: no such record, or several.
        """
        prefix = prefix.strip().lower()
        if not re.fullmatch("[0-9a-f]{1,32}", prefix):
            raise QBEError(f"'{prefix}' is no record id: give the first hex digits of one (`qbe records` lists them)")
        sql = f"SELECT {_COLUMNS} FROM records WHERE id >= ? AND id < ? LIMIT 2"
        rows = self._file.read(sql, (prefix, prefix + "g"))
        if not rows:
            raise QBEError(f"no record {prefix} in {self.path}: `qbe records` lists those there are")
        if len(rows) > 1:
            raise QBEError(f"several records begin with {prefix}: give more digits of the id")
        return Record.from_row(rows[0])

    def __iter__(self) -> Iterator[Record]:
        """The records that are there now, oldest first, read a page at a time so that no lock is held in between."""
        rows = self._file.read("SELECT coalesce(max(seq), 0) FROM records")
        last, end = 0, rows[0][0] if rows else 0
        while last < end:
            sql = f"SELECT seq, {_COLUMNS} FROM records WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT {PAGE}"
            page = self._file.read(sql, (last, end))
            if not page:
                return
            for row in page:
                yield Record.from_row(row[1:])
            last = page[-1][0]

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        self._file.close()

    def _insert(self, row: tuple[Any, ...]) -> None:
        with self._file.writing() as db:
            try:
                db.execute(_INSERT, row)
            except sqlite3.IntegrityError as error:
                raise QBEError(f"a record with this id is already in {self.path}") from error
