"""Folds in a checkpoint: stores without them still load, damaged ones give one clear line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from older_folder import without_provenance
from qbe.errors import QBEError
from qbe.models import load_model
from qbe.store import checkpoint
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nesting import nest_model
from qbe.store.prepare import prepare
from qbe.store.quantise import quantise_to

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def written(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "nested"
    return quantise_to(str(tiny_folder), out, NestedWeightConfig(), CPU, progress=False)


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return without_provenance(Path(shutil.copytree(written, tmp_path / "copy")))


def edit_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "qbe.json").read_text())
    (folder / "qbe.json").write_text(json.dumps(manifest | changes))


def test_a_folder_of_the_first_format_still_loads(tiny_folder: Path, tmp_path: Path) -> None:
    plain = load_model(tiny_folder, progress=False)
    table = nest_model(plain.model, "x", NestedWeightConfig(), progress=False)
    shutil.copytree(tiny_folder, tmp_path / "old")
    checkpoint.write_nested(tmp_path / "old", plain.model, "x")
    manifest = json.loads((tmp_path / "old" / "qbe.json").read_text())
    del manifest["folds"]
    (tmp_path / "old" / "qbe.json").write_text(json.dumps(manifest | {"format_version": 1}))
    kl = {s.name: {str(g): 0.5 / g for g in s.gears} for s in table.nested}
    (tmp_path / "old" / "sensitivity.json").write_text(json.dumps({"about": {}, "kl": kl}))
    read = prepare(tmp_path / "old", device=CPU, progress=False)
    for site in table.nested:
        weight = read.model.get_submodule(site.name).weight
        assert torch.equal(weight.packed, plain.model.get_submodule(site.name).weight.packed)
        assert torch.equal(weight.original, plain.model.get_submodule(site.name).weight.original)
    assert read.table.measured
    assert read.table.difficult_entropy is None
    assert set(read.table.activations(8)) == {8, 16}  # nothing was measured: the head alone keeps 16


def edit_exponents(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Writes other exponents of the first fold, and says so in the manifest."""
    with safe_open(folder / "smoothing.safetensors", framework="pt") as stored:
        folds = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    first = min(folds)
    save_file({**folds, first: change(folds[first]).contiguous()}, folder / "smoothing.safetensors")
    files = json.loads((folder / "qbe.json").read_text())["files"]
    files["smoothing.safetensors"]["bytes"] = (folder / "smoothing.safetensors").stat().st_size
    edit_manifest(folder, files=files)


def damage_exponents(folder: Path) -> None:
    edit_exponents(folder, lambda e: e + 100)


def damage_fold(folder: Path) -> None:
    edit_exponents(folder, lambda e: e[:-1])


def damage_no_folds(folder: Path) -> None:
    files = json.loads((folder / "qbe.json").read_text())["files"]
    del files["smoothing.safetensors"]
    edit_manifest(folder, files=files)


def damage_lost_fold(folder: Path) -> None:
    folds = json.loads((folder / "qbe.json").read_text())["folds"]
    edit_manifest(folder, folds={**folds, "model.layers.9.mlp": ["lm_head"]})


def damage_activations(folder: Path) -> None:
    edited = json.loads((folder / "sensitivity.json").read_text()) | {"activations": [1]}
    (folder / "sensitivity.json").write_text(json.dumps(edited))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_exponents, "smoothing.safetensors is damaged: exponents of"),
        (damage_fold, "smoothing.safetensors does not fit the model"),
        (damage_no_folds, "it has folds, but no smoothing.safetensors"),
        (damage_lost_fold, "smoothing.safetensors is damaged"),
        (damage_activations, "sensitivity.json is damaged"),
    ],
)
def test_damage_is_one_clear_line(copy: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(copy)
    with pytest.raises(QBEError, match=says) as error:
        prepare(copy, device=CPU, progress=False)
    assert "\n" not in str(error.value)
