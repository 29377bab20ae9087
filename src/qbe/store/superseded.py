"""Stores in the cache that nothing will ask for again: the same model path has a newer one.

A store's name changes with the model's files and with QBE's version, so every change leaves one behind. Its manifest
says which path it was made from. A process that is loading or measuring a store holds a shared lock on it; one that
has loaded it needs no lock, because mapped files outlive their names.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qbe.store.checkpoint import MANIFEST

_REMOVED = ".superseded"


def source_of(path: Path) -> dict[str, Any]:
    """What a manifest records of the model that a cached store was made from."""
    return {"path": str(path.resolve())}


@contextmanager
def in_use(folder: Path) -> Iterator[bool]:
    """Keeps a store from being pruned meanwhile; yields whether it (still) exists."""
    try:
        manifest = (folder / MANIFEST).open("rb")
    except OSError:
        yield False
        return
    with manifest:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(manifest, fcntl.LOCK_SH)
        yield (folder / MANIFEST).is_file()  # it may have gone while we waited


def prune(folder: Path) -> list[Path]:
    """Removes the stores beside `folder` that it supersedes: made from the same path, with the same layout.

    Those whose manifest does not say what they were made from, and those in use, stay. Nothing here raises: an old
    store costs disk space only.

    Returns:
        what was removed.
    """
    new = _made_from(folder)
    if new is None:
        return []
    with suppress(OSError):
        for left in folder.parent.glob(f".*{_REMOVED}"):  # by a process that died while it removed
            shutil.rmtree(left, ignore_errors=True)
        others = [f for f in folder.parent.iterdir() if f != folder and not f.is_symlink() and _made_from(f) == new]
        return [other for other in others if _remove(other)]
    return []


def _made_from(folder: Path) -> tuple[str, str] | None:
    """Path and layout; read by hand, because an old store may have a format that this QBE does not read."""
    try:
        raw = json.loads((folder / MANIFEST).read_text())
        path = raw["source"]["path"]
        return (path, repr((raw["slices"], raw["group_size"]))) if isinstance(path, str) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _remove(folder: Path) -> bool:
    try:
        with (folder / MANIFEST).open("rb") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}{_REMOVED}")
            folder.rename(gone)  # at once: nobody finds half a store
    except OSError:  # in use, or removed by another process
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True
