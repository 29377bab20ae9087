"""`qbe train cascade`: what is learned of attention, and that it is learned from what the engine really does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import qbe
from conftest import byte_tokenizer, tiny_llama
from qbe.budget import Budget
from qbe.eval.items import Form, Item
from qbe.learning import cascade as learning
from qbe.learning.cascade import Answer, behind, divergences, fit, moved, train, write
from qbe.store.cascade_table import CascadeTable, Point, load, path_of, save

TEXTS = ("one two three", "a b c d e f", "zero", "what is it?", "lorem ipsum dolor sit amet", "42 43 44 45")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBE_CACHE", str(tmp_path_factory.mktemp("cache")))
        with qbe.Engine(tiny_llama(num_hidden_layers=4), tokenizer=byte_tokenizer(), policy="static", device="cpu",
                        records=False, max_sequences=4) as made:  # fmt: skip
            yield made


def test_entropies_are_those_of_the_steps_that_wrote_the_answer(engine: qbe.Engine) -> None:
    """Against the weights of transformers' own attention."""
    prompts = [engine.tokenizer(t)["input_ids"] for t in TEXTS[:2]]
    plain = tiny_llama(num_hidden_layers=4)
    plain.set_attn_implementation("eager")
    for prompt, (answer, entropy) in zip(prompts, write(engine, prompts), strict=True):
        assert entropy.shape == (len(answer) - 1, 4)
        with torch.inference_mode():
            weights = plain(torch.tensor([prompt + answer]), output_attentions=True).attentions
        for layer, w in enumerate(weights):
            for i in (0, 5, len(answer) - 2):
                at = len(prompt) + i
                expected = -torch.special.xlogy(w[0, :, at], w[0, :, at]).sum(-1).mean() / np.log(at + 1)
                assert entropy[i, layer] == pytest.approx(float(expected), abs=2e-3)
    assert engine.core.runner.decode is not None


def test_divergences_are_zero_at_16_bits_and_fall_with_bits(engine: qbe.Engine) -> None:
    prompt = engine.tokenizer(TEXTS[0])["input_ids"]
    at = [engine.explain(prompt, budget=Budget(bits=b), policy="uniform").blueprint for b in (4, 8, 16)]
    kl = divergences(engine.core, prompt, list(range(60, 100)), at)
    assert kl.shape == (3, 40)
    assert kl[2].max() < 1e-5
    assert kl[0].mean() > 4 * kl[1].mean() > 0


def test_what_entropy_tells_is_found_and_what_it_does_not_tell_gains_nothing(engine: qbe.Engine) -> None:
    base = engine.explain(TEXTS[0], budget=Budget(bits=6), policy="uniform").blueprint
    rng, layers, tokens = np.random.default_rng(0), 4, 300

    def answers(told: bool) -> list[Answer]:
        """Tokens with low entropy at layer 1 are sensitive; layer 0 and 2 tell nothing."""
        found = []
        for _ in range(8):
            entropy = rng.uniform(0.2, 0.9, (tokens, layers))
            worth = np.exp(-8 * entropy[:, 1]) if told else np.exp(-8 * rng.uniform(0.2, 0.9, tokens))
            rows = [worth, *(worth * f for _ in range(3) for f in (0.1, 4.0))]
            found.append(Answer(entropy, np.array(rows)))
        return found

    table = fit(answers(True), [0, 1, 2], base, engine)
    assert 1 in [p.layer for p in table.points]
    assert next(p for p in table.points if p.layer == 1).sign == -1
    held = table.about["held_out"]
    assert held["ratio"] < 0.9 < held["at_random"]
    assert held["interval"][1] < 1
    assert held["bits"] == pytest.approx(6, abs=0.1)
    noise = fit(answers(False), [0, 1, 2], base, engine).about
    assert noise["held_out"]["ratio"] == pytest.approx(noise["held_out"]["at_random"], rel=0.15)
    assert all(abs(v) < 0.15 for v in noise["correlations"].values())


