"""What a checkpoint folder was made from and by, with the digest of every file in it: `provenance.json`.

    files       name -> size and SHA-256; a folder is loaded only while all of them are as they were written
    base        the 16-bit checkpoint: its name, and a digest over its files
    calibration the text or set that codes were chosen on, null for the package's own, and its digest: of a set that in
                its `set.json`. Smoothing, sensitivities and the KV table read the same
    qbe         version; `kernels` a digest of the kernels' sources
    hardware    what it was made on (`made_for`), and on what it was loaded then (`tried_on`)
    verdicts    of `qbe regress` since: `verdict`, the `digest` (`content_digest`) that it is about, `suite`, `settings`
    pending     files that are being written: the old digest and this one both hold until that is done
    digest      of this file without it

Folders that QBE 0.1 wrote have none, and are loaded without.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbe.errors import QBEError
from qbe.files import write_text
from qbe.hardware import HardwareProfile
from qbe.models.gguf_split import part_files
from qbe.store.digests import base_digest, digest_of, digests, kernels_digest, sha256_of
from qbe.store.folder import AGAIN, MANIFEST
from qbe.version import __version__

if TYPE_CHECKING:  # torch, which `qbe promote` does without
    from qbe.store.calibration_text import CalibrationText

NAME = "provenance.json"
FORMAT, VERSION = "qbe-provenance", 1
LOADED = (".safetensors", ".json", ".jinja", ".model", ".bin", ".py")  # what loaders look for by its name
_BEGIN = b'{\n "digest": "'  # then 64 hex digits


def write(
    folder: Path, *, name: str, base: Path, profile: HardwareProfile, text: CalibrationText, progress: bool
) -> None:
    """Writes the provenance of a folder whose other files are all there.

    Args:
        name: of the 16-bit checkpoint, as it was called.
        base: where that lies.
        profile: of the device that codes and sensitivities were made on.
        text: that the folder was made on.

    Raises:
        QBEError: the disk refuses.
    """
    described = json.loads((folder / MANIFEST).read_text())
    write_text(folder / MANIFEST, json.dumps({**described, "provenance": NAME}, indent=1) + "\n")
    _save(
        folder,
        {
            "version": VERSION,
            "qbe": __version__,
            "base": {"name": name, "digest": base_digest(base, progress)},
            "calibration": {"text": text.name, "sha256": text.digest},
            "kernels": kernels_digest(),
            "hardware": {"made_for": _machine(profile), "tried_on": []},
            "verdicts": [],
            "pending": {},
            "files": digests(folder, _files(folder), cached=False, progress=progress),
        },
    )


def check(folder: Path, *, cached: bool = True, progress: bool = False) -> dict[str, Any] | None:
    """Compares every file of a folder with its digest.

    Args:
        cached: a file that has the size, times and inode it was last read with needs not be read again.
        progress: show a bar.

    Returns:
        What `provenance.json` says; None for a folder without, which an older QBE wrote.

    Raises:
        QBEError: a file that is missing, changed or not listed, by name.
    """
    if not _has_one(folder):
        return None
    if not (folder / NAME).exists():
        raise QBEError(f"{folder / NAME} is missing; {_remedy()}")
    with _locked(folder, fcntl.LOCK_SH):
        return _compared(folder, cached, progress)


def _compared(folder: Path, cached: bool, progress: bool) -> dict[str, Any]:
    said = _read(folder)
    listed, pending = said["files"], said["pending"]
    there = _files(folder)
    for file in sorted(set(listed) - set(there)):
        raise QBEError(f"{folder / file} is missing; {_remedy()}")
    for file in sorted(set(there) - {*listed, *pending}):
        if "/" not in file and file.endswith(LOADED):
            raise QBEError(f"{folder / file} is none of the files that {NAME} lists: remove it, or {_remedy()}")
    mine = [file for file in there if file in listed or file in pending]
    for file in mine:
        have = (folder / file).stat().st_size
        expected = [entry[file]["bytes"] for entry in (listed, pending) if file in entry]
        if have not in expected:
            raise QBEError(f"{folder / file} is damaged: it has {have} bytes instead of {expected[0]}; {_remedy()}")
    for file, found in digests(folder, mine, cached=cached, progress=progress).items():
        if found not in (listed.get(file), pending.get(file)):
            raise QBEError(f"{folder / file} is damaged: its digest is not that in {NAME}; {_remedy()}")
    return said


def check_trusted(path: Path) -> None:
    """Raises QBEError where there is nothing that could be trusted: a model without a provenance."""
    if not _has_one(path):
        raise QBEError(f"{path} has no {NAME} that its files could differ from: leave out --trust (trust=True)")


def write_beside(folder: Path, name: str, text: str) -> None:
    """Writes a file of a checkpoint folder, all of it or nothing, and its digest where the folder has a provenance.

    Raises:
        QBEError: the disk refuses, or the provenance is damaged.
    """
    if not (folder / NAME).exists():
        write_text(folder / name, text)
        return
    data = text.encode("utf-8", "replace")
    with _changing(folder) as said:
        said["pending"][name] = {"bytes": len(data), "sha256": sha256_of(data)}
        _save(folder, said)  # whenever this process ends, the file is one of the two
        write_text(folder / name, text)
        said["files"][name] = said["pending"].pop(name)


def content_digest(path: Path, *, cached: bool = True, progress: bool = False) -> str:
    """`sha256:` and 64 hex digits over names and content of a model's files: what a verdict and a release are about.

    Of a folder with a provenance those that it lists, so that neither this file nor one that nobody reads changes it.

    Args:
        path: a folder, or a GGUF file. cached, progress: as of `check`.

    Raises:
        QBEError: as `check`; no files.
    """
    if path.is_dir():
        said, folder = check(path, cached=cached, progress=progress), path
        files = (
            _files(path) if said is None else [f for f in _files(path) if f in said["files"] or f in said["pending"]]
        )
    else:
        said, folder, files = None, path.parent, [part.name for part in part_files(path)]
    if not files:
        raise QBEError(f"there are no files in '{path}'")
    found = digests(folder, files, cached=cached or said is not None, progress=progress)
    return f"sha256:{digest_of({file: facts['sha256'] for file, facts in found.items()})}"


def judged(folder: Path, verdict: str, digest: str, suite: str, settings: str | None) -> None:
    """Notes a verdict. The last one counts of those about the same digest, suite and settings.

    Args:
        digest: `content_digest` of what was judged. settings: digest of the settings that it was served with.

    Raises:
        QBEError: as `write_beside`.
    """
    about = {"digest": digest, "suite": suite, "settings": settings}
    with _changing(folder) as said:
        others = [one for one in said["verdicts"] if {key: one.get(key) for key in about} != about]
        said["verdicts"] = [*others, {"verdict": verdict, **about}]


def tried_on(folder: Path, profile: HardwareProfile) -> None:
    """Notes that the folder was loaded on such a device. Raises QBEError as `write_beside` does."""
    with _changing(folder) as said:
        machine, tried = _machine(profile), said["hardware"]["tried_on"]
        if machine not in tried:
            tried.append(machine)


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, Any]]:
    """What the file says, to be changed; written when the block ends well. One process at a time."""
    with _locked(folder, fcntl.LOCK_EX):
        said = _read(folder)
        yield said
        _save(folder, said)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """A lock on the folder: nobody compares files while one of them is replaced."""
    lock: int | None = None
    try:
        with suppress(OSError):  # a file system without locks
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, how)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _has_one(folder: Path) -> bool:
    """Whether a folder was written with a provenance, be that still there or not."""
    if (folder / NAME).exists():
        return True
    try:
        described = json.loads((folder / MANIFEST).read_text())
        return isinstance(described, dict) and "provenance" in described
    except (OSError, ValueError, RecursionError):
        return False


def _remedy() -> str:
    return f"{AGAIN}; --trust of generate, chat, explain, serve and info takes it as it is"


def _machine(profile: HardwareProfile) -> dict[str, Any]:
    described = profile.describe()
    return {key: described[key] for key in ("name", "family", "capability", "extensions")}


def _files(folder: Path) -> list[str]:
    """All files but this one and hidden ones, which are drafts."""
    every = (path for path in folder.rglob("*") if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in every)
    return sorted(n for n in names if n != NAME and not any(part.startswith(".") for part in n.split("/")))


def _save(folder: Path, said: Mapping[str, Any]) -> None:
    text = json.dumps({"digest": "", "format": FORMAT, **said}, indent=1) + "\n"
    write_text(folder / NAME, text.replace('"digest": ""', f'"digest": "{sha256_of(text.encode())}"', 1))


def _read(folder: Path) -> dict[str, Any]:
    """What the file says, without format and digest. Raises QBEError where a byte of it has changed."""
    path = folder / NAME
    try:
        data = path.read_bytes()
        at, end = len(_BEGIN), len(_BEGIN) + 64
        plain = data[:at] + data[end:]
        if not data.startswith(_BEGIN) or sha256_of(plain).encode() != data[at:end]:
            raise ValueError("its digest is not its own")
        said: dict[str, Any] = json.loads(plain)
    except (OSError, ValueError, RecursionError) as error:
        raise QBEError(f"{path} is damaged ({error}); {_remedy()}") from error
    if said.pop("format", None) != FORMAT or said.get("version") != VERSION:
        raise QBEError(f"{path} is of version {said.get('version')}, this QBE reads {VERSION}; {_remedy()}")
    said.pop("digest")
    return said
