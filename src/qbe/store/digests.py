"""SHA-256 of files, read once: a file that has not changed since is known by its size, times and inode."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from qbe.errors import QBEError
from qbe.files import cache_dir, reason, write_text
from qbe.models.gguf_split import part_files
from qbe.progress import bar

CHUNK = 8 << 20  # bytes that are read at once
THREADS = 4
_BAR_BYTES = 1 << 30  # of one second or two
_SETTLED_NS = 2_000_000_000  # a younger file may change once more without its time changing

KERNELS = Path(__file__).parents[1] / "kernels"
_SOURCES = {".py", ".c", ".cpp", ".h", ".cu", ".cuh"}


def digests(folder: Path, files: Sequence[str], *, cached: bool, progress: bool) -> dict[str, dict[str, Any]]:
    """File -> its size and SHA-256, as `{"bytes", "sha256"}`.

    Args:
        files: names in the folder.
        cached: whether what an earlier call has found is taken for files that have not changed since. What this one
            finds is kept in the cache folder in any case.

    Raises:
        QBEError: a file cannot be read.
    """
    notes = cache_dir() / "digests" / f"{sha256_of(os.fsencode(folder.resolve()))[:32]}.json"
    known = _notes(notes) if cached else {}
    try:
        facts = {file: _facts(folder / file) for file in files}
        unread = [file for file in files if known.get(file, [None])[:-1] != facts[file]]
        found = {file: known[file][-1] for file in files if file not in unread}
        found |= _read_all({file: folder / file for file in unread}, progress)
    except OSError as error:
        raise QBEError(f"'{error.filename or folder}' cannot be read: {reason(error)}") from error
    if unread:
        settled = time.time_ns() - _SETTLED_NS
        with suppress(QBEError, OSError):  # it costs time only
            notes.parent.mkdir(parents=True, exist_ok=True)
            kept = {f: [*facts[f], found[f]] for f in files if max(facts[f][1:3]) < settled}
            write_text(notes, json.dumps(kept) + "\n")
    return {file: {"bytes": facts[file][0], "sha256": found[file]} for file in files}


def base_digest(path: Path, progress: bool) -> str:
    """One over names and content of a checkpoint's files: those of a transformers folder, or the parts of a GGUF."""
    files = [p for p in path.iterdir() if p.is_file() and p.name[0] != "."] if path.is_dir() else part_files(path)
    return digest_of(_read_all({file.name: file for file in files}, progress))


def kernels_digest() -> str:
    """One over names and content of the kernels' sources."""
    sources = [path for path in KERNELS.rglob("*") if path.suffix in _SOURCES]
    return digest_of({p.relative_to(KERNELS).as_posix(): sha256_of(p.read_bytes()) for p in sources})


def sha256_of(data: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest_of(files: dict[str, str]) -> str:
    """One over names and the digests of their content."""
    return sha256_of("".join(f"{digest}  {name}\n" for name, digest in sorted(files.items())).encode())


def _read_all(files: dict[str, Path], progress: bool) -> dict[str, str]:
    """Name -> SHA-256, several files at once: hashing leaves the interpreter's lock."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    chunks = sum(size // CHUNK + 1 for size in sizes.values())
    with (
        bar("checking files", chunks, progress and sum(sizes.values()) > _BAR_BYTES) as tick,
        ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool,
    ):
        largest = sorted(files, key=lambda name: -sizes[name])
        return dict(zip(largest, pool.map(lambda name: _sha256(files[name], tick), largest), strict=True))


def _sha256(path: Path, tick: Callable[[], None]) -> str:
    found, buffer = hashlib.sha256(), bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
            tick()
    return found.hexdigest()


def _facts(path: Path) -> list[int]:
    """Size, time of its content, time of its entry, inode, device."""
    at = path.stat()
    return [at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev]


def _notes(path: Path) -> dict[str, list[Any]]:
    try:
        notes = json.loads(path.read_text())
        return {str(file): list(facts) for file, facts in notes.items()}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return {}
