"""Sensitivities from gradients: they are near what measuring finds, and every store gets them unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from cli_process import qbe
from conftest import byte_tokenizer, tiny_llama
from qbe.sites import SiteTable
from qbe.store import checkpoint, estimating, kv_sensitivity, prepare, sensitivity_table
from qbe.store.calibration_text import built_in
from qbe.store.estimate import Estimate, zero_sum
from qbe.store.estimating import estimate_model
from qbe.store.layerwise import Layerwise, NotLayered
from qbe.store.measure import SEGMENTS, measure_model
from qbe.store.nested_linears import NestedWeightConfig, nest
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import nestable, smooth_model, with_store
from qbe.store.sensitivity import decoder_layers
from qbe.tagger import tag

CPU = torch.device("cpu")


def nested_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, SiteTable]:
    model = tiny_llama(seed, num_hidden_layers=4).to(dtype)
    table = tag(model, name="tiny")
    nest(model, nestable(table), NestedWeightConfig())
    return model, with_store(table, model)


def test_weights_of_draws_have_the_covariance_of_one_token() -> None:
    c = zero_sum(1000, 16, torch.Generator().manual_seed(0), CPU)
    assert torch.allclose(c.sum(1), torch.zeros(1000), atol=1e-6)
    assert torch.allclose(c.square().sum(1), torch.ones(1000))


def test_they_are_near_what_is_measured(device: torch.device) -> None:
    model, table = nested_model()
    tokenizer = byte_tokenizer()
    measured = measure_model(model, tokenizer, table, progress=False)
    tokens, kv_tokens = built_in().sensitivity(tokenizer, model)[:SEGMENTS], built_in().kv(tokenizer, model)
    weights = {s.name: model.get_submodule(s.name).weight for s in table.nested}
    walk = Layerwise(model, decoder_layers(model, table), device)
    found = Estimate(walk, {s.name: s.role for s in table.nested}, tokens, kv_tokens, (4, 6, 8), draws=512)
    found.head(lambda rows: NestedTensor.from_weight(rows, keep_original=False))
    for i in reversed(range(4)):
        found.layer(i, weights)
    guessed = found.sensitivity()
    for gear in (4, 6, 8):
        pairs = [(measured.weights[s.name][gear], guessed.weights[s.name][gear]) for s in table.nested]
        assert spearmanr(*zip(*pairs, strict=True))[0] >= 0.9
        assert sum(g for _, g in pairs) == pytest.approx(sum(m for m, _ in pairs), rel=0.25)
    for of, known in ((guessed.activations, measured.activations), (guessed.native, measured.native)):
        assert of.keys() == known.keys()
        pairs = [(known[n][w], of[n][w]) for n in known for w in known[n]]
        assert sum(g for _, g in pairs) == pytest.approx(sum(m for m, _ in pairs), rel=0.25)
    head = [s.name for s in table.nested if s.layer is None]
    assert guessed.weights[head[0]][4] == pytest.approx(measured.weights[head[0]][4], rel=0.15)
    assert guessed.difficult_entropy == pytest.approx(measured.difficult_entropy, rel=1e-3)
    known_kv = kv_sensitivity.measure(model, table, built_in().kv(tokenizer, model))
    assert [(s.layer, s.head, s.numbers) for s in found.kv] == [(s.layer, s.head, s.numbers) for s in known_kv]
    for bits in (4, 2):
        assert sum(s.sensitivity[bits] for s in found.kv) == pytest.approx(
            sum(s.sensitivity[bits] for s in known_kv), rel=0.5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_as_before_afterwards(dtype: torch.dtype) -> None:
    model, table = nested_model(dtype=dtype)
    ids = torch.arange(20)[None]
    before = model(input_ids=ids).logits
    kept = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters() if not isinstance(p, NestedTensor)}
    estimate_model(model, byte_tokenizer(), table, CPU, progress=False)
    after = {n: (p.data_ptr(), p.dtype) for n, p in model.named_parameters() if not isinstance(p, NestedTensor)}
    assert after == kept
    assert all("forward" not in vars(m) for m in model.modules())
    assert torch.equal(model(input_ids=ids).logits, before)


def test_folds_are_those_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    by_layer, at_once = tiny_llama(), tiny_llama()
    found = smooth_model(by_layer, byte_tokenizer(), NestedWeightConfig(), progress=False)
    monkeypatch.setattr("qbe.store.nesting.decoder_layers", lambda *_: [])
    known = smooth_model(at_once, byte_tokenizer(), NestedWeightConfig(), progress=False)
    assert found
    assert {f.source: f.exponents.tolist() for f in found} == {f.source: f.exponents.tolist() for f in known}
    for name, parameter in by_layer.named_parameters():
        assert torch.equal(parameter, at_once.get_parameter(name))


def test_a_model_without_a_chain_of_layers_is_measured(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    monkeypatch.setattr(estimating, "decoder_layers", lambda *_: [])
    model, table = nested_model()
    with pytest.raises(NotLayered):
        estimate_model(model, byte_tokenizer(), table, CPU, progress=False)
    read = prepare.prepare(tiny_folder, device=CPU, progress=False)
    assert read.table.measured
    assert not sensitivity_table.estimated(prepare.store_folder(str(tiny_folder), progress=False))


def test_a_first_start_estimates(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBE_CACHE", str(tmp_path))
    monkeypatch.setattr(estimating, "measure_into", lambda *_, **__: pytest.fail("measured"))
    read = prepare.prepare(tiny_folder, device=CPU, progress=False)
    folder = prepare.store_folder(str(tiny_folder), progress=False)
    assert read.table.measured
    assert read.table.kv_measured
    assert sensitivity_table.estimated(folder)
    for name in (sensitivity_table.NAME, "kv_sensitivity.json"):  # lost, they are estimated from the store
        (folder / name).unlink()
    again = prepare.prepare(tiny_folder, device=CPU, progress=False)
    for before, after in zip(read.table, again.table, strict=True):
        assert after.sensitivity == pytest.approx(before.sensitivity, rel=1e-5)


def test_quantize_measures_where_it_is_asked_to(tiny_folder: Path, tmp_path: Path, home: Path) -> None:
    for options, estimated in (((), True), (("--measure",), False)):
        out = tmp_path / f"out{len(options)}"
        done = qbe("quantize", str(tiny_folder), "-o", str(out), "--json", *options, home=home)
        assert done.returncode == 0, done.stderr.decode()
        store = json.loads(done.stdout)["store"]
        assert store["sensitivity_measured"]
        assert store["sensitivity_estimated"] is estimated
        checkpoint.verify(out)
