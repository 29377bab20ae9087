"""The record store: an SQLite file to which several engines may append at once.

Write-ahead logging lets readers and one writer work side by side and leaves a valid file when a process dies.
Records are evidence, not state: an engine that cannot write them goes on serving (`try_append`).
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.records.record import FIELDS, Record

SCHEMA_VERSION = 4  # 1 lacks tokens_by_activation_bits and what bounded mode did, 2 cluster and cache, 3 margins,
# refreshes and what was drafted
APPLICATION_ID = 0x51424531  # "QBE1": tells our file from another program's
BUSY_TIMEOUT_S = 5.0
PAUSE_S = 5.0  # after a failed `try_append`: a stuck disk or lock may cost the engine one wait in this time
PAGE = 500  # rows read at once

# No type affinity is declared for the columns: a value comes back as it was given.
_TABLE = f"CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY AUTOINCREMENT, {', '.join(FIELDS)})"
_INDEX = "CREATE UNIQUE INDEX IF NOT EXISTS records_id ON records (id)"
_COLUMNS = ", ".join(FIELDS)
_INSERT = f"INSERT INTO records ({_COLUMNS}) VALUES ({', '.join('?' * len(FIELDS))})"


def default_path() -> Path:
    """`$QBE_RECORDS`, else `records.sqlite` in the cache folder."""
    if given := os.environ.get("QBE_RECORDS"):
        return Path(given).expanduser()
    from qbe.models import cache_dir

    return cache_dir() / "records.sqlite"


class RecordStore:
    """The records of one file. The file is opened on first use and made by the first `append`.

    One store may be used by several threads; a process makes its own store (SQLite connections do not survive a fork).

    Args:
        path: the SQLite file; None takes `default_path()`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else Path(path)
        self._db: sqlite3.Connection | None = None
        self._lock = threading.Lock()
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
        if time.monotonic() < self._paused_until:
            return False
        try:
            row = record.to_row()
            try:
                self._insert(row)
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
        rows = self._query(
            f"SELECT {_COLUMNS} FROM records {where} ORDER BY seq DESC LIMIT ? OFFSET ?", *values, limit, offset
        )
        return [Record.from_row(r) for r in rows]

    def count(self) -> int:
        """Number of records."""
        rows = self._query("SELECT count(*) FROM records")
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
        rows = self._query(sql, prefix, prefix + "g")
        if not rows:
            raise QBEError(f"no record {prefix} in {self.path}: `qbe records` lists those there are")
        if len(rows) > 1:
            raise QBEError(f"several records begin with {prefix}: give more digits of the id")
        return Record.from_row(rows[0])

    def __iter__(self) -> Iterator[Record]:
        """The records that are there now, oldest first, read a page at a time so that no lock is held in between."""
        rows = self._query("SELECT coalesce(max(seq), 0) FROM records")
        last, end = 0, rows[0][0] if rows else 0
        while last < end:
            sql = f"SELECT seq, {_COLUMNS} FROM records WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT {PAGE}"
            page = self._query(sql, last, end)
            if not page:
                return
            for row in page:
                yield Record.from_row(row[1:])
            last = page[-1][0]

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _insert(self, row: tuple[Any, ...]) -> None:
        with self._lock, self._errors("written"):
            self._open(create=True).execute(_INSERT, row)

    def _query(self, sql: str, *values: object) -> Sequence[tuple[Any, ...]]:
        with self._lock, self._errors("read"):
            if self._db is None and not self.path.exists():
                return []  # no record yet; a reader leaves no file behind
            return self._open(create=False).execute(sql, values).fetchall()

    def _open(self, create: bool) -> sqlite3.Connection:
        if self._db is not None:
            return self._db
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        # SQLite does not wait by itself when several processes make a file and turn its log on at once: try again.
        end = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(db)
            except BaseException as e:
                db.close()
                if not (isinstance(e, sqlite3.OperationalError) and "locked" in str(e)) or time.monotonic() > end:
                    raise
                time.sleep(0.01)
            else:
                self._db = db
                return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Checks whose file it is before anything is written to it, then makes the table if it is new."""
        db.execute("BEGIN")  # one view of the file, which another process may be making just now
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        found = db.execute("PRAGMA user_version").fetchone()[0]
        owner = db.execute("PRAGMA application_id").fetchone()[0]
        db.execute("COMMIT")
        if (tables or found) and owner != APPLICATION_ID:
            raise QBEError(f"{self.path} is another program's database: set QBE_RECORDS to a path for QBE's records")
        if found > SCHEMA_VERSION:
            raise QBEError(
                f"{self.path} has record format {found}, this QBE reads up to {SCHEMA_VERSION}: "
                "update QBE, or set QBE_RECORDS to another path"
            )
        if found < SCHEMA_VERSION:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            db.execute(_TABLE)
            db.execute(_INDEX)
            there = {row[1] for row in db.execute("PRAGMA table_info(records)")}
            for name in FIELDS:  # an earlier version, or another process just now, made a table without these
                if name not in there:
                    db.execute(f"ALTER TABLE records ADD COLUMN {name}")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("COMMIT")
        # In WAL mode NORMAL survives the death of the process; only a power cut may lose the last records.
        db.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as e:
            if isinstance(e, sqlite3.IntegrityError):
                raise QBEError(f"a record with this id is already in {self.path}") from e
            raise QBEError(
                f"records in {self.path} cannot be {done} ({e}): free the disk, mend the permissions "
                "or set QBE_RECORDS to another path"
            ) from e
