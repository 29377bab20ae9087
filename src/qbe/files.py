"""Where QBE keeps files, and writing one so that it is either complete or as it was before."""

from __future__ import annotations

import errno
import os
import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from qbe.errors import QBEError

# Opened, they would be what descriptor 1 is: standard error, while a command runs (`qbe.cli.console.keep_stdout`).
_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAYS_FULL = re.compile(r"No space left|quota exceeded|os error (28|122)\b", re.IGNORECASE)


def cache_dir() -> Path:
    """Where QBE keeps what it fetched: `$QBE_CACHE`, else `$XDG_CACHE_HOME/qbe`, else `~/.cache/qbe`."""
    if own := os.environ.get("QBE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "qbe"


def disk_full(error: BaseException | str) -> bool:
    """Whether an error, or one that it came from, or another program's message, says that a disk or quota is full.

    Libraries wrap the system's error, those written in Rust as text alone.
    """
    if isinstance(error, str):
        return _SAYS_FULL.search(error) is not None
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, OSError) and link.errno in _FULL:
            return True
        if _SAYS_FULL.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def reason(error: OSError) -> str:
    """What the system says, and what to do about it."""
    if error.errno in _FULL:
        return "the disk is full; free some space and try again"
    if error.errno == errno.EFBIG:
        return "the file would exceed the size limit that is set for this process; raise it and try again"
    said = os.strerror(error.errno) if error.errno else str(error)
    return f"{said}; check the folder and its permissions"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that takes its place when the block ends well and is removed when it does not.

    A symbolic link is followed. A device or pipe (`/dev/stdout`) is written to, never replaced.

    Raises:
        OSError: the disk refuses.
    """
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    own = getattr(sys.stdout, "buffer", None) if str(path) in _STDOUT else None
    if own is not None:
        yield own
        own.flush()
        return
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):  # of the two errors the first one matters
            beside.unlink()
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file, all of it or nothing.

    Raises:
        QBEError: the disk refuses (full, read-only, no such folder).
    """
    try:
        with replacing(path) as file:
            file.write(data)
    except BrokenPipeError:
        raise  # `/dev/stdout`, and its reader has enough: the command line's business
    except OSError as error:
        raise QBEError(f"'{path}' cannot be written: {reason(error)}") from error


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of `text` as UTF-8."""
    write_bytes(path, text.encode("utf-8", "replace"))


def make_folder(path: Path) -> None:
    """Raises QBEError where there is no such folder and none can be made, or nothing can be written into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QBEError(f"the folder '{path}' cannot be made: {reason(error)}") from None
    if not os.access(path, os.W_OK):
        raise QBEError(f"nothing can be written into the folder '{path}'; set QBE_CACHE to another, or free it")


def check_writable(**options: Path | None) -> None:
    """Raises QBEError where one of these files cannot be made, or two are the same: told before minutes of work.

    Args:
        options: name of an option -> the file that it names.
    """
    seen: dict[Path, str] = {}
    for name, path in options.items():
        if path is None:
            continue
        option = f"--{name}"
        _check_one(option, path)
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise QBEError(f"{other} and {option} name the same file, '{path}': give each its own")


def _check_one(option: str, path: Path) -> None:
    try:
        folder, inside = not path.name or path.is_dir(), path.absolute().parent.is_dir()
    except OSError as error:  # a name too long
        raise QBEError(f"{option} '{path}' cannot be written: {reason(error)}") from None
    if folder:
        raise QBEError(f"{option} '{path}' is a folder; give the name of a file")
    if not inside:
        raise QBEError(f"{option} '{path}' cannot be written: there is no folder {path.absolute().parent}")
