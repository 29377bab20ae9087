"""Both export formats, there and back, and what stops an export."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from qbe.errors import QBEError
from qbe.records import Record, RecordStore, export
from records_samples import record, run


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
    maps = ("features", "tokens_by_bits", "tokens_by_activation_bits")
    rows = [{**r, **{name: dict(r[name]) for name in maps}} for r in table.to_pylist()]
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
    with pytest.raises(QBEError, match="'pip install pyarrow'"):
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
