"""The policy `predicted`: estimated sensitivities, what a prefill shows, and the blueprints that come of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import tiny_llama
from qbe import Engine, QBEError
from qbe.analysis.profile import PromptSignals
from qbe.budget import Budget
from qbe.datasets.items import Form, Item
from qbe.datasets.results import Results
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.learning import predicted
from qbe.learning.sensitivities import estimate
from qbe.policies import learned
from qbe.policies.predicted import VECTOR, Predictor, features
from qbe.sites import Role
from qbe.store.nested_linears import NestedWeightConfig, nested_linears
from qbe.store.nesting import nest_model
from qbe.store.prepare import prepare
from qbe.store.sensitivity import divergence_of_rows, full_bits

PROMPT = "What is the capital of France, and how far is it from Rome?"


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts of 24 and 17 tokens, their first 9 and 5 a prompt; and which logits count."""
    tokens = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(1))
    counted = torch.zeros(2, 24, dtype=torch.bool)
    counted[0, 8:23], counted[1, 4:16] = True, True
    return tokens, counted


def test_gradients_estimate_what_lowering_a_site_does() -> None:
    model = tiny_llama()
    table = nest_model(model, "tiny", NestedWeightConfig(), progress=False)
    tokens, counted = texts()
    draws = 200
    found, activation_stats, entropy = estimate(model, table, tokens, counted, 6, draws)
    with torch.inference_mode(), full_bits(model, table) as weights:
        reference = model(input_ids=tokens, use_cache=False).logits
        log = reference[torch.arange(2), torch.tensor([8, 4])].log_softmax(-1)
        torch.testing.assert_close(entropy, -(log.exp() * log).sum(-1))
        for at, site in enumerate(table.nested):
            seen: list[torch.Tensor] = []
            hook = model.get_submodule(site.name).register_forward_pre_hook(lambda m, a, s=seen: s.append(a[0]))
            weights[site.name].bits = torch.tensor([6], dtype=torch.int32)
            lowered = model(input_ids=tokens, use_cache=False).logits
            hook.remove()
            weights[site.name].bits = torch.tensor([16], dtype=torch.int32)
            rows = divergence_of_rows(reference[counted], reference[counted].softmax(-1), lowered[counted])
            exact = [float(rows[:15].sum()), float(rows[15:].sum())]
            # The mean of 200 squares of normal numbers: a deviation of 10 %; four of them, and the third order.
            assert found[:, at] == pytest.approx(exact, rel=0.45), site.name
            means = torch.stack([seen[0][0, :9].square().mean(0), seen[0][1, :5].square().mean(0)])
            torch.testing.assert_close(activation_stats[at], means, rtol=1e-3, atol=1e-6)
    assert all("forward" not in vars(module) for _, module, _ in nested_linears(model))


def test_a_linear_pattern_is_found() -> None:
    rng = np.random.default_rng(0)
    sites, n = 6, 80
    shown = rng.standard_normal((n, 3))  # three things that differ between queries
    x = shown @ rng.standard_normal((3, 2 * sites + 1))
    y = shown @ rng.standard_normal((3, sites)) / 5
    v = rng.standard_normal((n, 64)) * 1e-3
    found, strength = predicted._fit(x, v, y)
    assert strength in predicted.STRENGTHS
    report = predicted._report(found, x, v, y)
    assert report["predicted_deviation"] == pytest.approx(y.std(), rel=0.1)
    tensors = {**found, "base": np.ones((sites, 4)), "errors": np.ones(sites), "inputs": np.ones(sites, int)}
    predictor = Predictor(tensors)
    squares = np.exp(x[0, :sites]).astype(np.float32)
    signals = PromptSignals(tuple(s.reshape(1) for s in squares), float(x[0, -1]))
    seen = features(signals, [np.ones(1)] * sites)
    assert seen[:sites] == pytest.approx(x[0, :sites], abs=1e-5)
    assert seen[sites : 2 * sites] == pytest.approx(np.zeros(sites), abs=1e-5)  # one channel has all of it
    z = (seen - found["mean"]) / found["scale"]
    inputs = np.concatenate([z @ found["directions"], VECTOR * (v[0] - found["centre"])])
    assert predictor.ratios(signals, v[0]) == pytest.approx(np.clip(inputs @ found["weights"], -1.5, 1.5))


