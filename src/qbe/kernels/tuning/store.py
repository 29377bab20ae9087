"""Tuned launch configurations on disk: one SQLite file in the cache folder, for all processes and GPUs of a user.

They are a convenience, never a need: a file that cannot be read or written costs one warning and some speed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

VERSION = 1  # of the table; part of the file's name, so that no version reads another's
WRITE_TIMEOUT_S = 5.0  # for another process's lock
READ_TIMEOUT_S = 0.1  # readers may be on the way of a launch
_TABLE = """CREATE TABLE IF NOT EXISTS tuned (hardware TEXT, key TEXT, config TEXT, microseconds REAL,
    generic_microseconds REAL, compile_seconds REAL, tuning_seconds REAL, time REAL, PRIMARY KEY (hardware, key))"""
_WRITE = "INSERT OR REPLACE INTO tuned VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


def default_path() -> Path:
    """The file in the user's cache folder."""
    from qbe.files import cache_dir

    return cache_dir() / "kernels" / f"tuned-{VERSION}.sqlite"


class TunedStore:
    """The tuned configurations of one file. Threads and processes may share it; it is made by the first `put`.

    Args:
        path: the file; None takes `default_path()`, asked for anew at each use.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._warned = False

    @property
    def path(self) -> Path:
        return default_path() if self._path is None else self._path

    def get(self, key: str, hardware: str) -> dict[str, int] | None:
        """The configuration for a key; None where there is none, or none that makes sense."""
        sql = "SELECT config FROM tuned WHERE hardware = ? AND key = ?"
        row = self._use(lambda db: db.execute(sql, (hardware, key)).fetchone(), write=False)
        try:
            config = None if row is None else json.loads(row[0])
        except (TypeError, ValueError):
            return None
        good = isinstance(config, dict) and all(isinstance(v, int) for v in config.values())
        return config if good else None

    def put(
        self, key: str, hardware: str, config: dict[str, int], seconds: float, generic_seconds: float,
        compile_seconds: float, tuning_seconds: float,
    ) -> None:  # fmt: skip
        """Keep a configuration: how long a launch takes with it and with the generic one, and what finding it took."""
        row = (hardware, key, json.dumps(config), seconds * 1e6, generic_seconds * 1e6, compile_seconds, tuning_seconds)
        self._use(lambda db: db.execute(_WRITE, (*row, time.time())), write=True)

    def summary(self, hardware: str) -> dict[str, Any]:
        """What `qbe info` shows: the file, problems tuned on this hardware, and what that took in seconds."""
        sql = """SELECT count(*), coalesce(sum(compile_seconds), 0), coalesce(sum(tuning_seconds), 0),
            avg(generic_microseconds / microseconds) FROM tuned WHERE hardware = ?"""
        tuned, compiling, tuning, speedup = self._use(
            lambda db: db.execute(sql, (hardware,)).fetchone(), write=False
        ) or (0, 0.0, 0.0, None)  # fmt: skip
        return {
            "file": str(self.path), "hardware": hardware, "tuned": tuned, "compile_seconds": round(compiling, 3),
            "tuning_seconds": round(tuning, 3), "mean_speedup": None if speedup is None else round(speedup, 4),
        }  # fmt: skip

    def _use(self, work: Callable[[sqlite3.Connection], T], write: bool) -> T | None:
        """Run `work` on the file. None where it is not there (to a reader) or does not answer.

        It is opened anew each time: it is asked once a problem, and a process that forks takes no connection along.
        """
        with self._lock:
            path = self.path
            for _ in range(2):
                number = _inode(path)
                if number is None and not write:
                    return None
                try:
                    if write:
                        path.parent.mkdir(parents=True, exist_ok=True)
                    timeout = WRITE_TIMEOUT_S if write else READ_TIMEOUT_S
                    with closing(sqlite3.connect(path, timeout=timeout)) as db, db:
                        if write:
                            db.execute(_TABLE)
                        return work(db)
                except (sqlite3.OperationalError, OSError) as error:  # locked, read-only, full
                    self._warn(f"tuned kernels in {path} are out of reach ({error}); generic ones serve")
                    return None
                except sqlite3.DatabaseError as error:
                    self._set_aside(path, number, error)
            return None

    def _set_aside(self, path: Path, number: int | None, error: Exception) -> None:
        """Rename a damaged file, unless another process has done so and made a new one."""
        aside = path.with_name(f"{path.name}.damaged")
        with suppress(OSError):
            if number is not None and _inode(path) == number:
                os.replace(path, aside)
        self._warn(f"{path} is damaged ({error}); it is now {aside.name}, and kernels are tuned anew")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=4)


shared = TunedStore()  # the user's


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
