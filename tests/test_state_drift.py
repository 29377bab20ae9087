"""Drift of recurrent states at fewer bits: what is measured, the floors that follow, and what they refuse."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import qbe
from cli_process import qbe as command
from cli_process import refused
from conftest import byte_tokenizer
from engine_models import CONFIGS
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError
from qbe.explain.heatmap import notes
from qbe.kernels.reference.state_rows import dequantise_state, quantise_state, round_state
from qbe.kvcache.pages import pages_for
from qbe.policies.uniform import UniformPolicy
from qbe.store import drift_curve, drift_profile, drift_table
from qbe.store.layerwise import NotLayered
from qbe.store.provenance import check, write_beside
from qbe.store.state_drift import GEARS, Drift, measure
from qbe.tagger import tag
from server_running import running
from test_recurrent_batch import PARAMS

CPU = torch.device("cpu")
FLOORS = {0: 16, 2: 10}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, arguments = CONFIGS[name]
    config = getattr(transformers, kind)(**{**arguments, "vocab_size": 320})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid's checkpoint."""
    path = tmp_path_factory.mktemp("hybrid") / "model"
    model_of("granite-moe-hybrid").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def store(folder: Path, home: Path) -> Path:
    """Its store, written by the command."""
    out = folder.parent / "store"
    done = command("quantize", str(folder), "-o", str(out), home=home)
    assert done.returncode == 0, done.stderr.decode()
    return out


@pytest.fixture(scope="module")
def floored(store: Path) -> Path:
    """The same with floors that a random model has not."""
    folder = Path(shutil.copytree(store, store.parent / "floored"))
    raw = json.loads((folder / drift_table.NAME).read_text())
    for state in raw["states"]:
        state["floor"] = FLOORS[state["layer"]]
    write_beside(folder, drift_table.NAME, json.dumps(raw))
    return folder


@pytest.mark.parametrize("bits", GEARS)
def test_rounding_a_state_is_what_its_bytes_say(bits: int) -> None:
    state = torch.randn(3, 5, 24)
    state[1, 2] = 0
    assert torch.equal(round_state(state, bits, 7), dequantise_state(quantise_state(state, bits, 7), (3, 5, 24), bits))
    state[0, 0, 0] = math.inf
    assert round_state(state, bits, 7)[0, 0].isnan().all()


@pytest.mark.parametrize("name", ["granite-moe-hybrid", "qwen3-next", "mamba"])
def test_it_is_what_an_engine_changes_that_reads_a_token_a_step(name: str) -> None:
    """One layer's state at fewer bits; the oracle is the engine, with that blueprint, token by token."""
    model, tokens = model_of(name), torch.randint(0, 320, (1, 24), generator=torch.Generator().manual_seed(1))
    table = tag(model, name=name)
    found = measure(model, table, tokens, CPU)
    assert [s.name for s in table.states] == list(found)
    with qbe.Engine(
        model, tokenizer=byte_tokenizer(), policy="uniform", device="cpu", records=False, max_sequences=8
    ) as engine:
        last = table.states[-1].layer
        assert last is not None
        asked = [None, *((32,) * last + (bits,) + (32,) * (table.layers - last - 1) for bits in GEARS)]
        logs = teacher_forced(engine, tokens[0].tolist(), asked)
    kl = {bits: (logs[0].exp() * (logs[0] - logs[i])).sum(-1) for i, bits in enumerate(GEARS, 1)}
    drift = found[table.states[-1].name]
    for bits in GEARS[1:]:  # 16 bits are at the limit of float32
        ours = drift.kl[bits][0].double()
        # A number beside an edge of the rounding may fall to its other side, which a few tokens show.
        assert torch.isclose(ours, kl[bits], rtol=0.05, atol=1e-9).double().mean() > 0.7
        assert float(ours.mean()) == pytest.approx(float(kl[bits].mean()), rel=0.1)
        assert ours.mean() > 1e-9
    assert 0 < drift.error[16].mean() < drift.error[10].mean() / 8 < drift.error[8].mean() / 16


def teacher_forced(engine: qbe.Engine, ids: list[int], state_bits: list[Any]) -> torch.Tensor:
    """Log-probabilities float64 [rows, tokens, V], of a sequence for each of these state bits."""
    core, slots = engine.core, engine.core.scheduler.slots
    assert slots is not None
    full = tuple(max(site.gears) for site in core.table.nested)
    rows = []
    for i, bits in enumerate(state_bits):
        blueprint = Blueprint("x", full, (16,) * len(full), (16,) * core.table.layers, state_bits=bits)
        rows.append(Sequence(str(i), ids, qbe.SamplingParams(max_tokens=1), blueprint))
        rows[-1].pages = core.scheduler.allocator.allocate(pages_for(len(ids))) or []
        rows[-1].state_slot = slots.take(blueprint.state_bits)
    found = []
    with torch.inference_mode():
        for at in range(len(ids)):
            for row in rows:
                row.token_ids = row.prompt_ids[: at + 1]
            step = core.runner.step([ScheduledTokens(row, at, 1) for row in rows])
            found.append(step.logits.double().log_softmax(-1))
    return torch.stack(found, 1)


