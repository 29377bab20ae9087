"""Old stores in the cache go when the same path has a newer one; everything else stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
import qbe
from conftest import byte_tokenizer, tiny_llama
from qbe.store import superseded
from qbe.store.nested_linears import nested_linears
from qbe.store.prepare import PreparedModel, prepare

SRC = str(Path(__file__).parents[1] / "src")


def load(model: Path) -> PreparedModel:
    return prepare(model, device=torch.device("cpu"), need_sensitivity=False, progress=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nested"


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def touch(model: Path) -> None:
    """The model's file changes."""
    file = model / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000_000))


def stores(cache: Path) -> set[str]:
    return {p.name for p in cache.iterdir()}


def test_a_changed_model_leaves_one_store(cache: Path, model: Path) -> None:
    load(model)
    before = stores(cache)
    touch(model)
    load(model)
    assert len(stores(cache)) == 1
    assert stores(cache) != before
    load(model)  # unchanged: nothing is made and nothing goes
    assert len(stores(cache)) == 1


def test_another_version_of_qbe_supersedes(cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model)
    (old,) = cache.iterdir()
    manifest = json.loads((old / "qbe.json").read_text())
    (old / "qbe.json").write_text(json.dumps(manifest | {"format_version": 99}))
    monkeypatch.setattr("qbe.store.prepare.__version__", "99.0")
    load(model)
    assert len(stores(cache)) == 1
    assert not old.exists()


def test_other_paths_layouts_and_unknown_origins_stay(cache: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    load(Path(shutil.copytree(model, tmp_path / "other" / "model")))  # the same name at another path
    load(model)
    (mine,) = (p for p in cache.iterdir() if json.loads((p / "qbe.json").read_text())["source"]["path"] == str(model))
    manifest = json.loads((mine / "qbe.json").read_text())
    odd = {
        "model-unknown": {k: v for k, v in manifest.items() if k != "source"},
        "model-layout": manifest | {"group_size": 128},
        "model-strange": manifest | {"source": 3},
    }
    for name, content in odd.items():
        shutil.copytree(mine, cache / name)
        (cache / name / "qbe.json").write_text(json.dumps(content))
    (cache / "model-damaged").mkdir()
    (cache / "model-damaged" / "qbe.json").write_text("{")
    (cache / "a file").write_text("")
    before = stores(cache)
    touch(model)
    load(model)
    assert before - stores(cache) == {mine.name}


def test_a_loaded_store_works_on_after_it_was_removed(cache: Path, model: Path) -> None:
    old = load(model)
    wanted = [weight.dequantise(4).clone() for _, _, weight in nested_linears(old.model)]
    touch(model)
    load(model)
    assert len(stores(cache)) == 1
    for (_, _, weight), want in zip(nested_linears(old.model), wanted, strict=True):
        assert torch.equal(weight.dequantise(4), want)


def test_a_store_that_another_process_is_loading_stays_until_next_time(cache: Path, model: Path) -> None:
    load(model)
    (old,) = cache.iterdir()
    code = (
        "import sys; from pathlib import Path; from qbe.store import superseded\n"
        "with superseded.in_use(Path(sys.argv[1])) as there:\n    print(there, flush=True); sys.stdin.read()\n"
    )
    user = forked.Popen(
        [sys.executable, "-c", code, str(old)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=dict(os.environ, PYTHONPATH=SRC),
    )  # fmt: skip
    assert user.stdout is not None
    assert user.stdout.readline() == "True\n"
    touch(model)
    load(model)
    assert old.exists()
    user.communicate("", timeout=30)
    touch(model)
    load(model)
    assert len(stores(cache)) == 1


def test_what_a_dead_process_left_goes_too(cache: Path, model: Path) -> None:
    (cache / ".model-x.1234.superseded").mkdir(parents=True)
    load(model)
    assert len(stores(cache)) == 1


def test_a_store_pruned_between_being_found_and_locked_is_made_again(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model)
    in_use, calls = superseded.in_use, []

    def pruned_first(folder: Path):  # type: ignore[no-untyped-def]
        if not calls:
            shutil.rmtree(folder)
        calls.append(folder)
        return in_use(folder)

    monkeypatch.setattr(superseded, "in_use", pruned_first)
    assert len(load(model).table.nested) == 15
    assert len(calls) == 2


def test_a_linked_model_is_the_model(cache: Path, tmp_path: Path) -> None:
    tiny_llama(seed=1).save_pretrained(tmp_path / "real")
    byte_tokenizer().save_pretrained(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    load(tmp_path / "real")
    touch(tmp_path / "real")
    load(tmp_path / "link")
    assert len(stores(cache)) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_a_damaged_store_in_the_cache_says_what_to_delete(cache: Path, model: Path, damage: str) -> None:
    load(model)
    (store,) = cache.iterdir()
    codes = next(store.glob("nested-*"))
    if damage == "cut":
        codes.write_bytes(codes.read_bytes()[:1000])
    elif damage == "gone":
        codes.unlink()
    else:
        (store / "qbe.json").write_text("{")
    with pytest.raises(qbe.QBEError, match=f"delete {store}, and it is made anew") as error:
        load(model)
    assert "quantize" not in str(error.value)
    shutil.rmtree(store)
    load(model)
