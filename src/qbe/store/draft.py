"""A folder that is written under a temporary name beside its target and takes its name when it is complete.

Whoever writes one holds a lock on it. What a killed process left behind has none and is removed by the next one that
writes to the same target: a store holds a copy of the 16-bit model, which nobody should have to find by hand.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from qbe.errors import QBEError
from qbe.files import reason

_SUFFIX = ".partial"
_YOUNG = 60.0  # seconds: its writer may be about to lock it


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends well, and vanishes otherwise.

    Raises:
        QBEError: the target exists or cannot be replaced, or the disk refuses (full, read-only, no permission).
    """
    partial: Path | None = None
    lock: int | None = None
    try:
        check(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent))
        lock = _locked(partial)
        yield partial
        os.chmod(partial, 0o755)
        for file in partial.iterdir():  # safetensors writes some that nobody else may read
            os.chmod(file, 0o755 if file.is_dir() else 0o644)
        try:
            os.replace(partial, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise QBEError(f"{target} was made by another program meanwhile; choose another folder") from error
            raise
    except (OSError, SafetensorError) as error:
        raise QBEError(f"{target} cannot be written: {_reason(error)}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check(target: Path) -> None:
    """Raises QBEError for what would fail at the end of all the work."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise QBEError(f"{target} already exists and is not empty; choose another folder or remove it")
    if target.exists() and (target.resolve() == Path.cwd() or os.path.ismount(target)):
        what = "a mount point" if os.path.ismount(target) else "the current folder"
        raise QBEError(f"{target} is {what}, which cannot be replaced; give the name of a new folder in it")


def _locked(folder: Path) -> int | None:
    """A file descriptor that holds a lock on the folder; None where another one does, or there are no locks."""
    at = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(at)
        return None
    return at


def _sweep(target: Path) -> None:
    """Removes what killed processes left of this target. Never raises: it costs disk space only."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*{_SUFFIX}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < _YOUNG:
                continue
            lock = _locked(left)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _reason(error: Exception) -> str:
    """Also for what the safetensors library wraps: the system's number is in its text."""
    if isinstance(error, OSError):
        return reason(error)
    number = re.search(r"os error (\d+)", str(error))
    return reason(OSError(int(number[1]), "")) if number else " ".join(str(error).split())
