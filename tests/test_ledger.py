"""The ledger's file: totals that add up, rows that say the same twice, files that are not ours."""

from __future__ import annotations

import json
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.cli.main import main
from qbe.errors import QBEError
from qbe.records.ledger import APPLICATION_ID, COLUMNS, UNIT, Ledger, LedgerEntry


def entry(number: int = 0, **changes: Any) -> LedgerEntry:
    fields: dict[str, Any] = dict(
        id=f"r{number}-0", request=f"r{number}", key="alice", tier="flex", model="tiny", policy="uniform",
        began=f"2026-11-{number % 28 + 1:02}T00:00:00.000+00:00", finish="stop", prompt_tokens=10, cached_tokens=4,
        completion_tokens=5, weight_bits=5.0, kv_bits=16.0, tokens_by_bits={4: 5, 6: 5}, cost=7, currency="USD",
    )  # fmt: skip
    return LedgerEntry(**fields | changes)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "deep" / "ledger.sqlite")


def test_a_reader_makes_no_file(ledger: Ledger) -> None:
    assert ledger.totals() == ledger.entries() == []
    assert not ledger.path.exists()


def test_a_row_written_twice_is_one_and_what_has_ended_stays(ledger: Ledger) -> None:
    begun = entry(finish=None, completion_tokens=1, cost=3)
    ledger.write([begun])
    ledger.write([entry(), entry(1)])
    ledger.write([entry(), begun])  # late, and again
    assert ledger.entries() == [entry(), entry(1)]
    (total,) = ledger.totals()
    assert (total.requests, total.unfinished, total.completion_tokens) == (2, 0, 10)
    assert total.cost == 14 / UNIT
    ledger.write([entry(2, finish=None)])
    assert ledger.totals()[0].unfinished == 1


def test_a_failed_write_leaves_nothing(ledger: Ledger) -> None:
    ledger.write([entry()])
    with pytest.raises(QBEError, match="cannot be written"):
        ledger.write([entry(1), entry(2, key=object())])
    assert ledger.entries() == [entry()]
    ledger.write([entry(1)])
    assert len(ledger.entries()) == 2


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(
    st.sampled_from("ab"), st.sampled_from(["flex", "priority"]), st.sampled_from(["USD", "EUR"]),
    st.integers(0, 2**62), st.integers(0, 10**9),
    st.dictionaries(st.sampled_from([4, 6, 8, 16]), st.integers(0, 10**9)),
), max_size=20))  # fmt: skip
def test_totals_are_the_sums(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """Also where a sum of costs has more than 64 bits."""
    ledger = Ledger(tmp_path_factory.mktemp("sums") / "ledger.sqlite")
    given_rows = [
        entry(i, key=key, tier=tier, currency=currency, cost=cost, completion_tokens=tokens, tokens_by_bits=spread)
        for i, (key, tier, currency, cost, tokens, spread) in enumerate(rows)
    ]
    if given_rows:
        ledger.write(given_rows)
    found = {(t.key, t.tier, t.currency): t for t in ledger.totals()}
    assert len(found) == len({r[:3] for r in rows})
    for group, total in found.items():
        own = [e for e in given_rows if (e.key, e.tier, e.currency) == group]
        assert total.cost == sum(e.cost for e in own) / UNIT
        assert total.completion_tokens == sum(e.completion_tokens for e in own)
        for bits, tokens in total.tokens_by_bits.items():
            assert tokens == sum(e.tokens_by_bits.get(bits, 0) for e in own)
    ledger.close()


def test_a_period_counts_from_its_begin_to_before_its_end(ledger: Ledger) -> None:
    ledger.write([entry(i) for i in range(6)])
    (total,) = ledger.totals("2026-11-02T00:00:00.000+00:00", "2026-11-05T00:00:00.000+00:00")
    assert total.requests == 3


def test_threads_and_two_openers_share_a_file(tmp_path: Path) -> None:
    books = [Ledger(tmp_path / "ledger.sqlite") for _ in range(2)]

    def write(book: Ledger, start: int) -> None:
        for i in range(start, start + 25):
            book.write([entry(i)])

    threads = [threading.Thread(target=write, args=(books[i % 2], i * 25)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(books[0].entries()) == 100


def test_a_file_of_version_1_gets_its_new_columns(tmp_path: Path) -> None:
    path, old = tmp_path / "ledger.sqlite", COLUMNS[:-2]
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE entries ({', '.join(old)}, PRIMARY KEY (id)) WITHOUT ROWID")
        values = [entry().__dict__[c] for c in old]
        values[old.index("tokens_by_bits")] = '{"4":5,"6":5}'
        db.execute(f"INSERT INTO entries VALUES ({', '.join('?' * len(old))})", values)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute("PRAGMA user_version = 1")
    db.close()
    ledger = Ledger(path)
    ledger.write([entry(1, joules=2.0, energy="rapl")])
    assert ledger.entries() == [entry(), entry(1, joules=2.0, energy="rapl")]
    (total,) = ledger.totals()
    assert (total.joules, total.energy) == (2.0, "rapl")


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE theirs (x)")
    with pytest.raises(QBEError, match="another program"):
        Ledger(other).write([entry()])
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be looked at" * 100)
    with pytest.raises(QBEError, match="cannot be read"):
        Ledger(text).totals()
    with pytest.raises(QBEError, match="cannot be written"):
        Ledger(text / "below").write([entry()])


def test_the_command_prints_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).write([entry(), entry(1), replace(entry(2), key="bob", tier="priority")])

    def run(*options: str) -> tuple[int | str | None, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["ledger", "--file", str(path), *options])
        return ended.value.code, *capsys.readouterr()

    code, printed, _ = run("--json")
    assert code == 0
    alice, bob = json.loads(printed)
    assert (alice["key"], alice["requests"], alice["cost"], alice["tokens_by_bits"]) == (
        "alice", 2, 14 / UNIT, {"4": 10, "6": 10},
    )  # fmt: skip
    assert bob["average_weight_bits"] == 5
    assert len(json.loads(run("--since", "2026-11-02", "--until", "2026-11-03T00:00", "--json")[1])) == 1
    assert "alice" in run()[1]
    for options, said in ((("--since", "yesterday"), "--since"), (("--file", "/no/such"), "is not there")):
        code, _, errors = run(*options)
        assert (code, errors.count("\n")) == (2, 1)
        assert said in errors
