"""Folders that are complete or not there (`qbe.store.draft`), and what a killed process leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import forked
from qbe.errors import QBEError
from qbe.store import draft, kept
from qbe.store.draft import writing

WRITER = """
import sys, time
from pathlib import Path
from qbe.store.draft import writing
with writing(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_everybody_may_read_what_was_written(tmp_path: Path) -> None:
    with writing(tmp_path / "out") as folder:
        save_file({"a": torch.ones(1)}, folder / "model.safetensors")
        (folder / "inner").mkdir()
    assert [p.stat().st_mode & 0o777 for p in (tmp_path / "out", *sorted((tmp_path / "out").iterdir()))] == [
        0o755, 0o755, 0o644,
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_process_left_goes_and_what_is_being_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    target = tmp_path / "a*b"  # a name that a pattern would take for others
    other = tmp_path / ".axb.123.partial"
    other.mkdir()
    with forked.Popen([sys.executable, "-c", WRITER, str(target), "60"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        if killed:
            writer.send_signal(signal.SIGKILL)
            writer.wait(20)
        (left,) = tmp_path.glob(".a[*]b.*.partial")
        try:
            with writing(target):
                assert left.exists(), "it may be about to be locked"
            target.rmdir()
            monkeypatch.setattr(draft, "_YOUNG", -1.0)
            with writing(target):
                assert left.exists() == (not killed)
        finally:
            writer.kill()
    assert other.exists()


def test_another_program_that_was_faster_is_named(tmp_path: Path) -> None:
    with pytest.raises(QBEError, match="made by another program meanwhile"), writing(tmp_path / "out"):
        kept.keep(tmp_path / "out" / "theirs", {}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_current_folder_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in (Path(), tmp_path):
        with pytest.raises(QBEError, match="is the current folder, which cannot be replaced"), writing(target):
            pytest.fail("not before the work")
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    (tmp_path / "volume").mkdir()
    with pytest.raises(QBEError, match="is a mount point"), writing(tmp_path / "volume"):
        pytest.fail("not before the work")


def test_a_refusal_of_the_disk_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QBEError) as refused, writing(tmp_path / "file" / "out"):
        pytest.fail("there is no such folder")
    assert "cannot be written" in str(refused.value)


def test_computations_that_nobody_went_on_with_are_forgotten(tmp_path: Path) -> None:
    for name, days in (("old", 40), ("new", 0)):
        kept.keep(tmp_path / name / "a.safetensors", {"a": torch.ones(1)}, {})
        for path in (tmp_path / name / "a.safetensors", tmp_path / name):
            os.utime(path, (time.time() - days * 86400,) * 2)
    kept.forget(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    kept.forget(tmp_path / "missing")
