"""The command `qbe bench`: tables, JSON, pictures and bad input."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from bench_samples import CPU, LIMITS, LINEARS
from qbe import cli
from qbe.bench import linears, switch
from qbe.cli.bench import BENCHMARKS, measure
from qbe.cli.main import app
from qbe.bench.machine import hardware
from qbe.bench.measure import Failed, Timing
from qbe.bench.plot import draw
from qbe.bench.report import BenchmarkReport, Row
from qbe.errors import QBEError


def test_command_writes_a_table_json_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(linears, "sizes_for", lambda device: LINEARS)
    monkeypatch.setattr("qbe.bench.machine.measure_limits", lambda device: LIMITS)
    as_json, picture = tmp_path / "r.json", tmp_path / "r.png"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "linears", "--device", "cpu", "--json", str(as_json), "--plot", str(picture)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "F.linear fp32" in shown
    assert "limit" in shown
    found = json.loads(as_json.read_text())
    assert found["benchmark"] == "linears"
    assert found["hardware"]["kind"] == "cpu"
    assert found["conditions"]["sizes"]["token"]["model"] == "tiny"
    assert found["conditions"]["store"]["group_size"] == 64
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("args", [["--json"], ["--json", "-"], ["--json", "--device", "cpu"], ["--json=-"]])
def test_json_without_a_name_is_all_of_standard_output(
    args: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("w", "s", "c", 4, Timing(2, 1, 3, 5), "p", Timing(4, 3, 5, 5), "us", 1.0)]
    monkeypatch.setattr(linears, "run", lambda device, limits, sizes, progress: rows)
    monkeypatch.setattr("qbe.bench.machine.measure_limits", lambda device: LIMITS)
    monkeypatch.chdir(tmp_path)
    for more in (["--record", "r.json"], ["--against", "r.json"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", "linears", *args, *more])
        assert not ended.value.code
        said = capsys.readouterr()
        assert json.loads(said.out)["benchmark"] == "linears"
    assert "1 of 1 rows are in the record" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_every_command_that_ends_prints_json() -> None:
    def leaves(command: Any, name: str) -> dict[str, Any]:
        found = {} if hasattr(command, "commands") and name != "qbe eval" else {name: command}
        for each, sub in getattr(command, "commands", {}).items():
            found |= leaves(sub, f"{name} {each}")
        return found

    found = leaves(typer.main.get_command(app), "qbe")
    without = {name for name, one in found.items() if not any("--json" in p.opts for p in one.params)}
    assert len(found) > 20
    assert without == {"qbe serve"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_sizes_and_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module(f"qbe.bench.{name}")
    rows = [Row("w", "s", "c", 4, Timing(2, 1, 3, 5), "p", Timing(4, 3, 5, 5), "us", 1.0)]
    monkeypatch.setattr(module, "run", lambda device, limits, sizes, progress: rows)
    monkeypatch.setattr("qbe.bench.machine.measure_limits", lambda device: LIMITS)
    for device in ("cpu", "cuda"):
        json.dumps(measure(name, "cpu", module.sizes_for(torch.device(device))).describe(), allow_nan=False)


def test_a_picture_shows_missing_peers_and_long_reports(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    value, peer = Timing(2.0, 1.9, 2.2, 5), Timing(3.0, 2.9, 3.1, 5)
    rows = [
        Row(f"work {i}", "8x8", f"M {m}", 4, value, name, theirs, "us", limit)
        for m in (1, 16, 64, 65)
        for i in range(6)
        for name, theirs, limit in (("peer", peer, 1.0), ("gone", Failed("not there"), None))
    ]
    rows.append(switch._recaptured([None], 3, "9 sites"))
    draw(BenchmarkReport("test", hardware(CPU, LIMITS), {}, rows), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    with pytest.raises(QBEError, match="cannot be written"):
        draw(BenchmarkReport("test", hardware(CPU, LIMITS), {}, rows), tmp_path / "none" / "a.png")


def row(ours: Timing, theirs: Timing | Failed, unit: str = "us", added: Timing | None = None) -> Row:
    return Row("w", "s", "c", 4, ours, "p", theirs, unit, added=added)


def test_what_lies_within_the_quartiles_is_neither_better_nor_worse() -> None:
    two, three, wide = Timing(2, 1.9, 2.2, 5), Timing(3, 2.9, 3.1, 5), Timing(3, 2, 4, 5)
    assert row(two, three).ratio_spread == pytest.approx((2.9 / 2.2, 3.1 / 1.9))
    assert row(two, three, "tokens/s").ratio_spread == pytest.approx((1.9 / 3.1, 2.2 / 2.9))
    assert (row(two, three).better, row(three, two).better, row(two, three, "tokens/s").better) == (True, False, False)
    assert row(two, wide).better is None
    assert row(two, Failed("gone")).better is row(two, Failed("gone")).ratio_spread is None
    # What was measured in pairs is judged by the differences of the pairs.
    for added, better in ((Timing(1, 0.5, 2, 5), False), (Timing(-1, -2, -0.5, 5), True), (wide.times(0), None)):
        assert row(two, wide, added=added).better is better
    assert row(two, three, added=Timing(1, -1, 2, 5)).better is None


def test_a_picture_has_quartiles_and_colours_no_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    from matplotlib.colors import to_hex

    from qbe.bench import plot

    drawn: list[Any] = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    two, three, wide = Timing(2, 1.9, 2.2, 5), Timing(3, 2.9, 3.1, 5), Timing(3, 1.5, 4, 5)
    ratios = [row(two, three), row(three, two), row(two, wide)]
    times = [row(two, two, added=a) for a in (Timing(-9, -12, -4, 5), Timing(5, 2, 6, 5), Timing(5, -1, 6, 5))]
    for rows, start in ((ratios, 1), (times, 0)):
        draw(BenchmarkReport("test", hardware(CPU, LIMITS), {}, rows), tmp_path / "a.png")
        (axes,) = drawn.pop().axes
        colours = [to_hex(bar.get_facecolor()) for bar in axes.patches]
        assert colours == [plot._BETTER, plot._WORSE, plot._NOISE]
        whiskers = [tuple(line.get_xdata()) for line in axes.lines if line.get_marker() == "|"]
        ends = [r.ratio_spread if start else (r.added.low, r.added.high) for r in rows]  # type: ignore[union-attr]
        assert whiskers == [pytest.approx(e) for e in ends]
        low, high = axes.get_xlim()
        assert all(low < a and b < high for a, b in whiskers)
        assert ("median of paired differences" in axes.get_xlabel()) is (start == 0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["bench", "nonsense"],
            "'nonsense': choose linears, experts, prefill, engine, switch, batch, kv, decode, speculate, serve; "
            "see 'qbe bench --help'",
        ),
        (["bench", "linear"], "'linear': choose linears,"),
        (["bench", "linears", "--device", "tpu"], "tpu"),
        (["bench", "linears", "--device", "cuda:99"], "cuda:99"),
        (["bench", "linears", "--turns", "3"], "option: --turns; see 'qbe bench linears --help'"),
        (["nonsense"], "'nonsense': choose generate, chat, explain,"),
        (["--nonsense"], "--nonsense; see 'qbe --help'"),
        (["bench", "linears", "--json", "/no/such/folder/r.json"], "/no/such/folder"),
        (["bench", "linears", "--json", "/"], "folder"),
        (["bench", "linears", "--plot", "r.jpg"], "png"),
        (["bench", "linears", "--json", "./r.png", "--plot", "r.png"], "--json and --plot name the same file"),
        (["bench", "linears", "--device", "cpu:7"], "cpu:7"),
    ],
)
def test_bad_input(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    message = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert message.startswith("qbe: ")
    assert "\n" not in message
    assert says in message


def test_without_matplotlib_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "linears", "--plot", "r.png"])
    assert ended.value.code == 2
    assert "qbe[bench]" in capsys.readouterr().err


def test_unknown_benchmarks_are_refused() -> None:
    with pytest.raises(QBEError, match="choose linears"):
        measure("speed")
