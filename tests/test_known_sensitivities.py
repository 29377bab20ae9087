"""What is known of a model comes with the package: for these very weights in this layout, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qbe.models import load_model
from qbe.store import checkpoint, known, kv_table, nesting, prepare, quantise, sensitivity_table
from qbe.store.allocation_check import EVEN
from qbe.store.nested_linears import NestedWeightConfig, nested_linears

CPU = torch.device("cpu")
DEFAULT = NestedWeightConfig()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an empty folder for what the package brings."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(known, "MEASURED", tmp_path / "measured")
    return tmp_path


def _keep_as_known(model: Path) -> Path:
    """What `known` says to do with a newly measured model. Its store leaves the cache."""
    folder = prepare.store_folder(str(model), progress=False)
    target = known.MEASURED / known.digest(load_model(model, progress=False).model, DEFAULT)
    target.mkdir(parents=True)
    for name in (sensitivity_table.NAME, kv_table.NAME, checkpoint.SMOOTHING):
        shutil.copy(folder / name, target)
    shutil.rmtree(folder)
    return target


def _never(*_: object, **__: object) -> None:
    pytest.fail("searched or measured again")


def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (quantise, "measure_into"),
        (quantise, "estimate_model"),
        (prepare, "estimate_into"),
        (prepare, "estimate_model"),
        (prepare, "measure_model"),
        (prepare, "measure_kv"),
        (nesting.smoothing, "smooth"),
        (nesting, "smooth_layers"),
    ):
        monkeypatch.setattr(module, name, _never)


def _codes(folder: Path) -> set[str]:
    files = checkpoint.read_manifest(folder).files
    return {about["sha256"] for name, about in files.items() if name.startswith(("nested-", "smoothing"))}


def test_known_tables_spare_the_search_and_the_measurement(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.prepare(tiny_folder, device=CPU, progress=False)
    measured = prepare.prepare(tiny_folder, device=CPU, progress=False)  # as the files have it
    codes = _codes(prepare.store_folder(str(tiny_folder), progress=False))
    _keep_as_known(tiny_folder)
    _nothing_is_measured(monkeypatch)
    brought = prepare.prepare(tiny_folder, device=CPU, need_sensitivity=False, progress=False)  # as `qbe info` does
    assert vars(brought.table) == vars(measured.table)
    assert _codes(prepare.store_folder(str(tiny_folder), progress=False)) == codes
    written = quantise.quantise_to(str(tiny_folder), cache / "written", DEFAULT, CPU, progress=False)
    assert _codes(written) == codes
    assert sensitivity_table.read(written) is not None
    in_memory = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    table = prepare.prepare_in_memory(in_memory, tokenizer, device=CPU, progress=False).table
    assert {s.name: s.sensitivity for s in table} == {s.name: s.sensitivity for s in measured.table}
    assert table.kv == measured.table.kv


def test_it_is_known_in_another_dtype_too(cache: Path, tiny_folder: Path) -> None:
    prepare.prepare(tiny_folder, device=CPU, progress=False)
    target = _keep_as_known(tiny_folder)
    wide = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    assert known.find(wide, DEFAULT) == target.name


def test_other_weights_layouts_or_rounding_are_not_known(
    cache: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.prepare(tiny_folder, device=CPU, progress=False)
    target = _keep_as_known(tiny_folder)
    model = load_model(tiny_folder, progress=False).model
    assert known.find(model, DEFAULT) == target.name
    assert known.find(model, NestedWeightConfig(slices=(4, 4))) is None
    assert known.find(model, NestedWeightConfig(group_size=128)) is None
    with monkeypatch.context() as other:
        other.setattr(known, "VERSION", known.VERSION + 1)
        assert known.find(model, DEFAULT) is None
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] += 1
    assert known.find(model, DEFAULT) is None
    assert known.find(model.to("meta"), DEFAULT) is None


def test_codes_chosen_on_a_text_have_sensitivities_of_their_own(
    cache: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare.prepare(tiny_folder, device=CPU, progress=False)
    _keep_as_known(tiny_folder)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the dog. " * 400)
    asked = []
    monkeypatch.setattr(quantise, "measure_into", lambda folder, *_, **__: asked.append(folder))
    quantise.quantise_to(str(tiny_folder), tmp_path / "out", DEFAULT, CPU, text=text, measure=True, progress=False)
    assert len(asked) == 1
    quantise.quantise_to(str(tiny_folder), tmp_path / "estimated", DEFAULT, CPU, text=text, progress=False)
    assert sensitivity_table.estimated(tmp_path / "estimated")
    assert checkpoint.read_manifest(tmp_path / "out").known_as is None


def test_older_pages_are_measured(cache: Path, tiny_folder: Path) -> None:
    prepare.prepare(tiny_folder, device=CPU, progress=False)
    target = _keep_as_known(tiny_folder)
    folder = prepare.store_folder(str(tiny_folder), progress=False)
    name = checkpoint.read_manifest(folder).known_as
    assert name == target.name
    assert known.bring(folder, name)
    assert not known.bring(folder, None)
    assert not known.bring(folder, f"../measured/{name}")  # a manifest is a file that anybody may have written
    table = json.loads((target / kv_table.NAME).read_text())
    (target / kv_table.NAME).write_text(json.dumps(table | {"version": kv_table.VERSION - 1}))
    assert not known.bring(folder, name)


@pytest.mark.model
def test_the_default_models_tables_come_with_the_package(default_gguf: Path, tmp_path: Path) -> None:
    """On every machine. If the errors have changed, codes have: raise `known.VERSION` and renew the folder."""
    folder = prepare.store_folder(str(default_gguf), progress=False)
    manifest = checkpoint.read_manifest(folder)
    assert known.bring(tmp_path, manifest.known_as)
    measured = sensitivity_table.read(tmp_path)
    assert measured is not None
    assert set(measured.weights) == set(manifest.sites)
    assert measured.check is not None, "qbe quantize would check it every time"
    assert max(row.ratio for row in measured.check.averages) <= EVEN
    assert set(measured.native) == set(measured.activations) == set(manifest.sites) - {"lm_head"}
    model = load_model(default_gguf, progress=False).model
    checkpoint.attach(model, folder)
    found = {}
    for name, _, weight in nested_linears(model):
        full = weight.dequantise(16).float()
        found[name] = [float((weight.dequantise(b).float() - full).norm() / full.norm()) for b in (4, 6, 8)]
    errors = torch.tensor(list(found.values())).mean(0).tolist()
    assert errors == pytest.approx([0.085101, 0.023077, 0.0062491], rel=1e-3)
