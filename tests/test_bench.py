"""`qbe bench`: every benchmark runs on tiny shapes and its numbers hang together. No speed."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

<<<<<<< HEAD
from bench_samples import CPU, LIMITS, LINEARS, THIN, TOKEN, described
from qbe.bench import batch, decode, linears, prefill, switch
=======
from qbe import cli
from qbe.bench import batch, decode, linears, prefill, speculate, switch
from qbe.bench.command import BENCHMARKS, measure
>>>>>>> 2b12b2f (qbe bench speculate)
from qbe.bench.engines import Work, blueprint_at, core_of, peers_of
from qbe.bench.machine import hardware, measure_limits
from qbe.bench.measure import Failed
from qbe.bench.passes import WHOLE
from qbe.bench.weights import random_weights


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model's folder; its nested store goes into a cache of the test's own."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    return tiny_folder


def test_linears(device: torch.device) -> None:
    rows = described(linears.run(device, LIMITS, LINEARS), device)
    others = {"F.linear bf16", "F.linear fp32"}
    if device.type == "cuda":
        others = {"cuBLAS bf16", "tinygemm int4", "torchao int8", "torchao FP8"}
    assert {r["peer"] for r in rows} == others
    assert {r["what"] for r in rows} == {WHOLE, "a", "b", "head"}
    assert {r["bits"] for r in rows} == {4, 6, 8}
    assert {r["shape"] for r in rows if r["what"] == "b"} == {"96x256, M 1, group 64", "96x256, M 5, group 64"}
    assert all(r["peer_value"] for r in rows if "bf16" in r["peer"])
    # 64 x 128 weights at 4 bits, four planes of scales (64 x 2 groups), 5 rows of bfloat16 in and out
    moved = 64 * 128 / 2 + 4 * 64 * 2 + 2 * 5 * (64 + 128)
    found = next(r for r in rows if (r["what"], r["bits"]) == ("a", 4) and "M 5" in r["shape"])
    assert found["limit"] == pytest.approx(max(moved / LIMITS.bandwidth, 2 * 5 * 64 * 128 / LIMITS.flops) * 1e6)


def test_batch(device: torch.device) -> None:
    rows = described(batch.run(device, LIMITS, batch.Sizes(TOKEN, rows=(5,), rounds=3)), device)
    assert {r["bits"] for r in rows} == {"4+6+8", "1x8, 4x4"}
    assert {r["peer"] for r in rows} == {"all rows at 8", "a launch per precision"}
    assert all(r["peer_value"] for r in rows)


def test_a_mixed_batch_reads_every_precisions_scales_once() -> None:
    weights, part = random_weights(TOKEN, CPU, (64,)), TOKEN.parts[0]
    plane, rows = 64 * 2, 2 * 3 * (64 + 128)
    for widths, codes, planes in (((8,), 8, 2), ((6,), 6, 4), ((4, 8), 8, 4), ((4, 6, 8), 8, 6), ((4, 6), 6, 6)):
        assert weights.bytes_read(part, widths, 64, 3) == 64 * 128 * codes / 8 + planes * plane + rows
    assert weights.bytes_read(part, (16,), 64, 3) == 64 * 128 * 2 + rows


def test_every_layer_has_memory_of_its_own() -> None:
    weights = random_weights(TOKEN, CPU, (64, 128))
    for group, nested in weights.nested.items():
        for part in TOKEN.all_parts:
            assert len({w.packed.data_ptr() for w in nested[part.name]}) == TOKEN.copies(part) == len(nested[part.name])
            assert all(w.group_size == group for w in nested[part.name])
            assert [w.original.data_ptr() for w in nested[part.name]] == [
                d.data_ptr() for d in weights.dense[part.name]
            ]
    assert [(p.name, i) for p, i in TOKEN.order()] == [
        ("a", 0), ("a", 1), ("b", 0), ("a", 2), ("a", 3), ("b", 1), ("head", 0),
    ]  # fmt: skip


def test_decode_with_peers(folder: Path) -> None:
    sizes = decode.Sizes(folder, averages=(4, 5, 16), prompt=3, steps=3, rounds=3)
    rows = described(decode.run(CPU, LIMITS, sizes), CPU)
    assert sorted({r["bits"] for r in rows}) == [4, pytest.approx(5, abs=0.2), 16]
    by_peer = {p: [r for r in rows if r["peer"] == p] for p in (decode.SAME, "transformers", "llama.cpp")}
    assert [len(by_peer[p]) for p in by_peer] == [2 * 2, 2 * 3, 2 * 3]  # compiled and not
    assert all(r["peer_value"] for r in (*by_peer[decode.SAME], *by_peer["transformers"]))
    assert all(r["peer_value"] is None and "llama" in r["note"] for r in by_peer["llama.cpp"])


def test_decode_of_a_random_model(device: torch.device) -> None:
    rows = described(decode.run(device, LIMITS, decode.Sizes(THIN, (4, 16), prompt=3, steps=3, rounds=3)), device)
    cases = ("batch 1", "batch 1, compiled")
    assert [(r["shape"].split(", ", 2)[-1], r["bits"], r["peer"]) for r in rows] == [(c, 4, decode.SAME) for c in cases]
    assert rows[0]["peer_value"]


def test_prefill_of_a_model_and_of_linears(folder: Path, device: torch.device) -> None:
    if device.type == "cpu":
        rows = described(prefill.run(CPU, LIMITS, prefill.Sizes(folder, 20, (4, 16), rounds=3)), CPU)
        assert {(r["bits"], r["peer"]) for r in rows} == {
            (b, p) for b in (4, 16) for p in ("transformers", "llama.cpp")
        }
        assert all(r["unit"] == "tokens/s" for r in rows)
    alone = replace(prefill.sizes_for(device), linears=linears.Sizes(TOKEN, (40,), (4, 8, 16), rounds=3))
    rows = described(prefill.run(device, LIMITS, alone), device)
    assert {r["bits"] for r in rows} == {4, 8, 16}
    assert not any("one prompt" in r["shape"] for r in rows)
    long = linears.Sizes(TOKEN, (256,), (4, 16), rounds=3, prompts=(8, 16))
    rows = described(prefill.run(device, LIMITS, replace(alone, linears=long)), device)
    shown = {(r["bits"], r["shape"].partition("one prompt, ")[2]) for r in rows}
    assert shown == {(b, kind) for b in (4, 16) for kind in ("", "8-bit activations", "16-bit activations")}


def test_switch(device: torch.device) -> None:
    rows = described(switch.run(device, LIMITS, switch.Sizes(THIN, (1, 3), writes=3, steps=2, rounds=3)), device)
    kinds = {f"{what}, {kind}" for what in ("Plan.write", "decode step") for kind in ("seen", "new")}
    assert {r["what"] for r in rows[:-1]} == kinds
    assert len(rows) == 2 * 4 + 1
    for row in rows[:-1]:
        assert row["added_spread"][0] <= row["added"] <= row["added_spread"][1]
        assert row["added_statistic"].startswith("median and quartiles of the differences of pairs")
    assert rows[-1]["what"] == "graphs captured"
    assert rows[-1]["ours"] in (None, 0)


def test_captured_graphs_are_counted_where_the_runner_counts_them() -> None:
    class Counting:
        captures = 7

    class Runner:
        decode = Counting()

    class Core:
        runner: Any = Runner()

    assert switch.captures(Core()) == 7  # type: ignore[arg-type]
    Core.runner = Counting()
    assert switch.captures(Core()) == 7  # type: ignore[arg-type]
    Core.runner = object()
    assert switch.captures(Core()) is None  # type: ignore[arg-type]
    row = switch._recaptured([0, 2], 100, "5 sites").describe()
    assert (row["ours"], row["peer_value"], row["ratio"]) == (2, 0, 0)


def test_limits_and_hardware(device: torch.device) -> None:
    limits = measure_limits(device, copy_bytes=1 << 20, matmul_size=64)
    assert limits.bandwidth > 0
    assert limits.seconds(limits.bandwidth, 0) == pytest.approx(1)
    assert limits.seconds(0, 2 * limits.flops) == pytest.approx(2)
    machine = json.loads(json.dumps(hardware(device, limits), allow_nan=False))
    assert {"device", "driver", "cores", "threads", "load_average", "copy_bandwidth_bytes_per_s"} <= set(machine)
    assert {"torch", "triton", "transformers"} <= set(machine["versions"])
    assert machine["versions"]["torch"] == torch.__version__


def test_blueprints_meet_an_average(folder: Path) -> None:
    core = core_of(folder, CPU, 64, False)
    for average in (4, 4.5, 6, 7, 8, 12, 16):
        got = blueprint_at(core, average).average_weight_bits(core.table)
        assert got == pytest.approx(average, abs=0.35)
        assert got <= average
        assert got == average or average not in core.table.gears()


def test_whole_model_peers_of_a_folder(folder: Path) -> None:
    peers = peers_of(folder, CPU, Work([1, 2, 3], 2), False)
    assert isinstance(peers["llama.cpp"], Failed)
    running = peers["transformers"]
    assert not isinstance(running, Failed)
    assert set(running()) == {"prefill", "step"}
<<<<<<< HEAD
=======


def test_limits_and_hardware(device: torch.device) -> None:
    limits = measure_limits(device, copy_bytes=1 << 20, matmul_size=64)
    assert limits.bandwidth > 0
    assert limits.seconds(limits.bandwidth, 0) == pytest.approx(1)
    assert limits.seconds(0, 2 * limits.flops) == pytest.approx(2)
    machine = json.loads(json.dumps(hardware(device, limits), allow_nan=False))
    assert {"device", "driver", "cores", "threads", "load_average", "copy_bandwidth_bytes_per_s"} <= set(machine)
    assert {"torch", "triton", "transformers"} <= set(machine["versions"])
    assert machine["versions"]["torch"] == torch.__version__


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


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_sizes_and_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module(f"qbe.bench.{name}")
    rows = [Row("w", "s", "c", 4, Measured(2, 1, 3, 5), "p", Measured(4, 3, 5, 5), "us", 1.0)]
    monkeypatch.setattr(module, "run", lambda device, limits, sizes, progress: rows)
    monkeypatch.setattr("qbe.bench.machine.measure_limits", lambda device: LIMITS)
    for device in ("cpu", "cuda"):
        json.dumps(measure(name, "cpu", module.sizes_for(torch.device(device))).describe(), allow_nan=False)


def test_speculate(folder: Path, device: torch.device) -> None:
    sizes = speculate.Sizes(folder, speculate.PROMPTS[:2], 20, targets=(8,), batches=(1, 2), compile=False, rounds=3)
    rows = described(speculate.run(CPU, LIMITS, sizes), CPU)
    ways = [speculate.CHOSEN, "drafts at 4 bits", "drafts at 6 bits", speculate.READ]
    assert [r["shape"].split(", ", 1)[1] for r in rows] == [f"batch {n}, {way}" for n in (1, 2) for way in ways]
    assert all(r["note"].endswith("2 of 2 answers the same") for r in rows)
    assert all(
        r["note"].startswith("accepted") and "no guesses" not in r["note"] for r in rows if "draft" in r["shape"]
    )
    random = replace(sizes, model=THIN, rates={8: {4: 1.0, 6: 0.0}}, batches=(1,), guesses=2)
    rows = described(speculate.run(device, LIMITS, random), device)
    assert [r["note"].split()[1] for r in rows if "drafts" in r["shape"]] == ["100.0%", "0.0%"]


def test_a_picture_shows_missing_peers_and_long_reports(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    value, peer = Measured(2.0, 1.9, 2.2, 5), Measured(3.0, 2.9, 3.1, 5)
    rows = [
        Row(f"work {i}", "8x8", f"M {m}", 4, value, name, theirs, "us", limit)
        for m in (1, 16, 64, 65)
        for i in range(6)
        for name, theirs, limit in (("peer", peer, 1.0), ("gone", Failed("not there"), None))
    ]
    rows.append(switch._recaptured([None], 3, "9 sites"))
    draw(Report("test", hardware(CPU, LIMITS), {}, rows), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    with pytest.raises(QBEError, match="cannot be written"):
        draw(Report("test", hardware(CPU, LIMITS), {}, rows), tmp_path / "none" / "a.png")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["bench", "nonsense"], "nonsense"),
        (["bench", "linears", "--device", "tpu"], "tpu"),
        (["bench", "linears", "--device", "cuda:99"], "cuda:99"),
        (["bench", "linears", "--rounds", "3"], "--rounds"),
        (["bench", "linears", "--json", "/no/such/folder/r.json"], "/no/such/folder"),
        (["bench", "linears", "--json", "/"], "folder"),
        (["bench", "linears", "--plot", "r.jpg"], "png"),
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
>>>>>>> 2b12b2f (qbe bench speculate)
