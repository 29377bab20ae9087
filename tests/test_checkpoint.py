"""Checkpoints: what is written is what is read; damage and full disks give one line and leave nothing."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import forked
from cli_process import cache_at
from conftest import tiny_llama
from older_folder import without_provenance
from qbe.errors import QBEError
from qbe.models import load_model
from qbe.store import checkpoint
from qbe.store.nested_linears import NestedWeightConfig
from qbe.store.nested_tensor import NestedTensor
from qbe.store.nesting import nest_model, smooth_model
from qbe.store.prepare import prepare
from qbe.store.quantise import quantise_to
from qbe.tagger import tag

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def written(device: torch.device, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "nested"
    return quantise_to(str(tiny_folder), out, NestedWeightConfig(), device, progress=False)


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return without_provenance(Path(shutil.copytree(written, tmp_path / "copy")))


def test_round_trip_is_exact(device: torch.device, written: Path, tiny_folder: Path) -> None:
    fresh = load_model(tiny_folder, progress=False)
    assert smooth_model(fresh.model, fresh.tokenizer, NestedWeightConfig(), progress=False)
    nest_model(fresh.model, "x", NestedWeightConfig(), progress=False)
    read = prepare(written, device=device, progress=False)
    assert len(read.table.nested) == 15
    for site in read.table.nested:
        a, b = fresh.model.get_submodule(site.name).weight, read.model.get_submodule(site.name).weight
        assert isinstance(a, NestedTensor)
        assert isinstance(b, NestedTensor)
        assert b.device.type == device.type
        assert torch.equal(a.packed, b.canonical_packed().cpu())
        assert torch.equal(a.meta, b.meta.cpu())
        assert (a.exponent, a.slices, a.group_size, a.gears) == (b.exponent, b.slices, b.group_size, b.gears)
        assert torch.equal(a.original, b.original.cpu())
    for name, parameter in fresh.model.named_parameters():  # norms, too
        if "norm" in name:
            assert torch.equal(parameter, read.model.get_parameter(name).cpu())
    assert read.table.measured
    assert all(set(s.activation_sensitivity) == {8, 16} for s in read.table.nested if s.name != "lm_head")
    assert all(set(s.native_sensitivity) == {"fp8_e4m3", "int8"} for s in read.table.nested if s.name != "lm_head")
    assert read.table.difficult_entropy is not None
    checkpoint.verify(written)


def test_other_layouts_and_groups_round_trip(device: torch.device, tiny_folder: Path, tmp_path: Path) -> None:
    config = NestedWeightConfig(group_size=128, slices=(3, 1, 1, 1, 2))
    out = quantise_to(str(tiny_folder), tmp_path / "odd", config, device, measure=False, progress=False)
    table = prepare(out, device=device, need_sensitivity=False, progress=False).table
    assert table.gears() == (3, 4, 5, 6, 8, 16)
    assert not table.measured


def test_transformers_alone_loads_the_folder_as_the_16_bit_model(written: Path, tiny_folder: Path) -> None:
    ids = torch.arange(20)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (written, tiny_folder))
    assert torch.equal(ours, theirs)


def test_the_store_is_mapped_not_read(written: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    model = prepare(written, device=CPU, progress=False).model
    assert "nested-00001-of-00001.safetensors" in maps.read_text()
    del model


def test_large_stores_are_split(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 40_000)
    out = quantise_to(str(tiny_folder), tmp_path / "many", NestedWeightConfig(), CPU, measure=False, progress=False)
    assert len(list(out.glob("nested-*.safetensors"))) > 1
    assert len(prepare(out, device=CPU, need_sensitivity=False, progress=False).table.nested) == 15


def damage_version(folder: Path) -> None:
    manifest = json.loads((folder / "qbe.json").read_text())
    (folder / "qbe.json").write_text(json.dumps(manifest | {"format_version": 99}))


def damage_truncated(folder: Path) -> None:
    file = next(folder.glob("nested-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def damage_header(folder: Path) -> None:
    file = next(folder.glob("nested-*.safetensors"))
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def damage_missing(folder: Path) -> None:
    next(folder.glob("nested-*.safetensors")).unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "qbe.json").write_text('{"format": "qbe-nested", "format_version": 1, "sites": 3}')


def damage_not_json(folder: Path) -> None:
    (folder / "qbe.json").write_bytes(b"\x00\x01")


def damage_sensitivity(folder: Path) -> None:
    (folder / "sensitivity.json").write_text('{"kl": {"a": 3}}')


def damage_shape(folder: Path) -> None:
    manifest = json.loads((folder / "qbe.json").read_text())
    next(iter(manifest["sites"].values()))["shape"] = [64, 64]
    (folder / "qbe.json").write_text(json.dumps(manifest))


def edit_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "qbe.json").read_text())
    (folder / "qbe.json").write_text(json.dumps(manifest | changes))


def damage_group(folder: Path) -> None:
    edit_manifest(folder, group_size=0)


def damage_slices(folder: Path) -> None:
    edit_manifest(folder, slices="422")


def damage_exponent(folder: Path) -> None:
    sites = json.loads((folder / "qbe.json").read_text())["sites"]
    next(iter(sites.values()))["exponent"] = 300
    edit_manifest(folder, sites=sites)


def damage_lost_site(folder: Path) -> None:
    sites = json.loads((folder / "qbe.json").read_text())["sites"]
    del sites["lm_head"]
    edit_manifest(folder, sites=sites)


def damage_infinity(folder: Path) -> None:
    text = (folder / "sensitivity.json").read_text()
    (folder / "sensitivity.json").write_text(text.replace('"4": ', '"4": 1e999, "5": ', 1))


def damage_outside(folder: Path) -> None:
    manifest = json.loads((folder / "qbe.json").read_text())
    manifest["files"]["../elsewhere"] = {"bytes": 1, "sha256": ""}
    (folder / "qbe.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_version, "format version 99"),
        (damage_truncated, "is damaged: it has"),
        (damage_header, "is damaged"),
        (damage_missing, "is missing"),
        (damage_manifest, "is damaged"),
        (damage_not_json, "cannot be read"),
        (damage_sensitivity, "sensitivity.json is damaged"),
        (damage_shape, "does not fit the model"),
        (damage_outside, "not a plain file name"),
        (damage_group, "group size 0"),
        (damage_slices, "is damaged"),
        (damage_exponent, "out of range"),
        (damage_lost_site, "lacks lm_head"),
        (damage_infinity, "not a finite number"),
    ],
)
def test_damage_is_one_clear_line(copy: Path, damage: object, says: str) -> None:
    damage(copy)  # type: ignore[operator]
    with pytest.raises(QBEError, match=says) as error:
        prepare(copy, device=CPU, progress=False)
    assert "\n" not in str(error.value)


def test_a_flipped_bit_is_found_by_verify(copy: Path) -> None:
    file = next(copy.glob("nested-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(QBEError, match="checksum"):
        checkpoint.verify(copy)


def test_an_existing_target_is_refused(written: Path, tiny_folder: Path) -> None:
    with pytest.raises(QBEError, match="already exists"):
        quantise_to(str(tiny_folder), written, NestedWeightConfig(), CPU, progress=False)
    with pytest.raises(QBEError, match="already a QBE checkpoint"):
        quantise_to(str(written), written.parent / "again", NestedWeightConfig(), CPU, progress=False)


@pytest.mark.parametrize("fails", ["save_file", "write_text"])
def test_a_full_disk_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path, fails: str
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint if fails == "save_file" else Path, fails, full)
    with pytest.raises(QBEError, match="disk is full"):
        quantise_to(str(tiny_folder), tmp_path / "out", NestedWeightConfig(), CPU, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_disk_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    """A file size limit makes the kernel itself refuse the write."""
    import sys

    code = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from qbe.store.quantise import quantise_to\n"
        "from qbe.store.nested_linears import NestedWeightConfig\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "quantise_to(sys.argv[1], Path(sys.argv[2]), NestedWeightConfig(), torch.device('cpu'), progress=False)\n"
    )
    done = forked.run(
        [sys.executable, "-c", code, str(tiny_folder), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "QBEError" in done.stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_processes_that_make_the_same_store_at_once_all_succeed(tiny_folder: Path, tmp_path: Path) -> None:
    import os
    import sys

    code = (
        "import sys, torch\nfrom qbe.store.prepare import prepare\n"
        "prepare(sys.argv[1], device=torch.device('cpu'), need_sensitivity=False, progress=False)\n"
    )
    environment = dict(os.environ, **cache_at(tmp_path / "cache"))
    started = [forked.Popen([sys.executable, "-c", code, str(tiny_folder)], env=environment) for _ in range(3)]
    assert [p.wait(timeout=120) for p in started] == [0, 0, 0]
    assert len(list((tmp_path / "cache" / "nested").iterdir())) == 1


def test_a_group_wider_than_the_inputs_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="sites have fewer inputs than a group of 1024"):
        quantise_to(str(tiny_folder), tmp_path / "out", NestedWeightConfig(1024), CPU, measure=False, progress=False)


def test_models_without_linears_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=64))
    assert [s.name for s in tag(model) if s.is_linear] == ["lm_head"]  # its other layers are Conv1D


def test_tied_weights_stay_one_tensor(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from conftest import byte_tokenizer

    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    byte_tokenizer().save_pretrained(tmp_path / "tied")
    model = prepare(tmp_path / "tied", device=device, originals="device", need_sensitivity=False, progress=False).model
    assert model.lm_head.weight.original.data_ptr() == model.model.embed_tokens.weight.data_ptr()
