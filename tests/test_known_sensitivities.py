"""Measured tables that come with the package: for the very store they were measured on, and no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from qbe.store import checkpoint, known, kv_table, prepare, sensitivity_table

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an empty folder for what the package brings."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(known, "MEASURED", tmp_path / "measured")
    return tmp_path


def _keep_as_known(folder: Path) -> Path:
    """What `known` says to do with a newly measured model's tables."""
    target = known.MEASURED / known._digest(checkpoint.read_manifest(folder))
    target.mkdir(parents=True)
    for name in (sensitivity_table.NAME, kv_table.NAME):
        shutil.copy(folder / name, target)
    return target


def _never(*_: object, **__: object) -> None:
    pytest.fail("measured again")


def test_known_tables_spare_the_measurement(cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare.prepare(tiny_folder, device=CPU, progress=False)
    measured = prepare.prepare(tiny_folder, device=CPU, progress=False)  # as the files have it
    folder = prepare.store_folder(str(tiny_folder), progress=False)
    _keep_as_known(folder)
    shutil.rmtree(folder)
    monkeypatch.setattr(prepare, "measure_into", _never)
    brought = prepare.prepare(tiny_folder, device=CPU, need_sensitivity=False, progress=False)  # as `qbe info` does
    assert vars(brought.table) == vars(measured.table)


def test_other_codes_or_older_pages_are_measured(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.prepare(tiny_folder, device=CPU, progress=False)
    folder = prepare.store_folder(str(tiny_folder), progress=False)
    manifest = checkpoint.read_manifest(folder)
    target = _keep_as_known(folder)
    assert known.bring(folder, manifest)
    next(about for name, about in manifest.files.items() if name.startswith("nested-"))["sha256"] = "0" * 64
    assert not known.bring(folder, manifest)
    table = json.loads((target / kv_table.NAME).read_text())
    (target / kv_table.NAME).write_text(json.dumps(table | {"version": kv_table.VERSION - 1}))
    assert not known.bring(folder, checkpoint.read_manifest(folder))


@pytest.mark.model
def test_the_default_models_tables_come_with_the_package(default_gguf: Path, tmp_path: Path) -> None:
    manifest = checkpoint.read_manifest(prepare.store_folder(str(default_gguf), progress=False))
    assert known.bring(tmp_path, manifest)
    measured = sensitivity_table.read(tmp_path)
    assert measured is not None
    assert set(measured.weights) == set(manifest.sites)
    assert kv_table.read(tmp_path)
