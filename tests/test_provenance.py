"""The provenance of a checkpoint folder: no changed byte is loaded, and what is learned later belongs to it."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from cli_process import qbe as run
from cli_process import refused
from older_folder import without_provenance
from qbe import Engine, QBEError
from qbe.hardware import detect
from qbe.store import checkpoint, digests, kv_table, provenance, sensitivity_table
from qbe.version import __version__

POSITIONS = 200


@pytest.fixture
def copy(nested: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model as `qbe quantize` wrote it, and a cache without digests."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(nested, tmp_path / "copy"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 1 << at % 8]))


def every(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_what_it_says(copy: Path, tiny_folder: Path, home: Path) -> None:
    said = json.loads(run("info", "--model", str(copy), "--verify", "--json", home=home).stdout)["provenance"]
    assert set(said["files"]) == {p.name for p in every(copy)} - {provenance.NAME}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", checkpoint.MANIFEST} <= set(said["files"])
    assert {"sensitivity.json", "kv_sensitivity.json", "smoothing.safetensors"} <= set(said["files"])
    assert said["qbe"] == __version__
    assert said["base"] == {"name": str(tiny_folder), "digest": digests.base_digest(tiny_folder, False)}
    assert said["calibration"]["text"] is None
    assert said["kernels"] == digests.kernels_digest()
    assert said["hardware"]["tried_on"][0]["name"] == detect("cpu").name
    assert said["verdicts"] == []
    shown = " ".join(run("info", "--model", str(copy), home=home).stdout.decode().split())
    assert f"by QBE {__version__}" in shown
    assert f"{len(said['files'])} files" in shown


def test_a_changed_byte_anywhere_is_refused(copy: Path) -> None:
    dice, files = random.Random(0), every(copy)
    hit = set()
    for number in range(POSITIONS):
        file = files[number % len(files)]
        at = dice.randrange(file.stat().st_size)
        flip(file, at)
        with pytest.raises(QBEError, match=file.name):
            provenance.check(copy)
        flip(file, at)
        hit.add(file.name)
    assert len(hit) == len(files) > 8
    assert provenance.check(copy) is not None


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "nested-00001-of-00001.safetensors"])
def test_no_command_loads_it(copy: Path, home: Path, name: str) -> None:
    flip(copy / name, (copy / name).stat().st_size // 2)
    for command in (("generate", "hello", "--max-tokens", "1"), ("info", "--verify"), ("explain", "hello")):
        said = refused(*command, "--model", str(copy), home=home)
        assert said.startswith(f"qbe: {copy / name} is damaged")
        assert "--trust" in said
    with pytest.raises(QBEError, match=name):
        Engine(copy, device="cpu", records=False)


def test_trust_takes_it_as_it_is(copy: Path, home: Path) -> None:
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "robot"))
    assert template.name in refused("generate", "hello", "--chat", "--model", str(copy), home=home)
    asked = ("generate", "hello", "--chat", "--max-tokens", "1", "--model", str(copy), "--trust", "--json")
    assert run(*asked, home=home).returncode == 0
    assert json.loads(run("info", "--trust", "--json", "--model", str(copy), home=home).stdout)["provenance"] is None
    assert "--trust" in refused("info", "--trust", "--verify", "--model", str(copy), home=home)


def test_where_there_is_nothing_to_trust_it_says_so(tiny_folder: Path, home: Path) -> None:
    said = refused("generate", "hello", "--model", str(tiny_folder), "--trust", home=home)
    assert "has no provenance.json" in said
    with pytest.raises(QBEError, match="a model given in memory has no files"):
        Engine(torch.nn.Linear(2, 2), tokenizer=object(), device="cpu", trust=True)


def test_a_server_does_not_start_with_it(copy: Path, home: Path) -> None:
    flip(copy / "config.json", 100)
    done = run("serve", "--model", str(copy), "--port", "0", home=home)
    assert done.returncode == 2
    assert done.stderr.decode().strip().splitlines()[-1].startswith(f"qbe: {copy / 'config.json'} is damaged")


def test_a_file_too_many_or_too_few(copy: Path) -> None:
    (copy / "README.md").write_text("a model of ours")
    (copy / ".hidden.json").write_text("{}")
    assert provenance.check(copy) is not None
    (copy / "special_tokens_map.json.bak.json").write_text("{}")
    with pytest.raises(QBEError, match=r"bak\.json is none of the files"):
        provenance.check(copy)
    (copy / "special_tokens_map.json.bak.json").unlink()
    (copy / "kv_sensitivity.json").rename(copy / "away")
    with pytest.raises(QBEError, match=r"kv_sensitivity\.json is missing"):
        provenance.check(copy)
    (copy / "away").rename(copy / "kv_sensitivity.json")
    (copy / provenance.NAME).unlink()
    with pytest.raises(QBEError, match=r"provenance\.json is missing"):
        provenance.check(copy)


def test_a_folder_of_an_older_version_is_loaded_without(copy: Path, home: Path) -> None:
    done = run("info", "--verify", "--json", "--model", str(without_provenance(copy)), home=home)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["provenance"] is None


def test_what_is_learned_later_belongs_to_it(copy: Path) -> None:
    measured = sensitivity_table.read(copy)
    assert measured is not None
    sensitivity_table.write(copy, measured, {"text": "another"})
    kv_table.write(copy, kv_table.read(copy), {"text": "another"})
    said = provenance.check(copy)
    assert said is not None
    assert said["pending"] == {}
    flip(copy / "sensitivity.json", 20)
    with pytest.raises(QBEError, match=r"sensitivity\.json is damaged"):
        provenance.check(copy)


@pytest.mark.parametrize("writes", range(3))
def test_a_process_that_ends_while_it_writes_leaves_a_folder_that_loads(
    copy: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    done, plain = [], provenance.write_text

    def write(path: Path, text: str) -> None:
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append(path)
        plain(path, text)

    monkeypatch.setattr(provenance, "write_text", write)
    with pytest.raises(KeyboardInterrupt):
        provenance.write_beside(copy, "sensitivity.json", (copy / "sensitivity.json").read_text() + " ")
    monkeypatch.undo()
    assert provenance.check(copy) is not None
    provenance.write_beside(copy, "sensitivity.json", (copy / "sensitivity.json").read_text() + "\n")
    assert provenance.check(copy) is not None


def test_an_unchanged_file_is_read_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, plain = [], digests._sha256
    monkeypatch.setattr(digests, "_sha256", lambda path, tick: (read.append(path.name), plain(path, tick))[1])
    monkeypatch.setattr(digests, "_SETTLED_NS", -time.time_ns())  # as if all had been written long ago
    provenance.check(copy)
    assert len(read) == len(every(copy)) - 1
    read.clear()
    provenance.check(copy)
    assert read == []
    os.utime(copy / "config.json")
    provenance.check(copy)
    assert read == ["config.json"]
    read.clear()
    provenance.check(copy, cached=False)
    assert len(read) == len(every(copy)) - 1
    for note in (digests.cache_dir() / "digests").iterdir():
        note.write_text('{"config.json": 3}')
    provenance.check(copy)


def test_a_young_file_is_read_again(copy: Path) -> None:
    """Two changes within one tick of the file system's clock have one time."""
    provenance.check(copy)
    (note,) = (digests.cache_dir() / "digests").iterdir()
    assert json.loads(note.read_text()) == {}


