"""Blueprints on disk: one SQLite file for all models and processes of a user.

The file is a convenience. What cannot be read or written costs one warning and some speed, never a request; a file that
is damaged is set aside; every row carries a checksum over all that it says, and one that does not fit is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.budget import Budget
from qbe.cache.fingerprint import Cell
from qbe.cache.memory import GROUP_ENTRIES, CachedBlueprint
from qbe.errors import QBEError
from qbe.sites import SiteTable

T = TypeVar("T")

VERSION = 1  # of the tables; part of the file's name, so that no version reads another's
TIMEOUT_S = 0.25  # for another process's lock; a request may be waiting
PAUSE_S = 5.0  # after a failure
CAPACITY = 500_000  # entries of a file, about 150 bytes each; the oldest go when it is opened
_CELL_ROWS = 4 * GROUP_ENTRIES  # of a cell that are read, newest first
_TABLES = (
    "CREATE TABLE IF NOT EXISTS versions (id INTEGER PRIMARY KEY, version TEXT UNIQUE, model TEXT, policy TEXT)",
    "CREATE TABLE IF NOT EXISTS blueprints (hash BLOB PRIMARY KEY, body TEXT) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS entries (seq INTEGER PRIMARY KEY, version INTEGER, cell TEXT, digest BLOB,
        bits INTEGER, first INTEGER, last INTEGER, blueprint BLOB, checksum BLOB,
        UNIQUE (version, cell, first, digest))""",
)
_SELECT = """SELECT seq, digest, bits, first, last, blueprint, body, checksum
    FROM entries JOIN versions ON entries.version = versions.id LEFT JOIN blueprints ON blueprint = hash
    WHERE versions.version = ? AND cell = ? ORDER BY seq DESC LIMIT ?"""
_COLUMNS = "version, cell, digest, bits, first, last, blueprint, checksum"
_INSERT = f"INSERT OR REPLACE INTO entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


def default_path() -> Path | None:
    """`$QBE_BLUEPRINTS`, or else a file in the cache folder; None where that is `off`."""
    if given := os.environ.get("QBE_BLUEPRINTS"):
        return None if given == "off" else Path(given).expanduser()
    from qbe.files import cache_dir

    return cache_dir() / f"blueprints-{VERSION}.sqlite"


