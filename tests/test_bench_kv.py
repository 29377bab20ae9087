"""`qbe bench kv` on tiny shapes: pages hold what their case says, limits are bytes, short memory is told. No speed."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qbe import QBEError, cli
from qbe.bench import kv
from qbe.bench.kv_attention import SDPA, SDPA_GROUPED, Decode, Quantise, halved
from qbe.bench.kv_cases import Cases, choices, mixture
from qbe.bench.machine import Roofline
from qbe.format.kv_blocks import KV_BITS, PAGE_SIZE, head_layout
from qbe.kvcache.pages import KVShape
from bench_samples import CPU, LIMITS, described

SHAPE = KVShape(3, 32, 16)
SIZES = kv.KVSizes(6, SHAPE, 5 * PAGE_SIZE, (1, 4), 2, 2 * PAGE_SIZE, rounds=3, model=None, dtype=torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("places", [1, 2, 3, 4, 8, 63, 511])
@pytest.mark.parametrize("average", [8, 4])
def test_mixtures_have_their_average_and_are_none(average: int, places: int) -> None:
    found = mixture(average, places)
    if found is None:
        assert places <= 2
        return
    assert len(found) == places
    assert sum(found) == average * places
    assert set(found) <= set(KV_BITS)
    assert len(set(found)) > 1
    if places >= 8:
        assert len(set(found)) == 4 if places > 8 or average == 8 else 3


def test_choices_are_uniform_and_mixed_over_pages_heads_and_sequences() -> None:
    found = choices(4, 3, 7, (8, 4))
    assert list(found)[:4] == ["16", "8", "4", "2"]
    assert set(found) >= {f"{what}, {b}" for what in ("pages", "heads", "sequences") for b in (8, 4)}
    for name, rows in found.items():
        bits = [b for row in rows for page in row for b in (page if isinstance(page, tuple) else (page,))]
        assert sum(bits) == int(name.rpartition(" ")[2]) * len(bits)
        assert (len(rows), {len(r) for r in rows}) == (4, {7})
    assert found["pages, 8"][0] != found["pages, 8"][1]
    assert not any("sequences" in name for name in choices(1, 3, 7, (8, 4)))


def test_pages_have_the_bits_and_the_numbers_of_their_case(device: torch.device) -> None:
    cases = Cases(2, SHAPE, 4, 5 * PAGE_SIZE, (8,), torch.bfloat16, device)
    assert {p.format.number for p in cases.found["16"].pages} == {0}
    wanted = choices(4, 3, 4, (8,))
    for name, case in cases.found.items():
        assert case.block_tables.shape == (4, 5)
        assert (case.block_tables[:, -1] == cases.full[:, -1]).all(), "the last page is open"
        bits = [b if isinstance(b, tuple) else (b,) * 3 for b in wanted[name][0]]
        assert sorted(p.format.bits[1] for p in case.pages) == sorted(bits)
        formats = [p.format.number for p in case.pages]
        assert formats == sorted(formats), "as decode steps read them"
    full = cases.pool.read(1, cases.full[2])
    errors = {}
    for bits in ("8", "4", "2"):
        found = cases.pool.read(1, cases.found[bits].block_tables[2])
        errors[bits] = max(float((a - b).abs().max()) for a, b in zip(found, full, strict=True))
    assert 0 < errors["8"] < errors["4"] < errors["2"] < 3
    assert 0.9 < full[0].float().std() < 1.1
    size = sum(cases.found["4"].pages[0].format.nbytes for _ in range(4 * 4)) + 4 * cases.pool.page_bytes
    assert cases.found["4"].nbytes == size == 16 * 2 * 3 * head_layout(4, 32, 16, 2).nbytes + 4 * cases.pool.page_bytes


def test_rows(device: torch.device) -> None:
    rows = described(kv.run(device, LIMITS, SIZES), device)
    assert all(r["peer_value"] or (device.type == "cuda" and "SDPA" in r["peer"]) for r in rows)
    decode = [r for r in rows if r["what"] == "decode attention" and "batch 4" in r["shape"]]
    assert Counter((r["bits"], r["peer"]) for r in decode) == Counter(
        [(16, SDPA), (16, SDPA_GROUPED)]
        + [(b, p) for b in (8, 4, 2) for p in (kv.SIXTEEN, SDPA, SDPA_GROUPED)]
    )  # fmt: skip
    assert decode[0]["shape"] == "6/3 heads of 32, 320 tokens, batch 4"
    assert [r["limit"] for r in decode] == sorted((r["limit"] for r in decode), reverse=True)
    mixed = {(r["what"], r["shape"].rpartition(" ")[2], r["peer"]) for r in rows if "mixed" in r["what"]}
    assert {m for m in mixed if m[2] != kv.SIXTEEN} == {
        (f"decode, mixed {what}", batch, f"{b}-bit pages")
        for what, batches in (("pages", "14"), ("heads", "14"), ("sequences", "4"))
        for batch in batches
        for b in (8, 4)
    }
    lengths = [r for r in rows if r["what"] == "decode, lengths"]
    assert {(r["bits"], r["peer"]) for r in lengths} == {(16, "equal lengths"), (4, "equal lengths")}
    assert {r["shape"] for r in lengths} == {"6/3 heads of 32, 257 to 65 tokens, batch 4"}
    assert {r["bits"] for r in rows if r["what"] == "prompt attention"} == {16, 8, 4, 2}
    assert {r["shape"] for r in rows if r["what"] == "prompt attention"} == {"6/3 heads of 32, 128 tokens after 192"}
    assert {r["bits"] for r in rows if r["what"] == "quantising a page"} == {8, 4, 2}


def test_different_lengths_have_as_many_tokens_as_equal_ones() -> None:
    uneven, even = halved(8, 32768)
    assert uneven == [511, 255, 127, 63, 31, 15, 7, 3]
    assert sum(even) == sum(uneven)
    assert max(even) - min(even) == 1
    cases = Cases(1, SHAPE, 4, 9 * PAGE_SIZE, (), torch.bfloat16, CPU)
    decode, pages = Decode(cases, 6), halved(4, 9 * PAGE_SIZE)[0]
    assert pages == [8, 4, 2, 1]
    for name in ("16", "4"):
        decode.ours(cases.found[name], pages)()  # it raises where the first sequence is not what torch says
        decode.ours(cases.found[name], pages[::-1])()


def test_limits_are_bytes_over_bandwidth() -> None:
    cases = Cases(2, SHAPE, 4, 5 * PAGE_SIZE, (), torch.bfloat16, CPU)
    slow = Roofline(bandwidth=1e6, flops=1e15)
    case = cases.found["2"]
    assert Decode(cases, 6).seconds(case, slow) == (case.nbytes + 2 * 4 * 6 * (32 + 16) * 2) / 1e6
    moved = 4 * (cases.pool.page_bytes + 2 * 3 * head_layout(2, 32, 16, 2).nbytes)
    assert Quantise(cases).seconds(case, slow) == moved / 1e6


def test_a_kernel_that_reads_something_else_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = Cases(1, SHAPE, 1, 3 * PAGE_SIZE, (), torch.bfloat16, CPU)
    decode = Decode(cases, 6)
    decode.ours(cases.found["4"])
    monkeypatch.setattr("qbe.bench.kv_attention.paged_attention", lambda query, *_: query[:, :, :16] * 0.1)
    with pytest.raises(RuntimeError, match="not the same work"):
        decode.ours(cases.found["4"])


def test_shorter_contexts_are_measured_and_named_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qbe.bench.kv_cases.free_bytes", lambda device: 3_500_000)
    rows = described(kv.run(CPU, LIMITS, replace(SIZES, batches=(4,), context=16 * PAGE_SIZE)), CPU)
    assert {r["shape"] for r in rows if r["what"] == "decode attention"} == {"6/3 heads of 32, 256 tokens, batch 4"}
    assert all("1024 tokens do not fit into the memory" in r["note"] for r in rows)
    monkeypatch.setattr("qbe.bench.kv_cases.free_bytes", lambda device: 1000)
    with pytest.raises(QBEError, match=r"4 sequences of 320 tokens do not fit into the memory of cpu .* nor do those"):
        kv.fitting(SIZES, 4, CPU)


def test_a_peer_without_memory_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Decode) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")

    monkeypatch.setattr(Decode, "_contiguous", refuse)
    rows = described(kv.run(CPU, LIMITS, replace(SIZES, batches=(1,))), CPU)
    gone = [r for r in rows if r["what"] == "decode attention" and "SDPA" in r["peer"]]
    assert len(gone) == 8
    assert all(r["peer_value"] is None and "allocate memory" in r["note"] for r in gone)


def test_a_model_that_cannot_be_had_does_not_cost_what_was_measured(tmp_path: Path) -> None:
    sizes = replace(SIZES, context=2 * PAGE_SIZE, batches=(1,), rounds=1, model=tmp_path / "none")
    rows = kv.run(CPU, LIMITS, sizes)
    assert [r.what for r in rows].count("KV memory") == 1
    assert rows[-1].ours is None
    assert "none" in rows[-1].describe()["note"]
    assert any(r.ours is not None for r in rows)


def test_memory_of_a_models_pages(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    rows = described(kv.memory(tiny_folder, 256, False), CPU)
    assert [r["bits"] for r in rows] == [16, 8, 4, 2, "default"]
    item = 4  # the model is float32: 2 layers, 2 key heads of 32
    quantised = {b: 2 * 2 * head_layout(b, 32, 32, item).nbytes for b in KV_BITS}
    for row in rows[1:4]:
        assert row["ours"] == (4 * quantised[row["bits"]] + quantised[16]) / 256
        assert row["ratio"] == pytest.approx(quantised[16] * 4 / 256 / row["ours"])
    assert rows[0]["ours"] == 4 * quantised[16] / 256
    assert rows[4]["note"].endswith("the default policy's choice at 256 tokens")


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(kv, "sizes_for", lambda device: replace(SIZES, batches=(1,)))
    monkeypatch.setattr("qbe.bench.machine.measure_limits", lambda device: LIMITS)
    as_json, picture = tmp_path / "r.json", tmp_path / "r.png"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "kv", "--device", "cpu", "--json", str(as_json), "--plot", str(picture)])
    assert not ended.value.code
    assert "16-bit pages" in capsys.readouterr().out
    found = json.loads(as_json.read_text())
    assert found["conditions"]["sizes"]["shape"] == {"kv_heads": 3, "key_dim": 32, "value_dim": 16, "latent": False}
    assert picture.read_bytes().startswith(b"\x89PNG")
