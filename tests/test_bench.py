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

from conftest import byte_tokenizer
from bench_samples import CPU, LIMITS, LINEARS, THIN, TOKEN, described
from qbe.bench import batch, decode, engine, experts, linears, prefill, switch
from qbe.bench.engines import DecodeRun, blueprint_at, core_of, peers_of
from qbe.bench.expert_layers import ExpertShape
from qbe.bench.linear_peers import BF16
from qbe.bench.machine import hardware, measure_limits
from qbe.bench.measure import Failed
from qbe.bench.passes import WHOLE
from qbe.bench.weights import random_weights
from qbe.hardware import HardwareProfile
from qbe.kernels.reference.activations import precision_word
from qbe.store.nested_tensor import NestedTensor


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


def test_rows_that_share_are_measured_where_they_have_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    depends = [m for m in (1, 4, 5, 8, 16, 17, 256) if linears.kernel_depends_on_company(m, gpu)]
    assert depends == [5, 8, 16]
    assert not linears.kernel_depends_on_company(8, CPU)
    monkeypatch.setattr(linears, "kernel_depends_on_company", lambda rows, device: rows == 5)
    exact: list[bool] = []
    plain = linears.call

    def spy(x: torch.Tensor, weight: NestedTensor, bits: torch.Tensor) -> torch.Tensor:
        exact.append(weight.batch_invariant)
        return plain(x, weight, bits)

    monkeypatch.setattr(linears, "call", spy)
    rows = described(linears.run(CPU, LIMITS, replace(LINEARS, widths=(4,), peers=(BF16,))), CPU)
    assert set(exact) == {True, False}
    assert {r["shape"] for r in rows if r["what"] == "a"} == {
        "64x128, M 1, group 64", "64x128, M 5, group 64", "64x128, M 5, group 64, shared rows"
    }  # fmt: skip


def test_experts(device: torch.device) -> None:
    shape = ExpertShape("tiny", 4, 2, 64, 128, copies=2)
    rows = described(experts.run(device, LIMITS, experts.ExpertSizes((shape,), tokens=(1, 3), rounds=3)), device)
    assert {r["bits"] for r in rows} == {4, 4.5, 6, 8, "4+6+8", 16}
    assert {r["peer"] for r in rows if r["bits"] == 4} == {experts.LOOP, experts.GROUPED, experts.OWN_16}
    assert all(r["peer_value"] for r in rows if r["peer"] != experts.GROUPED)
    # two experts of one token: weights at 4 bits, four planes of their scales, a row of bfloat16 in and out
    weights = 3 * 64 * 128
    moved = 2 * (weights / 2 + 4 * weights / 64) + 2 * 2 * 64
    found = next(r for r in rows if r["bits"] == 4 and "M 1," in r["shape"])
    assert found["limit"] == pytest.approx(max(moved / LIMITS.bandwidth, 2 * 2 * weights / LIMITS.flops) * 1e3)


def test_batch(device: torch.device) -> None:
    rows = described(batch.run(device, LIMITS, batch.BatchSizes(TOKEN, rows=(5,), rounds=3)), device)
    assert {r["bits"] for r in rows} == {"4+6+8", "1x8, 4x4"}
    assert {r["peer"] for r in rows} == {"all rows at 8", "a launch per precision"}
    assert all(r["peer_value"] for r in rows)


def test_engine(device: torch.device) -> None:
    """Each mix with each row's own bits and with shared ones, which changes nothing for a row that is alone."""
    sizes = engine.EngineSizes(THIN, (1, 3), mixes=((4, 8), (16, 6)), prompt=3, steps=2, rounds=3)
    rows = described(engine.run(device, LIMITS, sizes), device)
    decoding = [r for r in rows if r["what"] == "decode"]
    found = [(r["shape"].partition("batch ")[2], r["bits"]) for r in decoding]
    mixed = [(f"3, {kind}", bits) for kind in ("shared", "exact") for bits in ("4+8", "6+16")]
    assert found == [("1", 4), ("1", 8), ("3", 4), ("3", 8), *mixed]
    assert all(r["peer"] == decode.SAME and r["peer_value"] for r in decoding)
    assert len({r["limit"] for r in decoding if r["bits"] in (8, "4+8") and "batch 3" in r["shape"]}) == 1
    assert [r["unit"] for r in rows[len(decoding) :]] == ["MB", "MB"]
    assert 0 < rows[-2]["ours"] < rows[-1]["ours"]
    assert "weights" in rows[-1]["note"]


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
    sizes = decode.DecodeSizes(folder, averages=(4, 5, 16), prompt=3, steps=3, rounds=3)
    rows = described(decode.run(CPU, LIMITS, sizes), CPU)
    assert sorted({r["bits"] for r in rows}) == [4, pytest.approx(5, abs=0.2), 16]
    by_peer = {p: [r for r in rows if r["peer"] == p] for p in (decode.SAME, "transformers", "llama.cpp")}
    assert [len(by_peer[p]) for p in by_peer] == [2 * 2, 2 * 3, 2 * 3]  # compiled and not
    assert all(r["peer_value"] for r in (*by_peer[decode.SAME], *by_peer["transformers"]))
    assert all(r["peer_value"] is None and "llama" in r["note"] for r in by_peer["llama.cpp"])