class Disk:
    """The entries of one file. Threads may share it; a process makes its own. The file is made by the first `put`.

    Attributes:
        path: of the file.
        dropped: entries that were found damaged, and deleted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        self._db: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._warned = False
        self._paused_until = 0.0

    def get(self, version: str, cell: Cell, table: SiteTable) -> list[CachedBlueprint]:
        """The entries of a cell, oldest first. Damaged ones are deleted."""

        def read(db: sqlite3.Connection) -> list[CachedBlueprint]:
            name = cell_name(cell)
            rows = db.execute(_SELECT, (version, name, _CELL_ROWS)).fetchall()
            known: dict[bytes, Blueprint | None] = {}
            entries, bad = [], []
            for seq, digest, bits, first, last, hash_, body, checksum in reversed(rows):
                if hash_ not in known:
                    known[hash_] = _blueprint(hash_, body, table)
                blueprint = known[hash_]
                if blueprint is None or checksum != _hash((version, name, digest, bits, first, last, hash_)):
                    bad.append((seq,))
                else:
                    entries.append(CachedBlueprint(cell, digest, bits % (1 << 64), first, last, blueprint))
            if bad:
                self.dropped += len(bad)
                with suppress(sqlite3.OperationalError):  # a reader need not be able to write
                    db.executemany("DELETE FROM entries WHERE seq = ?", bad)
            return entries

        return self._use(read, write=False) or []

    def put(self, version: str, model: str, policy: str, entries: Iterable[CachedBlueprint]) -> None:
        """Adds entries of a version, in one transaction; of equal ones the newest stays.

        Args:
            model, policy: for people, who cannot read versions.
        """
        bodies, rows = {}, []
        for e in entries:
            body = json.dumps(asdict(e.blueprint), separators=(",", ":"))
            name, hash_ = cell_name(e.cell), _hash(body)
            bodies[hash_] = body
            bits = e.bits - (1 << 64) if e.bits >> 63 else e.bits  # SQLite's integers have a sign
            said = (name, e.digest, bits, e.first, e.last, hash_)
            rows.append((*said, _hash((version, *said))))

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR IGNORE INTO versions (version, model, policy) VALUES (?, ?, ?)", (version, model, policy)
            )
            number = db.execute("SELECT id FROM versions WHERE version = ?", (version,)).fetchone()[0]
            # Not "OR IGNORE": a damaged blueprint is mended by this, for all entries that name it.
            db.executemany("INSERT OR REPLACE INTO blueprints VALUES (?, ?)", bodies.items())
            db.executemany(_INSERT, ((number, *row) for row in rows))

        self._use(write, write=True)

    def summary(self) -> list[dict[str, Any]]:
        """For each version that has entries: `model`, `policy`, `version` and their number, `entries`."""
        sql = """SELECT model, policy, versions.version, count(*) FROM versions JOIN entries
            ON entries.version = versions.id GROUP BY versions.id ORDER BY max(seq) DESC"""
        rows = self._use(lambda db: db.execute(sql).fetchall(), write=False) or []
        return [dict(zip(("model", "policy", "version", "entries"), row, strict=True)) for row in rows]

    def clear(self) -> int:
        """Deletes everything; returns how many entries there were. Other processes may have the file open."""

        def delete(db: sqlite3.Connection) -> int:
            gone = db.execute("DELETE FROM entries").rowcount
            db.execute("DELETE FROM blueprints")
            db.execute("DELETE FROM versions")
            return gone

        return (self._use(delete, write=True) or 0) if self.path.exists() else 0

    def close(self) -> None:
        """Closes the file; the next use opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _use(self, work: Callable[[sqlite3.Connection], T], write: bool) -> T | None:
        """Runs `work` on the file, a write in a transaction; None where the file is not there or does not answer."""
        with self._lock:
            if time.monotonic() < self._paused_until or not (write or self.path.exists()):
                return None
            number = _inode(self.path)
            try:
                db = self._open()
                if not write:
                    return work(db)
                with db:  # commits, or rolls back
                    db.execute("BEGIN IMMEDIATE")
                    return work(db)
            except (sqlite3.OperationalError, OSError) as error:  # locked, read-only, full
                self._close()
                self._paused_until = time.monotonic() + PAUSE_S
                self._warn(f"the blueprint cache {self.path} is out of reach ({error}); policies are asked instead")
            except sqlite3.DatabaseError as error:
                self._close()
                self._set_aside(number, error)
            return None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=TIMEOUT_S, isolation_level=None, check_same_thread=False)
            # Damaged text shall fail its checksum, not the read of its neighbours.
            db.text_factory = lambda text: text.decode("utf-8", "replace")
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            self._db = db
        return self._db

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Makes what is missing. Of a file that is there and good, a reader writes nothing."""
        tables = db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
        if tables < len(_TABLES):
            db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                for table in _TABLES:
                    db.execute(table)
        db.execute("PRAGMA synchronous = NORMAL")
        newest, oldest = db.execute("SELECT max(seq), min(seq) FROM entries").fetchone()
        if newest is not None and newest - oldest >= CAPACITY:
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.execute("DELETE FROM entries WHERE seq <= ?", (newest - CAPACITY,))
                db.execute("DELETE FROM blueprints WHERE hash NOT IN (SELECT blueprint FROM entries)")
                db.execute("DELETE FROM versions WHERE id NOT IN (SELECT version FROM entries)")

    def _set_aside(self, number: int | None, error: Exception) -> None:
        """Renames a damaged file, unless another process has done so and made a new one."""
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with suppress(OSError):
            if number is not None and _inode(self.path) == number:
                os.replace(self.path, aside)
                for log in ("-wal", "-shm"):  # they belong to the damaged one
                    self.path.with_name(self.path.name + log).unlink(missing_ok=True)
        self._warn(f"{self.path} is damaged ({error}); it is now {aside.name}, and blueprints are cached anew")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=4)


def cell_name(cell: Cell) -> str:
    """A cell as text."""
    return json.dumps([asdict(part) if isinstance(part, Budget) else part for part in cell], separators=(",", ":"))


def _blueprint(hash_: bytes, body: object, table: SiteTable) -> Blueprint | None:
    """The blueprint of this text; None if the text is not what was written, or no blueprint of this model."""
    try:
        if not isinstance(body, str) or _hash(body) != hash_:
            return None
        said = json.loads(body)
        kv_bits = [tuple(b) if isinstance(b, list) else b for b in said["kv_bits"]]
        blueprint = Blueprint.of(said["policy"], table, said["weight_bits"], said["activation_bits"], kv_bits)
        dynamic_precision, first = said.get("dynamic_precision", said.get("steering")), said.get("first_kv_bits")
        return replace(
            blueprint,
            kv_error=said["kv_error"],
            first_kv_bits=first,
            dynamic_precision=dynamic_precision and DynamicPrecision(**dynamic_precision),
        )
    except (KeyError, TypeError, ValueError, QBEError):
        return None


def _hash(said: object) -> bytes:
    return hashlib.blake2b(repr(said).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
