"""Tensors that a long computation keeps in a file, so that it can go on where it was interrupted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qbe.errors import QBEError
from qbe.files import reason

FORGOTTEN = 30 * 24 * 3600.0  # seconds


def keep(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> None:
    """Writes tensors and what is said about them, all of it or nothing; makes the folder.

    Raises:
        QBEError: the disk refuses.
    """
    draft = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: t.contiguous() for n, t in tensors.items()}, draft, metadata=dict(about))
        os.replace(draft, path)
    except (OSError, SafetensorError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        raise QBEError(f"{path.parent} cannot be written: {said}") from error
    finally:
        with suppress(OSError):  # there only where something went wrong, which matters more
            draft.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Removes what nobody has gone on with for 30 days from a folder of such computations. Never raises: it costs disk
    space only."""
    with suppress(OSError):
        for one in folder.iterdir():
            last = max((f.stat().st_mtime for f in (one, *one.iterdir())), default=0.0)
            if time.time() - last > FORGOTTEN:
                shutil.rmtree(one, ignore_errors=True)


def kept(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    """What `keep` wrote; None when nothing usable is there."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
