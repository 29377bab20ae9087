"""How much of a store is loaded: with or without 16-bit originals, and up to which bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_process import qbe
from qbe import Budget, Engine, QBEError
from qbe.engine.memory import predicted
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.models import folder_weights
from qbe.store.nested_linears import nested_linears
from qbe.store.placement import place_of
from server_running import running, tiny_engine

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def test_a_gpu_has_none_unless_asked() -> None:
    assert place_of(None, torch.device("cuda")) == "none"
    assert place_of(None, CPU) == "host"
    with pytest.raises(QBEError, match="none, host or device, not 'disk'"):
        place_of("disk", CPU)


def test_without_originals_nothing_of_them_is_read(nested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    own = folder_weights.LazySafetensor.to

    def noting(self: folder_weights.LazySafetensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        read.append(self.name)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(folder_weights.LazySafetensor, "to", noting)
    with Engine(nested, device="cpu", originals="none", records=False) as engine:
        sites = {f"{s.name}.weight" for s in engine.table.nested}
        assert engine.table.gears() == (4, 6, 8)
        assert all(w.original is None for _, _, w in nested_linears(engine.model))
        answer = engine.generate("the cat", GREEDY, budget=Budget(bits=4))
        with pytest.raises(QBEError, match=r"16 bits needs weights that are not loaded.*at most 8.*--originals"):
            engine.generate("the cat", GREEDY, budget=Budget(bits=16))
        assert engine.generate("the cat", GREEDY, budget=Budget(tier="priority")).text
    assert read
    assert not sites & set(read)
    with Engine(nested, device="cpu", records=False) as engine:
        assert engine.table.gears() == (4, 6, 8, 16)
        assert engine.generate("the cat", GREEDY, budget=Budget(bits=4)).token_ids == answer.token_ids


def test_upper_slices_are_left_out(nested: str) -> None:
    with Engine(nested, device="cpu", most_bits=4, originals="none", records=False) as engine:
        assert engine.table.gears() == (4,)
        assert engine.table.nested
        result = engine.generate("the cat", GREEDY)
        assert result.average_weight_bits == 4
        small = engine.memory.weights
        with pytest.raises(QBEError, match=r"6 bits needs weights that are not loaded.*--most-bits"):
            engine.generate("the cat", GREEDY, budget=Budget(bits=6))
        assert set(engine.explain("the cat").blueprint.weight_bits) == {4}
    with Engine(nested, device="cpu", most_bits=6, records=False) as engine:
        assert engine.table.gears() == (4, 6, 16)
    with Engine(nested, device="cpu", originals="none", records=False) as engine:
        assert engine.memory.weights > small
    with pytest.raises(QBEError, match="most_bits is 5, but the store has 4, 6, 8"):
        Engine(nested, device="cpu", most_bits=5, records=False)


def test_the_command_says_so_in_one_line(nested: str, home: Path) -> None:
    options = "--model", nested, "--originals", "none", "--device", "cpu", "--max-tokens", "4"
    done = qbe("generate", "the cat", "--bits", "16", *options, home=home)
    assert done.returncode == 2
    assert b"needs weights that are not loaded" in done.stderr
    assert done.stderr.count(b"\n") == 1
    done = qbe("generate", "the cat", "--most-bits", "6", "--json", *options, home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["usage"]["average_weight_bits"] <= 6
    done = qbe("generate", "the cat", "--model", nested, "--originals", "disk", home=home)
    assert done.returncode == 2
    assert b"none, host or device" in done.stderr


def test_a_server_says_so_with_400_and_what_memory_it_takes() -> None:
    with running(lambda: tiny_engine(originals="none")) as server:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 4}
        assert server.post("completions", {**body, "qbe": {"bits": 8}}).status_code == 200
        for bounds in ({"bits": 16}, {"min_bits": 12}):
            refused = server.post("completions", {**body, "qbe": bounds})
            assert refused.status_code == 400
            assert "needs weights that are not loaded" in refused.json()["error"]["message"]
        memory = server.engine.memory
        for use, size in (("weights", memory.weights), ("originals", 0), ("kv", memory.kv)):
            assert server.metric(f'qbe:memory_bytes{{model_name="tiny",use="{use}"}}') == size


@pytest.mark.parametrize(("originals", "most_bits"), [(None, None), ("none", None), ("none", 4)])
def test_memory_is_predicted_from_the_configuration(nested: str, originals: str | None, most_bits: int | None) -> None:
    guessed = predicted(Path(nested), CPU, originals=originals, most_bits=most_bits)
    with Engine(nested, device="cpu", originals=originals, most_bits=most_bits, records=False) as engine:
        memory = engine.memory
    assert guessed.weights == pytest.approx(memory.weights, rel=0.05)
    assert guessed.originals == pytest.approx(memory.originals, rel=0.05)
    assert guessed.kv == pytest.approx(memory.kv, rel=0.05)


def test_info_predicts_it(nested: str, home: Path) -> None:
    done = qbe("info", "--model", nested, "--device", "cpu", "--originals", "none", "--json", home=home)
    assert done.returncode == 0, done.stderr.decode()
    memory = json.loads(done.stdout)["memory"]
    assert memory["originals"] == 0
    assert memory["total"] >= memory["weights"] + memory["kv"] > 0
