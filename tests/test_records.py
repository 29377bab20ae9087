"""The record store: what is appended comes back, whole and in order."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.errors import QBEError
from qbe.records import Record, RecordStore
from qbe.records.record import FIELDS
from records_samples import record


def test_a_record_comes_back_as_it_was_given(store: RecordStore) -> None:
    r = record()
    store.append(r)
    assert store.get(r.id) == r
    assert store.get(r.id[:12].upper()) == r


def test_every_field_is_a_column_in_the_order_that_files_have() -> None:
    assert sorted(FIELDS) == sorted(f.name for f in fields(Record))
    assert FIELDS[:5] == ("id", "time", "model", "policy", "tier")
    assert FIELDS[-4:] == ("precision_misses", "state_bits", "quality", "arm")
    assert list(record().describe()) == list(FIELDS)


def test_a_request_that_failed_early_needs_only_what_it_reached(store: RecordStore) -> None:
    r = Record(model="m", policy="tiered", tier="flex", prompt_tokens=0, finish_reason="error", error="out of memory")
    store.append(r)
    (back,) = store.list()
    assert back == r
    assert back.score is None
    assert back.entropies is None
    assert back.time.endswith("+00:00")


def test_a_file_of_an_older_version_gets_the_new_columns(store: RecordStore) -> None:
    since = {
        "tokens_by_activation_bits": {8: 30, 16: 22}, "kv_error": 0.1, "pages_read": 9, "pages_raised": 3,
        "host_bytes": 77, "cluster": 5, "cache": "near",
    }  # fmt: skip
    old, new = record(tokens_by_activation_bits={}), record(**since)
    store.append(old)
    store.close()
    with sqlite3.connect(store.path) as db:
        for column in since:
            db.execute(f"ALTER TABLE records DROP COLUMN {column}")
        db.execute("PRAGMA user_version = 1")
    db.close()
    assert RecordStore(store.path).list() == [old]
    again = RecordStore(store.path)
    again.append(new)
    assert again.list() == [new, old]


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
