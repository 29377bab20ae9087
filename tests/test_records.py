"""The record store under concurrent writers, sudden death and full disks; both export formats, there and back."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.errors import QBEError
from qbe.records import Record, RecordStore, export
from qbe.records.store import SCHEMA_VERSION

SRC = str(Path(__file__).parents[1] / "src")


def record(**changes: object) -> Record:
    full = Record(
        model="smollm2-135m-instruct",
        policy="tiered",
        tier="default",
        prompt_tokens=12,
        completion_tokens=40,
        finish_reason="stop",
        score=0.42,
        prompt_class="code",
        analysis_tier=2,
        features={"token_count": 12.0, "digit_density": 0.125},
        blueprint_key="0123456789abcdef",
        average_weight_bits=5.31,
        weight_bits=(4, 6, 8, 16),
        activation_bits=(16, 16, 16, 16),
        kv_bits=(16, 16),
        bytes_per_token=98_000_000,
        bytes_moved=51 * 98_000_000,
        tokens_by_bits={4: 10, 8: 42},
        entropies=(1.5, 0.25),
        analysis_ms=0.4,
        policy_ms=0.2,
        prefill_ms=30.5,
        decode_ms=400.25,
    )
    return replace(full, **changes)


def run(code: str, *args: object, **options: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": SRC}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


APPEND = """
import sys
from pathlib import Path
from qbe.records import Record, RecordStore
store = RecordStore(Path(sys.argv[1]))
for i in range(int(sys.argv[3])):
    r = Record(model=sys.argv[2], policy="uniform", tier="default", prompt_tokens=i, finish_reason="stop")
    store.append(r)
    print(r.id, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "deep" / "records.sqlite")


# --- one store ---------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_given(store: RecordStore) -> None:
    r = record()
    store.append(r)
    assert store.get(r.id) == r
    assert store.get(r.id[:12].upper()) == r


def test_a_request_that_failed_early_needs_only_what_it_reached(store: RecordStore) -> None:
    r = Record(model="m", policy="tiered", tier="flex", prompt_tokens=0, finish_reason="error", error="out of memory")
    store.append(r)
    (back,) = store.list()
    assert back == r
    assert back.score is None
    assert back.entropies is None
    assert back.time.endswith("+00:00")


def test_the_prompt_has_no_place_in_a_record() -> None:
    assert not {"prompt", "text", "messages", "token_ids"} & set(record().describe())


@settings(max_examples=60, deadline=None)
@given(
    features=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    bits=st.lists(st.integers(1, 16)),
    tokens=st.dictionaries(st.integers(1, 16), st.integers(0, 2**62)),
    entropies=st.none() | st.lists(st.floats(0, 20)).map(tuple),
    error=st.none() | st.text(),
)
def test_any_record_survives_its_row_and_its_json(features, bits, tokens, entropies, error) -> None:
    r = record(features=features, weight_bits=tuple(bits), tokens_by_bits=tokens, entropies=entropies, error=error)
    assert Record.from_row(r.to_row()) == r
    assert Record.of(json.loads(json.dumps(r.describe()))) == r


@pytest.mark.parametrize(
    "changes",
    [
        {"features": {"x": float("nan")}},
        {"score": float("inf")},
        {"bytes_moved": 2**63},
        {"decode_ms": object()},
        {"weight_bits": object()},
    ],
)
def test_a_value_that_cannot_be_stored_is_refused_by_name(store: RecordStore, changes: dict[str, object]) -> None:
    bad = record(**changes)
    with pytest.raises(QBEError, match=next(iter(changes))):
        store.append(bad)
    with pytest.warns(RuntimeWarning, match="without records"):
        assert not store.try_append(bad)
    assert store.try_append(record())  # a bad record does not pause the good ones
    assert store.count() == 1


def test_text_that_is_no_utf8_is_stored_with_marks(store: RecordStore) -> None:
    store.append(record(error="bad byte \udc80"))
    assert store.list()[0].error == "bad byte ?"


def test_list_is_newest_first_with_filters_and_pages(store: RecordStore) -> None:
    for i in range(10):
        store.append(record(prompt_tokens=i, policy="uniform" if i % 2 else "tiered", model="a" if i < 5 else "b"))
    assert [r.prompt_tokens for r in store.list(limit=3)] == [9, 8, 7]
    assert [r.prompt_tokens for r in store.list(limit=3, offset=8)] == [1, 0]
    assert [r.prompt_tokens for r in store.list(policy="uniform")] == [9, 7, 5, 3, 1]
    assert [r.prompt_tokens for r in store.list(policy="uniform", model="a", limit=1)] == [3]
    assert store.list(policy="' OR 1=1 --") == []
    assert store.count() == 10
    with pytest.raises(QBEError, match="at least 0"):
        store.list(limit=-1)


