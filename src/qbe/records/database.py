"""An SQLite file of QBE's own that several processes may read and write at once.

Write-ahead logging lets readers and one writer work side by side and leaves a valid file when a process dies.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbe.errors import QBEError

BUSY_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Schema:
    """What a file holds.

    Attributes:
        application_id: tells our file from another program's.
        version: of the columns. An older file is brought up to it, a newer one is refused.
        table, columns: the one table, and what it must have; columns that are missing are added, without values.
        make: statements that make the table and its indices where there are none.
        name: of what is in it, for messages.
        elsewhere: what a user does to have it in another file, for messages.
    """

    application_id: int
    version: int
    table: str
    columns: Sequence[str]
    make: Sequence[str]
    name: str
    elsewhere: str


class Database:
    """A file of this schema, opened on first use. Threads may share one; a process makes its own, since SQLite's
    connections do not survive a fork.

    Args:
        path: the file.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path, self._schema = path, schema
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None  # device and number of the file
        self._lock = threading.Lock()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The file, for this thread alone; made if it is not there. Each statement commits by itself.

        Raises:
            QBEError: it cannot be written (full disk, no permission, locked for 5 s), or is no such file.
        """
        with self._lock, self._errors("written"):
            yield self._open()

    def check_there(self) -> None:
        """Within `writing`: whether the file is still the one at its path, which SQLite does not notice.

        Raises:
            QBEError: it is not; what is written to it would be lost. The next use opens what is there then.
        """
        try:
            file = os.stat(self.path)
        except FileNotFoundError:
            file = None
        if file is None or (file.st_dev, file.st_ino) != self._opened:
            if file is not None and self._db is not None:
                self._db.close()
                self._db = None
            raise QBEError(
                f"{self._schema.name} in {self.path} was taken away while it was in use: put it back, or restart to "
                "begin a new one"
            )

    def read(self, sql: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Rows; none where the file is not there, which a reader does not make.

        Raises:
            QBEError: it cannot be read, or is no such file.
        """
        with self._lock, self._errors("read"):
            if self._db is None and not self.path.exists():
                return []
            return self._open().execute(sql, values).fetchall()

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _open(self) -> sqlite3.Connection:
        if self._db is not None:
            return self._db
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # SQLite does not wait by itself when several processes make a file and turn its log on at once: try again.
        end = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(db)
            except BaseException as error:
                db.close()
                busy = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
                if not busy or time.monotonic() > end:
                    raise
                time.sleep(0.01)
            else:
                file = os.stat(self.path)
                self._db, self._opened = db, (file.st_dev, file.st_ino)
                return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Checks whose file it is before anything is written to it, then makes the table if it is new."""
        schema = self._schema
        db.execute("BEGIN")  # one view of the file, which another process may be making just now
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        owner = db.execute("PRAGMA application_id").fetchone()[0]
        db.execute("COMMIT")
        if (tables or version) and owner != schema.application_id:
            raise QBEError(f"{self.path} is another program's database: {schema.elsewhere}")
        if version > schema.version:
            raise QBEError(
                f"{self.path} has {schema.name} of format {version}, this QBE reads up to format {schema.version}: "
                f"update QBE, or {schema.elsewhere}"
            )
        if version < schema.version:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            for statement in schema.make:
                db.execute(statement)
            columns = {row[1] for row in db.execute(f"PRAGMA table_info({schema.table})")}
            for name in schema.columns:  # an earlier version, or another process just now, made a table without these
                if name not in columns:
                    db.execute(f"ALTER TABLE {schema.table} ADD COLUMN {name}")
            db.execute(f"PRAGMA application_id = {schema.application_id}")
            db.execute(f"PRAGMA user_version = {schema.version}")
            db.execute("COMMIT")
        # In WAL mode NORMAL survives the death of the process; only a power cut may lose the last moments.
        db.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise QBEError(
                f"{self._schema.name} in {self.path} cannot be {done} ({error}): free the disk, mend the permissions "
                f"or {self._schema.elsewhere}"
            ) from error
