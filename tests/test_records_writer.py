"""Records that a thread writes."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import byte_tokenizer, tiny_llama
from qbe import Engine, SamplingParams
from qbe.records import Record, RecordStore, RecordWriter
from records_samples import record


def made(name: str) -> Record:
    return replace(record(), id=name)


def test_records_are_written_while_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else has locked the file; it is written to when they are done."""
    store = RecordStore(tmp_path / "records.sqlite")
    store.append(made("first"))
    other = sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    writer, tried, write = RecordWriter(store), threading.Event(), store.try_append

    def noted(record: Record) -> bool:
        tried.set()
        return write(record)

    monkeypatch.setattr(store, "try_append", noted)
    writer.try_append(made("second"))
    assert tried.wait(10)
    for i in range(10):
        writer.try_append(made(f"more {i}"))
    other.execute("ROLLBACK")
    writer.close()
    assert len(store.list(99)) == 12
    writer.try_append(made("last"))
    writer.close()
    assert len(store.list(99)) == 13


def test_more_records_than_may_wait_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.records.writer.MOST", 2)
    held, store = threading.Event(), RecordStore(tmp_path / "records.sqlite")
    store_has_begun = threading.Event()

    def hold(_record: Record) -> bool:
        store_has_begun.set()
        return held.wait(10)

    monkeypatch.setattr(store, "try_append", hold)
    writer = RecordWriter(store)
    for i in range(3):  # one is held, two wait
        writer.try_append(made(str(i)))
        assert store_has_begun.wait(10)
    with pytest.warns(RuntimeWarning, match="2 records wait"):
        assert not writer.try_append(made("more"))
    held.set()
    writer.close()


def test_an_engine_does_not_wait_for_a_locked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.records.database.BUSY_TIMEOUT_S", 60.0)  # what a step that waited would take
    store = RecordStore(tmp_path / "records.sqlite")
    store.append(made("first"))
    other = sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    writer = RecordWriter(store)
    with Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=writer) as engine:
        for _ in range(3):
            engine.generate("why?", SamplingParams(max_tokens=2))
        other.execute("ROLLBACK")
    assert [r.model for r in store.list(9)] == [engine.name] * 3 + [made("first").model]
