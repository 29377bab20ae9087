"""The record of best numbers: what got worse than its spread is said, and what is kept only goes up."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench_samples import CPU, LIMITS
from qbe import cli
from qbe.bench import linears
from qbe.bench.machine import hardware
from qbe.bench.measure import Failed, Timing
from qbe.bench.record import Record, key_of, machine_of
from qbe.bench.report import BenchmarkReport, Row
from qbe.errors import QBEError

ROW = Row("qkv", "64x128", "M 1", 4, Timing(2.0, 1.9, 2.1, 5), "cuBLAS", Timing(4.0, 3.9, 4.1, 5), "us")
ALONE = Row("decode", "tiny", "", 4, Timing(100.0, 95.0, 105.0, 5), "llama.cpp", Failed("not installed"), "tokens/s")


def report(*rows: Row) -> BenchmarkReport:
    return BenchmarkReport("linears", hardware(CPU, LIMITS), {"started": "2026-11-27"}, list(rows))


def times(row: Row, factor: float) -> Row:
    assert row.ours is not None
    return replace(row, ours=row.ours.times(factor))


def test_only_what_leaves_both_spreads_has_changed() -> None:
    record = Record()
    record.take(report(ROW, ALONE))
    assert record.known(report(ROW, ALONE, replace(ROW, bits=6))) == 2
    assert record.changes(report(times(ROW, 1.05), times(ALONE, 0.95), replace(ROW, bits=6))) == []
    slower, faster = record.changes(report(times(ROW, 1.5), times(ALONE, 1.5)))
    assert (slower.better, slower.of, faster.better, faster.of) == (False, "ratio", True, "tokens/s")
    assert slower.line.startswith("worse: qkv, 64x128, M 1, 4 bits: 1.33 (")
    assert "over cuBLAS, was 2 (" in slower.line
    faster, slower = record.changes(report(times(ROW, 0.5), times(ALONE, 0.5)))
    assert (faster.better, slower.better) == (True, False)


def test_what_a_slower_machine_does_to_both_sides_is_no_change() -> None:
    record = Record()
    record.take(report(ROW))
    assert not isinstance(ROW.theirs, Failed)
    assert record.changes(report(replace(times(ROW, 3.0), theirs=ROW.theirs.times(3.0)))) == []


def test_it_only_goes_up() -> None:
    record = Record()
    record.take(report(ROW))
    machine, key = machine_of(report(ROW)), key_of(ROW)
    for factor, ratio in ((1.5, 2.0), (0.5, 4.0), (0.51, 4.0), (2.0, 4.0)):
        record.take(report(times(ROW, factor)))
        assert record.machines[machine]["linears"][key]["values"][0] == ratio


def test_another_machine_has_numbers_of_its_own() -> None:
    record = Record()
    record.take(report(ROW))
    other = replace(report(times(ROW, 9.0)), hardware=report(ROW).hardware | {"device": "another"})
    assert record.changes(other) == []
    record.take(other)
    assert len(record.machines) == 2


def test_the_command_compares_keeps_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qbe.bench.machine.measure_limits", lambda device: LIMITS)
    path = tmp_path / "record.json"

    def run(row: Row, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(linears, "run", lambda device, limits, sizes, progress: [row])
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", "linears", "--device", "cpu", *options])
        return int(ended.value.code or 0), capsys.readouterr().out

    assert run(ROW, "--record", str(path))[0] == 0
    assert run(ROW, "--against", str(path))[0] == 0
    code, said = run(times(ROW, 2.0), "--against", str(path))
    assert code == 1
    assert "worse: qkv" in said
    assert "1 of 1 rows are in the record: 0 better, 1 worse" in said
    code, said = run(times(ROW, 0.5), "--against", str(path))
    assert (code, "1 better, 0 worse" in said) == (0, True)
    before = json.loads(path.read_text())
    run(times(ROW, 2.0), "--record", str(path))
    assert json.loads(path.read_text()) == before, "what got worse is not taken over"


@pytest.mark.parametrize("text", ["", "[]", '{"version": 9, "machines": {}}', '{"version": 1}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(QBEError, match=r"cannot be read: .*--record"):
        Record.read(path)
    path.write_text(text)
    with pytest.raises(QBEError, match="is no record of benchmarks"):
        Record.read(path)
