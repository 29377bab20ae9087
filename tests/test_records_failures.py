"""The record store under concurrent writers, sudden death, full disks and files that it cannot use."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
import warnings
from pathlib import Path

import pytest

from qbe.errors import QBEError
from qbe.records import RecordStore
from qbe.records.store import SCHEMA_VERSION
from records_samples import APPEND, record, run


def test_threads_share_a_store(store: RecordStore) -> None:
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for i in range(40):
                store.append(record(model=name, prompt_tokens=i))
                store.list(limit=2)
        except BaseException as e:  # shown by the assertion below
            failed.append(e)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert not failed
    assert store.count() == 160


def test_processes_append_to_one_new_file_at_once(store: RecordStore) -> None:
    writers = [run(APPEND, store.path, f"p{n}", 50) for n in range(6)]
    ids = set()
    for w in writers:
        out, err = w.communicate(timeout=60)
        assert w.returncode == 0, err
        ids |= set(out.split())
    assert store.count() == 300
    assert {r.id for r in store} == ids
    for n in range(6):  # each writer's records keep their order
        mine = [r.prompt_tokens for r in store.list(limit=100, model=f"p{n}")]
        assert mine == list(range(49, -1, -1))


FRESH = """
import sys, time
from pathlib import Path
from qbe.records import Record, RecordStore
while time.time() < float(sys.argv[2]):
    pass
for k in range(12):
    store = RecordStore(Path(sys.argv[1]) / f"{k}.sqlite")
    store.append(Record(model="m", policy="p", tier="flex", prompt_tokens=1, finish_reason="stop"))
    store.close()
"""


def test_processes_may_make_the_file_at_the_same_moment(tmp_path: Path) -> None:
    start = time.time() + 0.8  # all are loaded by then, so that they meet at each file
    writers = [run(FRESH, tmp_path, start) for _ in range(4)]
    for w in writers:
        _, err = w.communicate(timeout=60)
        assert w.returncode == 0, err
    assert [RecordStore(tmp_path / f"{k}.sqlite").count() for k in range(12)] == [4] * 12


def test_kill_9_leaves_a_valid_file_with_every_finished_append(store: RecordStore) -> None:
    for _ in range(3):
        writer = run(APPEND, store.path, "victim", 1_000_000)
        assert writer.stdout is not None
        done = [writer.stdout.readline().strip() for _ in range(30)]
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate(timeout=30)
        done += [line for line in rest.splitlines() if len(line) == 32]
        assert sqlite3.connect(store.path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert set(done) <= {r.id for r in store}
        store.append(record())


def test_a_newer_format_is_refused_and_left_alone(store: RecordStore) -> None:
    store.append(record())
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    before = store.path.read_bytes()
    with pytest.raises(QBEError, match=rf"format {SCHEMA_VERSION + 1}.*update QBE"):
        store.append(record())
    with pytest.raises(QBEError, match=f"format {SCHEMA_VERSION + 1}"):
        store.list()
    assert store.path.read_bytes() == before


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cookies.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE cookies (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(QBEError, match="another program"):
        RecordStore(path).append(record())
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello, I am no database at all. " * 40, b"\0" * 4096])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(QBEError, match=r"notes\.txt"):
        RecordStore(path).append(record())
    assert path.read_bytes() == content


def test_a_folder_in_the_way_warns_once_and_serving_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = RecordStore(tmp_path / "file" / "records.sqlite")  # fails for root too, unlike a read-only folder
    with pytest.raises(QBEError, match="QBE_RECORDS"):
        store.append(record())
    with pytest.warns(RuntimeWarning, match="without records") as caught:
        assert [store.try_append(record()) for _ in range(3)] == [False] * 3
    assert len(caught) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(QBEError, match="permissions"):
        RecordStore(tmp_path / "records.sqlite").append(record())


def test_a_full_disk_loses_records_not_the_engine(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.records.store.PAUSE_S", 0.05)
    store.append(record())
    assert store._file._db is not None
    pages = store._file._db.execute("PRAGMA page_count").fetchone()[0]
    store._file._db.execute(f"PRAGMA max_page_count = {pages + 1}")  # SQLite answers as it does on a full disk
    big = {"x" * 9000: 1.0}
    with pytest.raises(QBEError, match="full"):
        store.append(record(features=big))
    with pytest.warns(RuntimeWarning, match="full"):
        assert not store.try_append(record(features=big))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.try_append(record())  # within the pause: not even tried
        store._file._db.execute("PRAGMA max_page_count = 1000000")
        time.sleep(0.06)
        assert store.try_append(record(features=big))  # there is space again
    assert store.count() == 2


def test_a_locked_file_is_waited_for_with_a_limit(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(record())
    monkeypatch.setattr("qbe.records.database.BUSY_TIMEOUT_S", 0.2)
    other = RecordStore(store.path)
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    start = time.monotonic()
    with pytest.raises(QBEError, match="locked"):
        other.append(record())
    assert time.monotonic() - start < 5
    assert other.count() == 1  # readers are not stopped by a writer
    holder.execute("ROLLBACK")
    other.append(record())
    assert store.count() == 2