def test_iteration_is_oldest_first_and_ends_while_others_append(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qbe.records.store.PAGE", 3)
    for i in range(8):
        store.append(record(prompt_tokens=i))
    seen = []
    for r in store:
        seen.append(r.prompt_tokens)
        store.append(record(prompt_tokens=100))  # from the same thread: would hang if a page held the lock
    assert seen == list(range(8))


def test_get_names_what_is_wrong(store: RecordStore) -> None:
    with pytest.raises(QBEError, match="no record abc"):
        store.get("abc")
    store.append(record(id="ab" * 16))
    store.append(record(id="ac" * 16))
    with pytest.raises(QBEError, match="several"):
        store.get("a")
    with pytest.raises(QBEError, match="no record id"):
        store.get("xyz%")
    with pytest.raises(QBEError, match="already"):
        store.append(record(id="ab" * 16))


def test_reading_makes_no_file(store: RecordStore) -> None:
    assert store.count() == 0
    assert store.list() == []
    assert list(store) == []
    assert not store.path.parent.exists()


def test_close_and_use_again(store: RecordStore) -> None:
    store.append(record())
    store.close()
    store.close()
    assert store.count() == 1


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_RECORDS", str(tmp_path / "here.sqlite"))
    assert RecordStore().path == tmp_path / "here.sqlite"


# --- several at once, and death ----------------------------------------------------------------------------------


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


# --- files that cannot be used -----------------------------------------------------------------------------------


def test_a_newer_format_is_refused_and_left_alone(store: RecordStore) -> None:
    store.append(record())
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    before = store.path.read_bytes()
    with pytest.raises(QBEError, match=r"format 2.*update QBE"):
        store.append(record())
    with pytest.raises(QBEError, match="format 2"):
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
    assert store._db is not None
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 1}")  # SQLite answers as it does on a full disk
    big = {"x" * 9000: 1.0}
    with pytest.raises(QBEError, match="full"):
        store.append(record(features=big))
    with pytest.warns(RuntimeWarning, match="full"):
        assert not store.try_append(record(features=big))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.try_append(record())  # within the pause: not even tried
        store._db.execute("PRAGMA max_page_count = 1000000")
        time.sleep(0.06)
        assert store.try_append(record(features=big))  # there is space again
    assert store.count() == 2


def test_a_locked_file_is_waited_for_with_a_limit(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(record())
    monkeypatch.setattr("qbe.records.store.BUSY_TIMEOUT_S", 0.2)
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


# --- export ------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(store: RecordStore) -> RecordStore:
    store.append(record(model="naïve “模型”"))
    store.append(Record(model="m", policy="p", tier="flex", prompt_tokens=1, finish_reason="cancelled"))
    store.append(record(entropies=(), features={}, error='a "quoted"\nerror'))
    return store


def test_jsonl_round_trip(three: RecordStore, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert export(three, path, "jsonl") == 3
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [Record.of(json.loads(line)) for line in lines] == list(three)


def test_parquet_round_trip(three: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(sys.modules["qbe.records.export"], "ROWS_PER_GROUP", 2)
    path = tmp_path / "out.parquet"
    assert export(three, path, "parquet") == 3
    assert pq.ParquetFile(path).num_row_groups == 2
    table = pq.read_table(path)
    assert str(table.schema.field("bytes_moved").type) == "int64"
    assert str(table.schema.field("weight_bits").type).startswith("list<")
    rows = [
        {**r, "features": dict(r["features"]), "tokens_by_bits": dict(r["tokens_by_bits"])} for r in table.to_pylist()
    ]
    assert [Record.of(r) for r in rows] == list(three)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_empty_store_exports_an_empty_file(store: RecordStore, tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / "out"
    assert export(store, path, format) == 0
    if format == "jsonl":
        assert path.read_bytes() == b""
    else:
        import pyarrow.parquet as pq

        assert "bytes_moved" in pq.read_table(path).column_names


def test_standard_output(three: RecordStore, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    export(three)
    assert len(capfdbinary.readouterr().out.splitlines()) == 3


def test_bad_requests(three: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QBEError, match="jsonl or parquet"):
        export(three, tmp_path / "x", "csv")
    with pytest.raises(QBEError, match="standard output"):
        export(three, None, "parquet")
    with pytest.raises(QBEError, match="folder"):
        export(three, tmp_path, "jsonl")
    with pytest.raises(QBEError, match="No such file"):
        export(three, tmp_path / "none" / "x", "jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(QBEError, match=r"pip install 'qbe\[parquet\]'"):
        export(three, tmp_path / "x", "parquet")
    assert list(tmp_path.glob("*x*")) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
from qbe.errors import QBEError
from qbe.records import RecordStore, export
store = RecordStore(Path(sys.argv[1]))
store.count()
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))  # a write beyond fails as on a full disk
try:
    export(store, Path(sys.argv[2]), sys.argv[3])
except QBEError as e:
    print(e)
"""


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_full_disk_leaves_the_old_file_and_no_half_one(store: RecordStore, tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    for i in range(60):  # with noise, or Parquet would compress it away
        store.append(record(weight_bits=tuple(os.urandom(400)), blueprint_key=os.urandom(400).hex(), prompt_tokens=i))
    out = tmp_path / "out"
    out.mkdir()
    (out / "records").write_text("the old file")
    p = run(FULL_DISK, store.path, out / "records", format)
    said, err = p.communicate(timeout=60)
    assert p.returncode == 0, err
    assert "cannot be written to" in said
    assert len(said.splitlines()) == 1
    assert [f.name for f in out.iterdir()] == ["records"]
    assert (out / "records").read_text() == "the old file"
