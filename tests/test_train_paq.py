"""PAQ: labels by perplexity, the router, and the widths that it gives."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import byte_tokenizer, tiny_llama
from qbe import Engine, QBEError, policies
from qbe.analysis.encoder import default_encoder
from qbe.analysis.profile import QueryProfile
from qbe.budget import Budget
from qbe.cli.main import main
from qbe.datasets.items import Form, Item, read_training
from qbe.datasets.results import Results
from qbe.eval.compare import FULL, Setting
from qbe.learning import paq
from qbe.policies import learned
from qbe.policies.paq import THRESHOLDS, _Sample, price

pytest.importorskip("sklearn")
WORDS = ["river", "stone", "window", "garden", "letter", "music", "winter", "animal", "number", "market", "doctor"]


def items(n: int) -> list[Item]:
    draw = np.random.default_rng(0)
    return [Item("text", str(i), Form(" ".join(draw.choice(WORDS, 4)), " ".join(draw.choice(WORDS, 5))))
            for i in range(n)]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("QBE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def engine(cache: Path) -> Iterator[Engine]:
    with Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", records=False) as made:
        yield made


def measured(losses: list[float], tokens: int = 100) -> Any:
    """A query that lost so many nats a token at 4, 6, 8 and 16 bits."""
    settings = [*(Setting("uniform", b) for b in (4, 6, 8)), FULL]
    by = {s: SimpleNamespace(fidelity=SimpleNamespace(tokens=tokens, loss=x * tokens))
          for s, x in zip(settings, losses, strict=True)}  # fmt: skip
    return SimpleNamespace(measured=by)


def test_labels_are_the_smallest_width_within_the_threshold() -> None:
    queries = [measured([3.2, 3.06, 3.0, 3.0]), measured([3.1, 3.0, 3.0, 3.0]), measured([4.0, 4.0, 3.5, 3.0]),
               measured([2.9, 2.9, 2.9, 3.0])]  # fmt: skip
    outcome: Any = SimpleNamespace(queries=queries, settings=[Setting("uniform", b) for b in (4, 6, 8)])
    assert paq.labels(outcome, 1.07).tolist() == [1, 1, 3, 0]  # log 1.07 = 0.068, log 1.13 = 0.122
    assert paq.labels(outcome, 1.13).tolist() == [1, 0, 3, 0]
    assert paq.labels(outcome, 1.21).tolist() == [1, 0, 3, 0]


@pytest.mark.parametrize("there", [(1,), (0, 2), (0, 1, 3)])
def test_the_router_learns_what_can_be_told_apart(there: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    y = np.array([there[i % len(there)] for i in range(90)])
    x = rng.standard_normal((90, 64)) * 0.05
    x[np.arange(90), y] += 1.0
    weight, bias = paq.fit(x, y, 4)
    assert ((x @ weight + bias).argmax(-1) == y).all()
    assert weight.shape == (64, 4)


def test_prices_meet_an_average_over_the_sample() -> None:
    rng = np.random.default_rng(0)
    sample = _Sample(np.log(rng.dirichlet(np.ones(4), 500)))
    widths = np.array([4, 6, 8, 16])
    for bits in (4.0, 4.5, 5.0, 6.0, 9.0):
        chosen = widths[(sample.values - price(sample, (4, 6, 8, 16), bits) * widths).argmax(-1)]
        assert bits - 0.1 <= chosen.mean() <= bits
    with pytest.raises(QBEError, match="lowest width is 4"):
        price(sample, (4, 6, 8, 16), 3.5)


def test_trained_and_served(engine: Engine, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(["tiny"], tmp_path)
    ticks: list[int] = []
    found = paq.train(engine, items(16), results, lambda: ticks.append(1))
    assert len(ticks) == 16 * 4
    monkeypatch.setattr(engine.core, "step", lambda: pytest.fail("what is known is not measured again"))
    again = paq.train(engine, items(16), results)
    assert json.dumps(again.about) == json.dumps(found.about)
    for router in found.about["routers"]:
        assert [s["held_out"] for s in router["seeds"]] == [4, 4, 4]
        for seed in router["seeds"]:
            assert sum(seed["share"].values()) == pytest.approx(1, abs=1e-3)
            assert 4 <= seed["bits"] <= 16
    with pytest.raises(QBEError, match="3 prompts are too few"):
        paq.train(engine, items(3), results)
    monkeypatch.undo()
    monkeypatch.setenv("QBE_CACHE", str(cache))
    learned.write("paq", engine.table, found)

    vector = default_encoder().encode("What is the capital of France?")
    for tier in THRESHOLDS:
        chosen = engine.explain("What is the capital of France?", budget=Budget(tier=tier), policy="paq")
        assert chosen.profile.tier == 3
        logits = vector @ found.tensors[f"{tier}.weight"] + found.tensors[f"{tier}.bias"]
        assert set(chosen.blueprint.weight_bits) == {int(found.tensors["widths"][logits.argmax()])}
    wide = engine.explain("What is the capital of France?", budget=Budget(bits=16), policy="paq").blueprint
    narrow = engine.explain("What is the capital of France?", budget=Budget(bits=4), policy="paq").blueprint
    assert set(narrow.weight_bits) == {4} <= {min(wide.weight_bits)} | {4}
    with pytest.raises(QBEError, match="needs analysis tier 3"):
        policies.load("paq").blueprint(QueryProfile(0.5, "code", 2), Budget(), engine.table)


def test_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wikitext2_valid.txt").write_text("some words of a text " * 200)
    (tmp_path / "gsm8k_train4000.jsonl").write_text('{"question": "1 + 1?", "answer": "It is 2.\\n#### 2"}\n' * 3)
    task = {"id": "t", "instruction": "Add.", "instances": [{"input": "1, 2", "output": "3"}] * 2}
    (tmp_path / "alpaca_seed_tasks.jsonl").write_text(json.dumps(task) + "\n")
    found = read_training(tmp_path, 2)
    assert [i.dataset for i in found] == ["text"] * 2 + ["gsm8k"] * 2 + ["alpaca"] * 2 + ["code"] * 2
    assert all(i.right is None for i in found)
    assert found[5].chat == Form("Add.\n1, 2", "3")
    for item in found[6:]:
        assert ast.get_docstring(ast.parse(item.plain.prompt + item.plain.reference).body[0])  # type: ignore[arg-type]
        assert item.plain.reference.strip()
    for args, says in ((["--limit", "0"], "--limit is 0"), (["--data", "nowhere"], "there is no text in 'nowhere'")):
        for policy in ("paq", "predicted"):
            with pytest.raises(SystemExit) as ended:
                main(["train", policy, *args])
            assert ended.value.code == 2
            said = capsys.readouterr().err.strip()
            assert says in said
            assert "\n" not in said
