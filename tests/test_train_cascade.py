"""`qbe train cascade`: what is learned of attention, and that it is learned from what the engine really does."""

from __future__ import annotations

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
from qbe.store.cascade_table import load, save

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


def test_moves_follow_levels_page_by_page(engine: qbe.Engine) -> None:
    """An answer that is always above what was learned goes up for a page, then no more."""
    from qbe.store.cascade_table import CascadeTable, Point

    base = engine.explain(TEXTS[0], budget=Budget(bits=6), policy="uniform").blueprint
    table = CascadeTable((Point(1, 1, tuple(i / 100 for i in range(33))),), 0.4, 1)
    kl, bits = moved(table, Answer(np.full((200, 4), 0.9), np.tile([[1.0], [0.5], [2.0]], (1, 200))), [1], base, engine)
    assert bits[:64].min() > 6
    assert bits[64:].max() == 6
    assert kl.tolist() == [0.5] * 64 + [1.0] * 136
    assert spearmanr(kl, bits).statistic < 0
