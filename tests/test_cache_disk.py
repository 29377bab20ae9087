"""The blueprint cache's file: what is damaged, stale or out of reach is never served and never stops a request."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import warnings
from pathlib import Path

import pytest

from cache_samples import TABLE, Counting, open_at, profiles, small_table
from qbe import policies
from qbe.budget import Budget
from qbe.cache import disk as module
from qbe.cache.disk import Disk
from qbe.cache.fingerprint import Fingerprint
from records_samples import run

QUERIES = profiles(40)
FRESH = [policies.load("tiered").blueprint(p, Budget(), TABLE) for p in QUERIES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the blueprints of `QUERIES`."""
    path = tmp_path / "deep" / "blueprints.sqlite"
    cache = open_at(path)
    ask(cache)
    cache.close()
    return path


def ask(cache) -> list[str]:  # type: ignore[no-untyped-def]
    """Asks for every query, compares with what the policy says, and returns what the cache did."""
    kinds = []
    for profile, fresh in zip(QUERIES, FRESH, strict=True):
        served, kind = cache.blueprint(Counting(), profile, Budget())
        assert served == fresh
        kinds.append(kind)
    return kinds


def rows(path: Path, sql: str) -> list[tuple]:
    with sqlite3.connect(path) as db:
        found = db.execute(sql).fetchall()
    db.close()
    return found


def test_another_process_finds_what_was_kept(path: Path) -> None:
    assert set(ask(open_at(path))) <= {"exact", "near"}
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_cache_disk as t
print(*t.ask(t.open_at(Path(sys.argv[1]))))
"""
    other = run(code, path, Path(__file__).parent)
    out, err = other.communicate(timeout=120)
    assert other.returncode == 0, err
    assert set(out.split()) <= {"exact", "near"}


def test_processes_fill_one_new_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_cache_disk as t
cache = t.open_at(Path(sys.argv[1]))
t.ask(cache)
cache.close()
"""
    writers = [run(code, path, Path(__file__).parent) for _ in range(3)]
    for w in writers:
        _, err = w.communicate(timeout=120)
        assert w.returncode == 0, err
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    entries = rows(path, "SELECT version, cell, first, digest FROM entries")
    assert len(entries) == len(set(entries)) > 0
    assert set(ask(open_at(path))) <= {"exact", "near", "miss"}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entries SET bits = bits + 1",
        "UPDATE entries SET cell = replace(cell, 'default', 'flex')",
        "UPDATE entries SET first = 0, last = 99999",
        "UPDATE entries SET digest = zeroblob(8)",
        "UPDATE entries SET blueprint = (SELECT max(hash) FROM blueprints)",
        "UPDATE entries SET checksum = NULL",
        "UPDATE entries SET digest = 'text', bits = 'text', last = NULL",
        "UPDATE blueprints SET body = replace(body, '[4,', '[8,')",
        "UPDATE blueprints SET body = cast(x'ff00fe' AS TEXT)",
        "UPDATE blueprints SET body = NULL",
        "UPDATE blueprints SET body = '{}'",
        "DELETE FROM blueprints",
        "UPDATE versions SET version = 'f'",
    ],
)
def test_rows_that_were_changed_are_not_served(path: Path, change: str) -> None:
    before = rows(path, "SELECT count(*) FROM entries")[0][0]
    with sqlite3.connect(path) as db:
        db.execute("UPDATE OR REPLACE" + change.removeprefix("UPDATE")) if "cell" in change else _try(db, change)
    db.close()
    cache = open_at(path)
    kinds = ask(cache)
    if "blueprint = (SELECT" in change:
        assert "miss" in kinds  # one of them was right
    elif "blueprints SET body = replace" not in change:  # some bodies have no such text
        assert kinds[0] == "miss"
    if "versions" not in change and "cell" not in change:
        assert 0 < cache.numbers.dropped <= before


def _try(db: sqlite3.Connection, change: str) -> None:
    """Where the change would make two rows equal, on one row of each cell."""
    try:
        db.execute(change)
    except sqlite3.IntegrityError:
        db.execute(f"{change} WHERE seq IN (SELECT min(seq) FROM entries GROUP BY version, cell)")
        db.execute("DELETE FROM entries WHERE seq NOT IN (SELECT min(seq) FROM entries GROUP BY version, cell)")


def test_damaged_rows_are_deleted_and_written_anew(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE blueprints SET body = 'x'")
    db.close()
    cache = open_at(path)
    assert "miss" in ask(cache)
    cache.close()
    again = open_at(path)
    assert set(ask(again)) <= {"exact", "near"}
    assert again.numbers.dropped == 0


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bytes_are_survived(path: Path, seed: int) -> None:
    data, rng = bytearray(path.read_bytes()), random.Random(seed)
    for _ in range(1 + 4 * seed):
        data[rng.randrange(0 if seed % 2 else 100, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ask(open_at(path))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_a_truncated_file_is_survived(path: Path, share: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(share * path.stat().st_size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cache = open_at(path)
        ask(cache)
        cache.close()
        ask(open_at(path))


def test_what_is_no_database_is_set_aside(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)
    cache = open_at(path)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        ask(cache)
    assert path.with_name(path.name + ".damaged").read_bytes().startswith(b"no database")
    cache.close()
    assert "exact" in ask(open_at(path))


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = open_at(tmp_path / "file" / "b.sqlite")  # fails for root too, unlike a read-only folder
    with pytest.warns(RuntimeWarning, match="out of reach") as told:
        ask(cache)
    assert len(told) == 1
    assert set(ask(cache)) <= {"exact", "near"}  # memory serves


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder_still_serves_what_it_has(path: Path) -> None:
    path.chmod(0o400)
    path.parent.chmod(0o500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ask(open_at(path))
    path.parent.chmod(0o700)


def test_a_file_locked_by_another_process_does_not_hold_a_request_up(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.01)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    cache = open_at(path)
    assert "miss" not in ask(cache)  # readers are not stopped by a writer
    with pytest.warns(RuntimeWarning, match="out of reach"):
        cache.blueprint(Counting(), QUERIES[0], Budget(tier="flex"))
    other.rollback()
    other.close()


def test_the_oldest_entries_go(path: Path, monkeypatch) -> None:
    before = rows(path, "SELECT max(seq) FROM entries")[0][0]
    monkeypatch.setattr(module, "CAPACITY", 5)
    kept = Disk(path)
    assert sum(r["entries"] for r in kept.summary()) == 5
    kept.close()
    assert rows(path, "SELECT min(seq) FROM entries")[0][0] == before - 4


def test_summary_and_clear(path: Path, tmp_path: Path) -> None:
    other = open_at(path, small_table(seed=1))
    other.blueprint(Counting(), QUERIES[0], Budget())
    kept = Disk(path)
    assert [(r["model"], r["policy"]) for r in kept.summary()] == [("small", "tiered")] * 2
    total = sum(r["entries"] for r in kept.summary())
    assert kept.clear() == total
    assert kept.summary() == []
    assert ask(open_at(path))[0] == "miss"
    absent = Disk(tmp_path / "absent")
    assert (absent.summary(), absent.clear()) == ([], 0)
    assert not absent.path.exists()


def test_names_of_cells_are_json_that_tells_them_apart() -> None:
    cells = {Fingerprint(p, Budget(tier=t)).cell for p in QUERIES for t in ("flex", "default")}
    names = {module.cell_name(c) for c in cells}
    assert len(names) == len(cells)
    assert all(isinstance(json.loads(n), list) for n in names)