def test_trained_and_served(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    monkeypatch.setattr(predicted, "DRAWS", 2)
    device = torch.device("cpu")
    prepared = prepare(tiny_folder, dtype="float32", device=device, progress=False)
    items = [Item("text", str(i), Form(f"prompt number {i}", f"and what follows {i * i}")) for i in range(10)]
    results, ticks = Results(["tiny"], tmp_path / "results"), list[int]()
    found = predicted.train(prepared, items, results, lambda: ticks.append(1))
    assert len(ticks) == 10
    with monkeypatch.context() as patch:
        patch.setattr(predicted, "estimate", lambda *_: pytest.fail("what is known is not measured again"))
        again = predicted.train(prepared, items, results)
    assert all(np.array_equal(again.tensors[k], v) for k, v in found.tensors.items())
    with pytest.raises(QBEError, match="2 queries are too few"):
        predicted.train(prepared, items[:2], results)
    learned.write("predicted", prepared.table, found)
    # A predictor that tells queries apart, whatever ten of them and a random model gave.
    weights = found.tensors["weights"]
    strong = {**found.tensors, "weights": 9 * np.where(np.arange(weights.shape[1]) % 2, 1.0, -1.0) + 0 * weights}

    with Engine(tiny_folder, policy="predicted", dtype="float32", device="cpu", records=False) as engine:
        before = engine.explain(PROMPT, budget=Budget(bits=5)).blueprint
        fixed = engine.explain(PROMPT, budget=Budget(bits=5), policy="fixed").blueprint
        assert (fixed.policy, fixed.weight_bits) == ("fixed", before.weight_bits)
        result = engine.generate(PROMPT, SamplingParams(max_tokens=4), budget=Budget(bits=5))
        assert result.error is None
        assert (before.policy, result.blueprint.policy) == ("predicted", "predicted")
        monkeypatch.setattr("qbe.policies.predicted._predictor", lambda _: Predictor(strong))
        seen = []
        monkeypatch.setattr(Predictor, "ratios", _spied(seen))
        other = engine.generate(PROMPT, SamplingParams(max_tokens=4), budget=Budget(bits=5))
        assert other.blueprint.weight_bits != before.weight_bits
        assert other.blueprint.average_weight_bits(engine.table) <= 5
        (signals,) = seen
        ids = torch.tensor([engine.tokenizer(PROMPT)["input_ids"]])
        _check_signals(signals, engine, tiny_folder, ids)
        assert engine.explain(PROMPT, budget=Budget(bits=5)).blueprint.weight_bits == before.weight_bits


def _spied(seen: list[PromptSignals]):  # type: ignore[no-untyped-def]
    real = Predictor.ratios

    def ratios(self: Predictor, signals: PromptSignals, vector: np.ndarray) -> np.ndarray:
        seen.append(signals)
        return real(self, signals, vector)

    return ratios


@torch.inference_mode()
def _check_signals(signals: PromptSignals, engine: Engine, folder: Path, ids: torch.Tensor) -> None:
    """Against a copy of the model without an engine: the first layer's inputs do not depend on any site's bits."""
    plain = prepare(folder, dtype="float32", device=torch.device("cpu"), progress=False).model
    seen: list[torch.Tensor] = []
    plain.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    plain(input_ids=ids, use_cache=False)
    at = {s.name: i for i, s in enumerate(engine.table.nested)}
    for name in ("q_proj", "k_proj", "v_proj"):
        inputs = signals.inputs[at[f"model.layers.0.self_attn.{name}"]]
        assert inputs == pytest.approx(seen[0][0].square().mean(0).numpy(), rel=1e-4, abs=1e-6)
    heads = [s for s, i in zip(signals.inputs, engine.table.nested, strict=True) if i.role is Role.OUTPUT_HEAD]
    assert all(h is None for h in heads)
    assert 0 < signals.entropy < np.log(320)
