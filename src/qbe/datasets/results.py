"""What was measured for a query under a blueprint, kept so that an interrupted evaluation goes on.

One SQLite file for each model, store, dtype and kind of device, in the user's cache. A row is known by the query's
tokens and by the blueprint's key, which says all that policy, seed and budget have decided: two policies that choose
the same bits share it, and one that chooses others than it did before finds nothing stale.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qbe.errors import QBEError
from qbe.files import cache_dir
from qbe.models import pull
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.prepare import fingerprint, store_folder

if TYPE_CHECKING:
    from qbe.engine.engine import Engine

_VERSION = 2  # of what a row means


class Results:
    """The file of one model.

    Args:
        identity: all that a result depends on beside query and blueprint.
        folder: where the file lies; None takes `eval` in the cache.

    Raises:
        QBEError: here and in each method: the file cannot be read or written.
    """

    def __init__(self, identity: Sequence[str], folder: Path | None = None) -> None:
        folder = cache_dir() / "eval" if folder is None else folder
        self.path = folder / f"{digest([_VERSION, *identity])}.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=30)
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS results (kind TEXT, query TEXT, blueprint TEXT, value TEXT NOT NULL, "
                "PRIMARY KEY (kind, query, blueprint)) WITHOUT ROWID"
            )
            self._db.commit()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from None

    def get(self, kind: str, query: str, blueprint: str) -> dict[str, Any] | None:
        """What was put there, if anything was."""
        try:
            row = self._db.execute(
                "SELECT value FROM results WHERE kind = ? AND query = ? AND blueprint = ?", (kind, query, blueprint)
            ).fetchone()
            return None if row is None else json.loads(row[0])
        except (sqlite3.Error, ValueError) as error:
            raise self._failed(error) from None

    def put(self, kind: str, query: str, blueprint: str, value: dict[str, Any]) -> None:
        """Keeps it; on disk when this returns."""
        try:
            with self._db:
                row = (kind, query, blueprint, json.dumps(value, allow_nan=False))
                self._db.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def close(self) -> None:
        self._db.close()

    def _failed(self, error: Exception) -> QBEError:
        return QBEError(f"results in '{self.path}' cannot be kept ({error}); free the disk, or delete that file")


def identity(model: str, engine: Engine) -> list[str]:
    """Of an engine made of this model: the files of model and store, the dtype and the kind of device."""
    return identity_of(model, engine.core.pool.dtype, engine.core.device)


def identity_of(model: str, dtype: torch.dtype, device: torch.device) -> list[str]:
    """The same where no engine runs it."""
    path, config = pull(model, progress=False), NestedWeightConfig()
    store = store_folder(model, progress=False)
    return [fingerprint(path, config), fingerprint(store, config), str(dtype), device.type]


def digest(value: Any) -> str:
    """A short name of something that JSON can hold."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