def drift_of(kl: dict[int, torch.Tensor], error: dict[int, float]) -> Drift:
    return Drift(kl, {bits: torch.full_like(kl[bits], e) for bits, e in error.items()})


def test_a_prediction_is_a_power_of_the_position_times_the_margin() -> None:
    at = torch.arange(1, 1025, dtype=torch.float64)
    assert drift_curve.stretch_ends(1024) == (16, 32, 64, 128, 256, 512, 1024)
    assert drift_curve.stretch_ends(5) == (5,)
    for power in (1.0, 1.5, 2.0):
        found = drift_curve.predict(drift_of({8: (1e-9 * at**power).expand(2, -1)}, {8: 0.1}), 4096)
        assert found[8] == pytest.approx(1.5e-9 * 4096**power, rel=0.05)
    for kl in (torch.full((2, 1024), 1e-6), (1e-4 / at).expand(2, -1)):  # grows no slower than independent errors do
        assert drift_curve.growth(kl.double()) == 1
        assert drift_curve.predict(drift_of({8: kl}, {8: 0.1}), 4096)[8] > 1.5 * 4 * float(kl.double().mean())
    assert drift_curve.growth((at**3).expand(2, -1)) == 2
    assert drift_curve.predict(drift_of({8: torch.full((1, 5), 1e-6)}, {8: 0.1}), 25)[8] > 1.5e-6 * 25 / 5
    assert drift_curve.predict(drift_of({8: torch.zeros(1, 5)}, {8: 0.0}), 25)[8] == 0


def test_what_few_tokens_show_is_trusted_less_and_lower_gears_show_more() -> None:
    even, rare = torch.full((1, 1024), 1e-6), torch.zeros(1, 1024)
    rare[0, 700] = float(even.sum())
    one, other = (drift_curve.predict(drift_of({8: kl}, {8: 0.1}), 4096)[8] for kl in (even, rare))
    assert other > 1.5 * one
    three = drift_of({16: even * 1e-8, 10: even * 1e-3, 8: rare}, {16: 1e-4, 10: 0.02, 8: 0.1})
    found = drift_curve.predict(three, 4096)
    assert found == pytest.approx({16: other / 1000, 10: other / 5, 8: other})


def test_a_floor_is_the_lowest_gear_from_which_on_all_are_below_the_bound() -> None:
    for predicted, wanted in (
        ({16: 1e-9, 10: 1e-6, 8: 1e-5}, 8), ({16: 1e-9, 10: 1e-6, 8: 1e-3}, 10), ({16: 1e-9, 10: 1e-3, 8: 1e-6}, 16),
        ({16: 1e-3, 10: 1e-6, 8: 1e-6}, 32), ({16: math.nan, 10: 1e-6, 8: 1e-6}, 32),
    ):  # fmt: skip
        assert drift_curve.floor(predicted, 1e-4) == wanted


def test_quantize_writes_the_profile_and_a_model_without_states_has_none(store: Path, nested: str) -> None:
    found = drift_table.read(store)
    assert found is not None
    assert [s.layer for s in found.states] == [0, 2]
    assert (found.context, found.ends[-1]) == (256, 256)
    assert found.bound == drift_curve.STATE_LOSS / 2
    for state in found.states:
        assert state.floor == drift_curve.floor(state.predicted, found.bound)
        assert state.gears[16].kl[-1] < state.gears[10].kl[-1] < state.gears[8].kl[-1]
    assert not (Path(nested) / drift_table.NAME).exists()
    said = check(store)
    assert said is not None
    assert drift_table.NAME in said["files"]


def test_stores_without_a_profile_or_with_another_version_load_without_floors(
    floored: Path, tmp_path: Path, folder: Path
) -> None:
    old, table = tmp_path / "old", tag(model_of("granite-moe-hybrid"))
    shutil.copytree(floored, old)
    raw = json.loads((old / drift_table.NAME).read_text())
    write_beside(old, drift_table.NAME, json.dumps({**raw, "version": 99}))
    assert drift_table.read(old) is None
    assert drift_table.read(folder) is None
    assert [s.state_floor for s in drift_table.with_floors(table, None).states] == [None, None]
    raw["states"][0]["gears"]["8"]["kl"][0] = math.nan
    for damaged in (json.dumps(raw), "{", json.dumps({"version": 1}), json.dumps({**raw, "states": [{"name": "x"}]})):
        write_beside(old, drift_table.NAME, damaged)
        with pytest.raises(QBEError, match="is damaged"):
            drift_table.read(old)


