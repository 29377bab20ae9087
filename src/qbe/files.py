"""Writing a file so that it is either complete or not there."""

from __future__ import annotations

import os
from pathlib import Path

from qbe.errors import QBEError


def write_text(path: Path, text: str) -> None:
    """Writes `text` under a temporary name beside `path` and renames it.

    Raises:
        QBEError: the disk refuses (full, read-only, no such folder).
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise QBEError(
            f"{path} cannot be written: {os.strerror(error.errno or 0)}; check the folder and its space"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
