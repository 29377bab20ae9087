"""`qbe bench`: every benchmark runs on tiny shapes, its numbers hang together, and a broken peer is told. No speed."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qbe import cli
from qbe.bench import batch, decode, linears, prefill, switch
from qbe.bench.command import BENCHMARKS, measure
from qbe.bench.engines import Work, blueprint_at, core_of, peers_of
from qbe.bench.linear_peers import BF16, LinearPeer, PreparedPeers
from qbe.bench.machine import Limits, hardware, measure_limits
from qbe.bench.measure import Failed, Measured, take_turns
from qbe.bench.passes import WHOLE, check, one_pass
from qbe.bench.plot import draw
from qbe.bench.report import Report, Row
from qbe.bench.weights import Part, Token, random_weights
from qbe.errors import QBEError

LIMITS = Limits(bandwidth=1e9, flops=1e10)
TOKEN = Token("tiny", 2, (Part("a", 64, 128, 2), Part("b", 96, 256)), Part("head", 256, 128))
THIN = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
LINEARS = linears.Sizes(TOKEN, rows=(1, 5), rounds=3)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model's folder; its nested store goes into a cache of the test's own."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    return tiny_folder


def described(rows: list[Row], device: torch.device) -> list[dict[str, Any]]:
    """The rows as they come back from strict JSON, each checked."""
    report = Report("test", hardware(device, LIMITS), {}, rows)
    found = json.loads(json.dumps(report.describe(), allow_nan=False))
    assert {"hardware", "conditions", "rows"} <= set(found)
    assert found["rows"]
    for row in found["rows"]:
        assert {"what", "shape", "bits", "ours", "peer", "peer_value", "ratio", "limit_ratio", "unit", "spread"} <= set(
            row
        )
        if row["peer_value"] is None:
            assert row["ratio"] is None
            assert row["limit_ratio"] is None
            assert row["note"], "a missing peer says why"
        if row["ours"] is not None:
            assert row["spread"][0] <= row["ours"] <= row["spread"][1]
            assert row["rounds"] >= 1
        if row["ours"] and row["peer_value"]:
            higher = row["unit"] == "tokens/s"
            ratio = row["ours"] / row["peer_value"] if higher else row["peer_value"] / row["ours"]
            assert row["ratio"] == pytest.approx(ratio)
            if row["limit"] is not None:
                limit = row["limit"] / row["peer_value"] if higher else row["peer_value"] / row["limit"]
                assert row["limit_ratio"] == pytest.approx(limit)
    return found["rows"]


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
    assert all("added" in r for r in rows[:-1])
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


def test_systems_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def system(name: str, values: list[float]) -> Any:
        def sample() -> Mapping[str, float]:
            calls.append(name)
            return {"x": values[calls.count(name) - 1]}

        return sample

    ticks: list[int] = []
    ours, theirs = take_turns(
        {"o": system("o", [99, 1, 2, 3])}, {"p": system("p", [99, 4, 8, 6])}, 3, lambda: ticks.append(1)
    )
    assert calls == ["o", "p", "p", "o", "o", "p", "p", "o"]
    assert ours["o"]["x"] == Measured(2, 1.5, 2.5, 3)
    found = theirs["p"]
    assert not isinstance(found, Failed)
    assert found["x"].median == 6
    assert len(ticks) == 4


def test_time_runs_out_after_three_rounds() -> None:
    ours, _ = take_turns({"o": lambda: {"x": 1.0}}, {}, 50, max_seconds=0)
    assert ours["o"]["x"].rounds == 3


def test_a_broken_peer_is_reported_and_a_failure_of_ours_is_raised() -> None:
    turns = iter(range(99))

    def breaks_later() -> Mapping[str, float]:
        if next(turns) == 2:
            raise RuntimeError("out of\nluck")
        return {"x": 1.0}

    def broken() -> Mapping[str, float]:
        raise ValueError("never worked")

    good = {"o": lambda: {"x": 1.0}}
    ours, theirs = take_turns(good, {"later": breaks_later, "never": broken, "gone": Failed("not installed")}, 4)
    assert ours["o"]["x"].rounds == 4
    assert theirs["later"] == Failed("RuntimeError: out of")
    assert theirs["never"] == Failed("ValueError: never worked")
    assert theirs["gone"] == Failed("not installed")
    with pytest.raises(ValueError, match="never worked"):
        take_turns({"o": broken}, {}, 1)


def test_peers_that_cannot_be_made_or_compute_something_else_are_rows() -> None:
    def unbuildable(weights: list[torch.Tensor]) -> Any:
        raise ImportError("no such library")

    def wrong(weights: list[torch.Tensor]) -> Any:
        return lambda x, i: torch.zeros(x.shape[0], weights[i].shape[0], dtype=x.dtype)

    peers = (BF16, LinearPeer("absent", (4,), unbuildable), LinearPeer("wrong", (4,), wrong, "its note"))
    rows = described(linears.run(CPU, LIMITS, replace(LINEARS, rows=(1,), widths=(4,), peers=peers)), CPU)
    notes = {r["peer"]: r["note"] for r in rows}
    assert notes["absent"] == "ImportError: no such library"
    assert "not the same work" in notes["wrong"]
    assert "its note" in notes["wrong"]
    assert {r["peer"]: r["peer_value"] is None for r in rows} == {"F.linear bf16": False, "absent": True, "wrong": True}


def test_work_is_compared_with_the_16_bit_result() -> None:
    y = torch.randn(3, 40)
    check(y * 1.1, y)
    for other in (torch.randn(3, 40), y * float("nan"), -y):
        with pytest.raises(RuntimeError, match="not the same work"):
            check(other, y)


def test_a_pass_runs_every_layer_in_order_and_counts_its_time() -> None:
    seen: list[tuple[str, int]] = []
    sample = one_pass(TOKEN, lambda part, i: seen.append((part.name, i)), CPU)
    found = sample()
    assert seen == [(p.name, i) for p, i in TOKEN.order()]
    assert found[WHOLE] == pytest.approx(sum(found[p.name] * TOKEN.copies(p) for p in TOKEN.all_parts))


def test_inputs_of_a_peer_have_its_dtype() -> None:
    seen = []

    def prepare(weights: list[torch.Tensor]) -> Any:
        def run(x: torch.Tensor, i: int) -> torch.Tensor:
            seen.append(x.dtype)
            return torch.nn.functional.linear(x.bfloat16(), weights[i])

        return run

    prepared = PreparedPeers((LinearPeer("p", (4,), prepare, dtype=torch.float32),), random_weights(TOKEN, CPU, ()))
    sample = prepared.samples(linears.random_inputs(TOKEN, 1, CPU))["p"]
    assert not isinstance(sample, Failed)
    assert sample()[WHOLE] > 0
    assert set(seen) == {torch.float32}


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