def test_vllm_reads_it(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qbe.vllm import served

    assert served.describe(str(copy)).manifest is not None
    flip(copy / "model.safetensors", (copy / "model.safetensors").stat().st_size - 5)
    with pytest.raises(QBEError, match=r"model\.safetensors is damaged.*; QBE_TRUST=1 takes it as it is"):
        served.describe(str(copy))
    monkeypatch.setenv(served.TRUST, "1")
    assert served.describe(str(copy)).manifest is not None


def test_other_sources_have_other_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests.kernels_digest()
    shutil.copytree(digests.KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(digests, "KERNELS", tmp_path / "kernels")
    assert digests.kernels_digest() == before
    (tmp_path / "kernels/cpu/linear/rows.c").rename(tmp_path / "kernels/cpu/linear/columns.c")
    assert digests.kernels_digest() != before


def test_a_device_is_noted_once(copy: Path) -> None:
    for _ in range(2):
        provenance.tried_on(copy, detect(torch.device("cpu")))
    said = provenance.check(copy)
    assert said is not None
    assert len(said["hardware"]["tried_on"]) == 1


def test_a_verdict_is_noted_and_changes_no_digest(copy: Path) -> None:
    from qbe.regress.target import Target
    from qbe.regress.verdict import note

    digest = provenance.content_digest(copy)
    side = {"digest": digest, "settings": "sha256:1"}
    for verdict, settings in (("fail", "sha256:1"), ("pass", "sha256:1"), ("pass", "sha256:2")):
        said = {"verdict": verdict, "suite": {"name": "quick"}, "candidate": side | {"settings": settings}}
        note(said, Target(str(copy)))
    made = provenance.check(copy)
    assert made is not None
    about = {"verdict": "pass", "digest": digest, "suite": "quick"}
    assert made["verdicts"] == [about | {"settings": "sha256:1"}, about | {"settings": "sha256:2"}]
    assert provenance.content_digest(copy) == digest


def test_a_content_digest_is_of_what_is_read(copy: Path, tiny_folder: Path, tmp_path: Path) -> None:
    digest = provenance.content_digest(copy)
    (copy / "notes.md").write_text("listed nowhere")
    assert provenance.content_digest(copy) == digest
    measured = sensitivity_table.read(copy)
    assert measured is not None
    sensitivity_table.write(copy, measured, {"text": "another"})
    assert provenance.content_digest(copy) != digest, "what is learned later chooses other bits"
    plain = Path(shutil.copytree(tiny_folder, tmp_path / "plain"))
    assert provenance.content_digest(plain) == provenance.content_digest(tiny_folder), "wherever it lies"
    flip(plain / "config.json", 10)
    assert provenance.content_digest(plain) != provenance.content_digest(tiny_folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(QBEError, match="there are no files"):
        provenance.content_digest(tmp_path / "empty")