def test_the_whole_of_it(engine: qbe.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(learning, "TOKENS", 48)
    ticks: list[int] = []
    items = [Item("text", t, Form(t, t)) for t in TEXTS]
    table = train(engine, items, lambda: ticks.append(1))
    assert len(ticks) == len(items) == table.about["answers"]
    assert table.about["bits"] == pytest.approx(5, abs=0.05)
    assert [p.layer for p in table.points] == sorted({p.layer for p in table.points})
    path = save(table, engine.table, tmp_path / "cascade.json")
    assert path.is_file()
    assert load(engine.table) is None  # it was put elsewhere
    base = engine.explain(TEXTS[0], budget=Budget(bits=5)).blueprint
    up, down = (behind(base, engine.table, 1, u).average_weight_bits(engine.table) for u in (True, False))
    assert down < 5 < up
    with pytest.raises(qbe.QBEError, match="too few"):
        train(engine, items[:1])


@pytest.mark.parametrize(
    "damage",
    [
        {"share": "x"}, {"share": 0}, {"most": None}, {"points": []}, {"points": [{"layer": 0, "sign": 1}]},
        {"points": [{"layer": 99, "sign": 1, "quantiles": [0, 1]}]},
        {"points": [{"layer": 0, "sign": 1, "quantiles": []}]},
        {"points": [{"layer": 0, "sign": 1, "quantiles": ["a", "b"]}]},
        {"points": [{"layer": 0, "sign": 7, "quantiles": [0, 1]}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_table_is_told_and_missed_by_nobody_else(
    engine: qbe.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, object]
) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    path = save(CascadeTable((Point(0, 1, (0.0, 0.5, 1.0)),), 0.4, 1), engine.table)
    assert load(engine.table) is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(qbe.QBEError, match=r"is damaged.*qbe train cascade"):
        load(engine.table)


def test_only_those_who_ask_for_a_cascade_miss_a_damaged_table(
    engine: qbe.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    path_of(engine.table).parent.mkdir()
    path_of(engine.table).write_text("{")
    with pytest.warns(RuntimeWarning, match="is damaged"):
        other = qbe.Engine(tiny_llama(num_hidden_layers=4), tokenizer=byte_tokenizer(), policy="static", device="cpu",
                           records=False)  # fmt: skip
    with other:
        assert other.generate("text", qbe.SamplingParams(max_tokens=2, ignore_eos=True)).finish_reason == "length"
        with pytest.raises(qbe.QBEError, match="no thresholds of the cascade"):
            other.generate("text", budget=Budget(cascade=True))


def test_nothing_is_trained_for_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qbe.policies import learned

    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    (tmp_path / "learned").write_text("a file")
    with pytest.raises(qbe.QBEError, match="learned' cannot be made"):
        learned.ready()


def test_a_cascade_without_anything_to_move_is_refused(engine: qbe.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._chooser, "cascade", CascadeTable((Point(0, 1, (0.0, 1.0)),), 0.4, 1))
    with pytest.raises(qbe.QBEError, match="nothing to move at 16 bits"):
        engine.explain(TEXTS[0], budget=Budget(bits=16, cascade=True), policy="uniform")
    assert engine.explain(TEXTS[0], budget=Budget(bits=6, cascade=True), policy="uniform").blueprint.steering


def test_moves_follow_levels_page_by_page(engine: qbe.Engine) -> None:
    """An answer that is always above what was learned goes up for a page, then no more."""
    base = engine.explain(TEXTS[0], budget=Budget(bits=6), policy="uniform").blueprint
    table = CascadeTable((Point(1, 1, tuple(i / 100 for i in range(33))),), 0.4, 1)
    kl, bits = moved(table, Answer(np.full((200, 4), 0.9), np.tile([[1.0], [0.5], [2.0]], (1, 200))), [1], base, engine)
    assert bits[:64].min() > 6
    assert bits[64:].max() == 6
    assert kl.tolist() == [0.5] * 64 + [1.0] * 136
    assert spearmanr(kl, bits).statistic < 0