def test_layers_keep_their_floors_and_who_asks_for_less_than_any_is_refused(floored: Path) -> None:
    with qbe.Engine(floored, device="cpu", records=False) as engine:
        assert [s.state_floor for s in engine.table.states] == [16, 10]

        def bits(**asked: Any) -> tuple[int, ...] | None:
            return engine.generate("hello", PARAMS, budget=Budget(bits=8, **asked)).blueprint.state_bits

        assert bits(state_bits=10) == (16, 10, 10, 10)
        assert bits(state_bits=16) == (16,) * 4
        assert bits() is None
        with pytest.raises(QBEError, match=r"state_bits .* layer 2's with 10 bits .*: ask for 10 or more") as refusal:
            bits(state_bits=8)
        assert "\n" not in str(refusal.value)
        result = engine.generate("hello", PARAMS, budget=Budget(bits=8, state_bits=8, best_effort=True))
        assert result.blueprint.state_bits is None
        assert "layer 2's" in result.ignored["state_bits"]
        told = engine.explain("hello", budget=Budget(state_bits=10))
        assert "recurrent states 10 to 16 bits: those of layers 0 at their floors" in notes(told)


def test_no_policy_goes_below_the_floors(floored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with qbe.Engine(floored, device="cpu", records=False, policy="uniform") as engine:
        plain = UniformPolicy.blueprint

        def low(*args: Any) -> Blueprint:
            return replace(plain(*args), state_bits=(8,) * 4)

        monkeypatch.setattr(UniformPolicy, "blueprint", low)
        assert engine.explain("hello", budget=Budget(bits=6)).blueprint.state_bits == (16, 8, 10, 8)


def test_over_http(floored: Path) -> None:
    with running(lambda: qbe.Engine(floored, device="cpu", records=False)) as server:
        body = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
        found = server.post("completions", {**body, "qbe": {"state_bits": 10}})
        assert found.json()["usage"]["qbe"]["state_bits"] == 10
        refusal = server.post("completions", {**body, "qbe": {"state_bits": 8}})
        assert refusal.status_code == 400
        assert refusal.json()["error"]["param"] == "qbe.state_bits"
        assert "layer 2's with 10 bits" in refusal.json()["error"]["message"]


def test_from_the_command_line(floored: Path, store: Path, nested: str, home: Path, tmp_path: Path) -> None:
    at = ("--model", str(floored), "--max-tokens", "2", "--greedy", "--state-bits")
    assert "layer 2's with 10 bits" in refused("generate", "hi", *at, "8", home=home)
    done = command("generate", "hi", *at, "10", home=home)
    assert b"state 10 to 16 bits" in done.stderr
    picture = tmp_path / "drift.png"
    done = command("explain", "--drift", str(picture), "--model", str(floored), "--json", home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [s["floor"] for s in json.loads(done.stdout)["states"]] == [16, 10]
    with_prompt = ("explain", "hi", "--drift", str(picture), "--model", str(floored), "--json")
    found = json.loads(command(*with_prompt, home=home).stdout)
    assert (found["prompt_tokens"], found["drift"]["context"]) == (2, 256)
    assert "has no profile of its states' drift" in refused("explain", "--drift", str(picture), "--model", nested,
                                                            home=home)  # fmt: skip
    assert "ends in .png" in refused("explain", "--drift", str(tmp_path / "x.svg"), "--model", nested, home=home)
    assert "needs a prompt, or --drift" in refused("explain", "--model", nested, home=home)
    page = str(tmp_path / "x.html")
    assert "are about a prompt" in refused("explain", "--drift", str(picture), "--html", page, "--model", str(store),
                                           home=home)  # fmt: skip


def test_with_a_text_its_windows_are_read(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = model_of("mamba2"), byte_tokenizer()
    text = torch.randint(0, 320, (3, 64), generator=torch.Generator().manual_seed(1))
    found = drift_profile.profile(model, tokenizer, "x", CPU, text, progress=False)
    assert found is not None
    assert found.ends == (16, 32, 64)
    assert found.context == drift_profile.UNLIMITED  # Mamba-2's configuration names none
    assert drift_profile.text_of(model, tokenizer, text).shape == (2, 64)
    assert drift_profile.profile(model_of("llama"), tokenizer, "x", CPU, text, progress=False) is None


def test_a_model_that_is_no_chain_of_layers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlike(*_: Any) -> None:
        raise NotLayered

    monkeypatch.setattr("qbe.store.drift_profile.measure", unlike)
    with pytest.warns(UserWarning, match="they have no floors"):
        assert drift_profile.profile(model_of("mamba2"), byte_tokenizer(), "x", CPU, progress=False) is None
