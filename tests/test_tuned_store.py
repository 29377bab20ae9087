"""Tuned configurations on disk: processes share them, and a file that is no good costs nothing but a warning."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import forked
from qbe.cli.info import hardware as about_hardware
from qbe.kernels.tuning import store as module
from qbe.kernels.tuning.store import TunedStore
from qbe.kernels.tuning.tunable import Problem, hardware, key_of

SOURCE = str(Path(__file__).parents[1] / "src")
PROBLEM = Problem(8, (64, 32), 256, (4, 2, 2), 64, torch.bfloat16, True, False)


def put(store: TunedStore, key: str, tile: int = 16, card: str = "card") -> None:
    store.put(key, card, {"BN": tile}, 2e-6, 3e-6, 1.5, 0.25)


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **environment}
    return forked.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_what_one_process_finds_another_has(tmp_path: Path) -> None:
    code = "from qbe.kernels.tuning.store import shared\n"
    writer = python(code + "shared.put('k', 'card', {'BN': 32, 'DEQUANTISE': False}, 1e-6, 2e-6, 1.0, 0.1)",
                    QBE_CACHE=str(tmp_path))  # fmt: skip
    assert writer.wait(60) == 0
    reader = python(code + "print(shared.get('k', 'card'), shared.get('k', 'other'), shared.get('j', 'card'))",
                    QBE_CACHE=str(tmp_path))  # fmt: skip
    assert reader.communicate(timeout=60)[0].strip() == "{'BN': 32, 'DEQUANTISE': False} None None"
    assert (tmp_path / "kernels" / f"tuned-{module.VERSION}.sqlite").is_file()


def test_many_writers_at_once(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from qbe.kernels.tuning.store import TunedStore
store = TunedStore(Path(sys.argv[1]))
for i in range(20):
    store.put(f"{sys.argv[2]}-{i}", "card", {"BN": i}, 1e-6, 1e-6, 0.0, 0.0)
    store.put("same", "card", {"BN": 7}, 1e-6, 1e-6, 0.0, 0.0)
"""
    path = tmp_path / "deep" / "tuned.sqlite"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    writers = [forked.Popen([sys.executable, "-c", code, str(path), str(n)], env=env) for n in range(4)]
    assert [w.wait(120) for w in writers] == [0] * 4
    store = TunedStore(path)
    assert store.summary("card")["tuned"] == 81
    assert store.get("3-19", "card") == {"BN": 19}


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    path.write_bytes(b"no database " * 100)
    store = TunedStore(path)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert store.get("k", "card") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, "k")
    assert store.get("k", "card") == {"BN": 16}
    assert (tmp_path / "tuned.sqlite.damaged").read_bytes().startswith(b"no database")


def test_damage_found_while_writing_loses_nothing_new(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    path.write_bytes(b"no database " * 100)
    store = TunedStore(path)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        put(store, "k", 48)
    assert store.get("k", "card") == {"BN": 48}


def test_a_place_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TunedStore(tmp_path / "file" / "tuned.sqlite")
    with pytest.warns(RuntimeWarning, match="out of reach"):
        put(store, "k")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, "j")
    assert store.get("k", "card") is None


def test_a_locked_file_is_not_waited_for_by_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.sqlite"
    store = TunedStore(path)
    put(store, "k")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert module.READ_TIMEOUT_S < 1
    with pytest.warns(RuntimeWarning, match="out of reach"):
        assert store.get("k", "card") is None
    other.execute("COMMIT")
    assert store.get("k", "card") == {"BN": 16}


@pytest.mark.parametrize("text", ["no json", "[1]", '{"BN": "wide"}', "null"])
def test_a_row_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    store = TunedStore(tmp_path / "tuned.sqlite")
    put(store, "k")
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE tuned SET config = ?", (text,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get("k", "card") is None


def test_keys_tell_problems_kernels_and_sources_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.kernels.tuning import tunable

    keys = {key_of("decode", PROBLEM), key_of("batch", PROBLEM)}
    for change in (
        {"rows": 16}, {"outputs": (64,)}, {"inputs": 512}, {"slices": (4, 4)}, {"group_size": 128},
        {"dtype": torch.float16}, {"original": False}, {"bias": True},
    ):  # fmt: skip
        keys.add(key_of("decode", PROBLEM._replace(**change)))
    for software in (("3.6.0", "other source"), ("another Triton", tunable._software()[1])):
        monkeypatch.setattr(tunable, "_software", lambda software=software: software)
        keys.add(key_of("decode", PROBLEM))
    assert len(keys) == 12


def test_info_tells_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shared, "_path", tmp_path / "tuned.sqlite")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert about_hardware()["kernel_cache"]["tuned"] == 0
    put(module.shared, "k", card=hardware(device))
    put(module.shared, "j", card=hardware(device))
    put(module.shared, "k", card="another card")
    kept = about_hardware()["kernel_cache"]
    assert kept["file"] == str(tmp_path / "tuned.sqlite")
    assert (kept["tuned"], kept["compile_seconds"], kept["tuning_seconds"]) == (2, 3.0, 0.5)
    assert kept["mean_speedup"] == pytest.approx(1.5)