def test_decode_of_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    """One of recurrent layers has no lines for steps that are compiled."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    Mamba2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "mamba")
    byte_tokenizer().save_pretrained(tmp_path / "mamba")
    sizes = decode.DecodeSizes(tmp_path / "mamba", averages=(8, 16), prompt=3, steps=3, rounds=3)
    rows = described(decode.run(CPU, LIMITS, sizes), CPU)
    assert {r["shape"].split(", ", 1)[-1] for r in rows} == {"batch 1"}
    assert len([r for r in rows if r["peer"] == decode.SAME]) == 1


def test_decode_of_a_random_model(device: torch.device) -> None:
    rows = described(decode.run(device, LIMITS, decode.DecodeSizes(THIN, (4, 16), prompt=3, steps=3, rounds=3)), device)
    cases = ("batch 1", "batch 1, compiled")
    assert [(r["shape"].split(", ", 2)[-1], r["bits"], r["peer"]) for r in rows] == [(c, 4, decode.SAME) for c in cases]
    assert rows[0]["peer_value"]


def test_prefill_of_a_model_and_of_linears(folder: Path, device: torch.device) -> None:
    if device.type == "cpu":
        rows = described(prefill.run(CPU, LIMITS, prefill.PrefillSizes(folder, 20, (4, 16), rounds=3)), CPU)
        assert {(r["bits"], r["peer"]) for r in rows} == {
            (b, p) for b in (4, 16) for p in ("transformers", "llama.cpp")
        }
        assert all(r["unit"] == "tokens/s" for r in rows)
    alone = replace(prefill.sizes_for(device), linears=linears.LinearSizes(TOKEN, (40,), (4, 8, 16), rounds=3))
    rows = described(prefill.run(device, LIMITS, alone), device)
    assert {r["bits"] for r in rows} == {4, 8, 16}
    assert not any("one prompt" in r["shape"] for r in rows)
    long = linears.LinearSizes(TOKEN, (256,), (4, 16), rounds=3, prompts=(8, 16))
    rows = described(prefill.run(device, LIMITS, replace(alone, linears=long)), device)
    shown = {(r["bits"], r["shape"].partition("one prompt, ")[2]) for r in rows}
    assert shown == {(b, kind) for b in (4, 16) for kind in ("", "8-bit activations", "16-bit activations")}


def test_prompts_are_timed_in_the_devices_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every site, whatever a model's sites bear; and only there."""
    seen = []
    plain_call = linears.call

    def spy(x: torch.Tensor, weight: Any, bits: torch.Tensor) -> torch.Tensor:
        seen.append((weight.uniform, weight.native))
        return plain_call(x, weight, bits)

    monkeypatch.setattr(linears, "call", spy)
    monkeypatch.setattr(linears, "detect", lambda device: HardwareProfile("cuda:0", "made up", 1, 1, (9, 0)))
    weights = random_weights(TOKEN, CPU, (64,))
    linears.prompt(weights, linears.random_inputs(TOKEN, 256, CPU), precision_word(4, 8), 64)()
    assert set(seen) == {(precision_word(4, 8), torch.float8_e4m3fn)}
    assert not any(w.native or w.uniform for of in weights.nested[64].values() for w in of)


def test_switch(device: torch.device) -> None:
    rows = described(switch.run(device, LIMITS, switch.SwitchSizes(THIN, (1, 3), writes=3, steps=2, rounds=3)), device)
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
    peers = peers_of(folder, CPU, DecodeRun([1, 2, 3], 2), False)
    assert isinstance(peers["llama.cpp"], Failed)
    running = peers["transformers"]
    assert not isinstance(running, Failed)
    assert set(running()) == {"prefill", "step"}
