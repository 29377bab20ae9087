"""How benchmarks measure: systems take turns, a broken peer is told, and all do the same work."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # noqa: F401  (before torch: it sets how torch's threads wait)

import gc
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench_samples import CPU, LIMITS, LINEARS, TOKEN, described
from qbe.bench import linears
from qbe.bench.linear_peers import BF16, LinearPeer, PreparedPeers
from qbe.bench.measure import Failed, Timing, Sample, take_turns
from qbe.bench.passes import WHOLE, check, one_pass, whole
from qbe.bench.weights import random_weights


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
    assert ours["o"]["x"] == Timing(2, 1.5, 2.5, 3)
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


def test_a_sample_keeps_what_its_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses; nobody else may hold the tensors."""

    class Graph:
        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    device = torch.device("cuda")

    def samples() -> list[Sample]:
        read = torch.ones(3)
        seen.append(weakref.ref(read))
        return [whole(read.sum, device), one_pass(TOKEN, lambda part, i: read.sum(), device)]

    seen: list[weakref.ref[torch.Tensor]] = []
    for kept in (0, 1):
        sample = samples()[kept]
        gc.collect()
        assert seen.pop()() is not None
        del sample
