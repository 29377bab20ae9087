"""Use of experts is counted while serving, and taken over into the store: command line, HTTP, Python."""

from __future__ import annotations

import json
import sqlite3
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_process import qbe, refused
from conftest import byte_tokenizer, tiny_llama
from moe_models import tiny_moe, tiny_moe_folder
from qbe import Budget, Engine, Request, SamplingParams
from qbe.errors import QBEError
from qbe.learning.served_use import aged, take_over
from qbe.records import RecordStore, RecordWriter, ServedUse
from qbe.store import expert_use, sensitivity_table
from qbe.store.checkpoint import identity, read_manifest
from qbe.store.expert_counter import ExpertCounter
from qbe.store.expert_use import ExpertUse, counting, moved, scaled, top_tenth
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.store.prepare import prepare
from qbe.store.quantise import quantise_to
from qbe.store.sensitivity import Sensitivity
from server_running import running

TEXT = "The house stood at the end of the lane, and nobody went there for 1 234 days. " * 16


def answer(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def made(home: Path) -> Path:
    """A store that nobody has served yet."""
    source = tiny_moe_folder(home / "source", "qwen3_moe")
    done = qbe("quantize", str(source), "-o", str(home / "made"), home=home)
    assert done.returncode == 0, done.stderr.decode()
    return home / "made"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy of it: its identity is the same."""
    import shutil

    return Path(shutil.copytree(made, tmp_path / "store"))


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoehybrid"])
def test_steps_count_every_token_of_prompts_and_answers(family: str) -> None:
    model = tiny_moe(family)
    with Engine(model, tokenizer=byte_tokenizer(), policy="uniform", records=False, max_sequences=4) as engine:
        assert engine.expert_use is None
        requests = [Request(prompt, answer(5), Budget(bits=8)) for prompt in ("The house", "x", "stood at the end")]
        with counting(engine.model) as watched:
            engine.generate_batch(requests)
        assert engine.core.plan.use is not None
        use = engine.core.plan.use.read()
        assert engine.expert_use is not None
    assert use.tokens == sum(watched.chosen["model.layers.0." + name].sum() for name in _experts(watched)) / 2
    assert use.chosen.keys() == watched.chosen.keys()
    assert all((use.chosen[layer] == watched.chosen[layer]).all() for layer in use.chosen)


def _experts(use: ExpertUse) -> list[str]:
    return [name.removeprefix("model.layers.0.") for name in use.chosen if name.startswith("model.layers.0.")]


def test_rows_that_are_nobodys_do_not_count_in_steps_of_fixed_shapes() -> None:
    model = tiny_moe("mixtral")
    nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    counter = ExpertCounter(model, torch.device("cpu"))
    tokens = torch.arange(6)[None]
    with counting(model) as wanted:
        model(input_ids=tokens[:, :1], use_cache=False)
    counter.begin(rows=8)
    counter.keep(True)
    model(input_ids=tokens, use_cache=False)  # a mixture's choice of a token's first layer needs no other token
    counter.count(1)
    first = next(iter(wanted.chosen))
    assert counter.tokens == 1
    assert (counter.read().chosen[first] == wanted.chosen[first]).all()
    counter.keep(False)
    model(input_ids=tokens, use_cache=False)
    counter.count(6)
    assert all(c.sum() == 2 * 7 for c in counter.read().chosen.values())


def test_the_scattered_tokens_of_llama4_are_counted_once() -> None:
    model = tiny_moe("llama4")
    nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    counter = ExpertCounter(model, torch.device("cpu"))
    model(input_ids=torch.arange(5)[None], use_cache=False)
    counter.begin(rows=8)
    for keeps in (False, True):
        counter.keep(keeps)
        model(input_ids=torch.arange(5)[None], use_cache=False)
        counter.count(5)
    assert all(c.sum() == 10 for c in counter.read().chosen.values())


def test_the_command_line_takes_over_what_it_has_served(store: Path, tmp_path: Path) -> None:
    assert "count no experts of" in refused("quantize", "--update", str(store), "--from-records", home=tmp_path)
    before = prepare(store, device=torch.device("cpu"), progress=False).table
    done = qbe("generate", "z" * 20, "--model", str(store), "--bits", "8", "--max-tokens", "4", home=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    done = qbe("quantize", "--update", str(store), "--from-records", "--json", home=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    assert told["served_tokens"] >= 20
    assert told["days"] == 1
    assert 0 < told["moved"] < 1
    after = prepare(store, device=torch.device("cpu"), progress=False).table
    assert before.digest != after.digest  # so that no cached blueprint is found again
    for old, new in zip(before.nested, after.nested, strict=True):
        assert (old.use != new.use) <= (old.expert is not None)
        times = new.use / old.use
        assert new.sensitivity[4] == pytest.approx(times * old.sensitivity[4])
        assert new.activation_sensitivity.get(8, 0) == pytest.approx(times * old.activation_sensitivity.get(8, 0))
    assert any(old.use != new.use for old, new in zip(before.nested, after.nested, strict=True))
    again = qbe("quantize", "--update", str(store), "--from-records", home=tmp_path)
    line = again.stdout.decode().strip()
    assert "\n" not in line
    assert f"{told['served_tokens']} served tokens (1 day" in line
    assert line.endswith("0.0% of the choices moved")


def test_updates_that_make_no_sense_are_refused_in_one_line(store: Path, tmp_path: Path, home: Path) -> None:
    update = ("quantize", "--update", str(store))
    assert "--from-records" in refused(*update, home=tmp_path)
    assert "leave out" in refused(*update, "--from-records", "-o", str(tmp_path / "x"), home=tmp_path)
    assert "--update FOLDER" in refused("quantize", "--from-records", home=tmp_path)
    assert "MODEL -o FOLDER" in refused("quantize", str(store), home=tmp_path)
    source = home / "source"
    assert "not a folder" in refused("quantize", "--update", str(source), "--from-records", home=tmp_path)
    dense = tmp_path / "dense"
    tiny_llama().save_pretrained(dense)
    byte_tokenizer().save_pretrained(dense)
    quantise_to(
        str(dense), tmp_path / "nested", NestedWeightConfig(), torch.device("cpu"), measure=False, progress=False
    )
    assert "no nested experts" in refused(
        "quantize", "--update", str(tmp_path / "nested"), "--from-records", home=tmp_path
    )


def test_a_server_counts_and_shows_it(store: Path, tmp_path: Path) -> None:
    records = RecordStore(tmp_path / "records.sqlite")

    def make() -> Engine:
        return Engine(str(store), records=RecordWriter(records), policy="static", max_sequences=4)

    with running(make) as server:
        assert "qbe:expert_top_tenth{" not in server.http.get("/metrics").text
        body = {"prompt": "The house", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "qbe": {"bits": 8}}
        assert server.post("completions", body).status_code == 200
        assert server.metric("qbe:expert_tokens_total{") == 9 + 5
        assert 0.25 <= server.metric("qbe:expert_top_tenth{") <= 0.5
        assert 0 <= server.metric("qbe:expert_use_moved{") < 1
        assert server.post("completions", body | {"n": 3, "temperature": 1}).status_code == 200
    (day,) = records.use_of(identity(read_manifest(store)))
    assert day.tokens > 9 + 5
    assert all(sum(counts) == 2 * day.tokens for counts in day.chosen.values())
    assert take_over(store, records).served_tokens == day.tokens


def test_days_add_up_and_older_ones_count_less(tmp_path: Path) -> None:
    records = RecordStore(tmp_path / "records.sqlite")
    old, new = date(2026, 3, 2), date(2026, 3, 9)
    for day, counts in ((old, (8, 0)), (new, (1, 2)), (new, (0, 1)), (old, (0, 8))):
        records.add_use(ServedUse("a", sum(counts), {"l.experts": counts}, day))
    records.add_use(ServedUse("b", 1, {"l.experts": (1, 0)}, new))
    days = RecordStore(records.path).use_of("a")
    assert [(d.day, d.tokens, dict(d.chosen)) for d in days] == [
        (old, 16, {"l.experts": (8, 8)}), (new, 4, {"l.experts": (1, 3)}),
    ]  # fmt: skip
    served = aged(days)
    assert served.tokens == 8 + 4
    assert served.chosen["l.experts"].tolist() == [5.0, 7.0]
    with sqlite3.connect(records.path) as db:
        db.execute("UPDATE expert_use SET chosen = '[' WHERE store = 'a'")
    db.close()
    with pytest.raises(QBEError, match="damaged"):
        RecordStore(records.path).use_of("a")


def test_records_of_an_older_version_have_no_counts_and_get_the_table(tmp_path: Path) -> None:
    records = RecordStore(tmp_path / "records.sqlite")
    records.add_use(ServedUse("a", 1, {"l": (1,)}, date(2026, 3, 2)))
    records.close()
    with sqlite3.connect(records.path) as db:
        db.execute("DROP TABLE expert_use")
        db.execute("PRAGMA user_version = 7")
    db.close()
    assert RecordStore(records.path).use_of("a") == []


def test_experts_of_another_shape_are_refused(store: Path, tmp_path: Path) -> None:
    records = RecordStore(tmp_path / "records.sqlite")
    records.add_use(ServedUse(identity(read_manifest(store)), 1, {"model.layers.0.mlp.experts": (1,)}, date.today()))
    with pytest.raises(QBEError, match="other experts"):
        take_over(store, records)


def test_sensitivities_follow_use_and_what_is_no_experts_stays() -> None:
    before = ExpertUse(100, {"l.experts": np.array([50.0, 50.0])})
    now = before + ExpertUse(300, {"l.experts": np.array([0.0, 300.0])})
    assert now.tokens == 400
    measured = Sensitivity(
        {"l.experts.down_proj.0": {4: 0.2}, "l.experts.down_proj.1": {4: 0.2}, "l.q_proj": {4: 0.2}},
        {"l.experts.down_proj.1": {8: 0.1}},
    )
    found = scaled(measured, before, now)
    assert found.weights["l.q_proj"] == {4: 0.2}
    assert found.weights["l.experts.down_proj.0"][4] == pytest.approx(0.05, rel=0.01)
    assert found.weights["l.experts.down_proj.1"][4] == pytest.approx(0.35, rel=0.01)
    assert found.activations["l.experts.down_proj.1"][8] == pytest.approx(0.175, rel=0.01)
    assert moved(now, {"l.experts": before.shares("l.experts")}) == pytest.approx(0.375, rel=0.01)
    assert top_tenth(now) == pytest.approx(350 / 400)


def test_a_store_that_was_updated_keeps_what_its_text_said(store: Path) -> None:
    text = expert_use.read(store)
    assert text is not None
    assert expert_use.read_served(store) is None
    served = ExpertUse(7, {layer: np.ones(len(counts)) for layer, counts in text.chosen.items()})
    expert_use.write(store, text, expert_use.about(store), served)
    again, back = expert_use.read(store), expert_use.read_served(store)
    assert again is not None
    assert back is not None
    assert (again.tokens, back.tokens) == (text.tokens, 7)
    assert sensitivity_table.estimated(store)
    raw = json.loads((store / expert_use.NAME).read_text())
    raw["served"]["chosen"] = {"other": [1]}
    (store / expert_use.NAME).write_text(json.dumps(raw))
    with pytest.raises(QBEError, match="damaged"):
        expert_use.read(store)
