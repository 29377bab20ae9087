"""`qbe check` on written scenarios: the line that each should give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_process import qbe, refused
from conftest import byte_tokenizer
from qbe.check.report import LAYERS
from qbe.check.targets import _GPUS, target
from qbe.engine.memory import predicted
from qbe.hardware import Family
from qbe.store import provenance

QUICK = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of no settings


def judged(verdict: str, settings: str = QUICK) -> Callable[[Path], None]:
    return lambda folder: provenance.judged(folder, verdict, provenance.content_digest(folder), "quick", settings)


def configured(**changes: Any) -> Callable[[Path], None]:
    """A folder whose configuration says something else; without weights, which a check does not read."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def large(folder: Path) -> None:
    """The shape of Llama-3.1-70B."""
    configured(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, head_dim=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16",
    )(folder)  # fmt: skip


def recurrent(folder: Path) -> None:
    """So small that its weights at 16 bits keep it above the lowest tier, which fails."""
    from transformers import MambaConfig

    shutil.rmtree(folder)
    MambaConfig(
        hidden_size=64, num_hidden_layers=2, state_size=8, vocab_size=320, architectures=["MambaForCausalLM"]
    ).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def damaged(folder: Path) -> None:
    path = folder / "model.safetensors"
    *others, last = path.read_bytes()
    path.write_bytes(bytes([*others, last ^ 1]))


@dataclass(frozen=True)
class Scenario:
    """What is checked, and one line that it must give.

    Attributes:
        name: in a few words. start: `nested` or `plain`. change: what happened to the folder.
        settings: TOML. code: exit code. line: layer, status, and a part of what is said.
    """

    name: str
    line: tuple[str, str, str]
    start: str = "nested"
    change: Callable[[Path], None] | None = None
    target: str = "cpu"
    settings: str | None = None
    more: tuple[str, ...] = field(default=())
    code: int = 0


SCENARIOS = (
    Scenario("nothing has judged it", ("validation", "warn", "no verdict: run 'qbe regress --candidate")),
    Scenario("it passed", ("validation", "pass", "passed suite quick"), change=judged("pass")),
    Scenario("it passed with other settings", ("validation", "warn", "served with other settings"),
             change=judged("pass"), settings="[refresh]\ninterval = 16\n"),
    Scenario("it failed", ("validation", "fail", "is fail: do not serve it"), change=judged("fail"), code=1),
    Scenario("a byte has changed", ("model", "fail", "is damaged: its digest is not that in"), change=damaged, code=1),
    Scenario("it was never quantised", ("format", "warn", "no nested store: the first start makes one"), start="plain"),
    Scenario("bits that the store has not", ("format", "fail", "weights.most_bits is 5, but the store has 4, 6, 8"),
             settings="[weights]\nmost_bits = 5\n", code=1),
    Scenario("tiers below the store", ("serving policy", "fail", "this model's lowest average is 4.00: raise it"),
             settings="[tiers.flex]\nbits = [2, 3]\nfloor = 2\n", code=1),
    Scenario("a GPU without bfloat16", ("kernels", "warn", "does not multiply bfloat16 natively: serve with --dtype"),
             start="plain", change=configured(dtype="bfloat16"), target="t4"),
    Scenario("70B on 22 GiB", ("hardware", "fail", "of 22.0 GiB: serve with --most-bits 4, or bound it"),
             start="plain", change=large, target="l4", code=1),
    Scenario("70B on 139 GiB", ("hardware", "pass", "of 139.0 GiB"), start="plain", change=large, target="h200"),
    Scenario("inside vLLM", ("decoding", "warn", "kv_bits does nothing here, because inside vLLM"), target="h100",
             more=("--runtime", "vllm")),
    Scenario("recurrent layers", ("decoding", "warn", "speculate does nothing here, because the model's layers keep"),
             start="plain", change=recurrent, code=1),
    Scenario("a kind that there is not", ("model", "fail", "nonesuch"), start="plain",
             change=configured(model_type="nonesuch"), code=1),
)  # fmt: skip


@pytest.mark.parametrize("case", SCENARIOS, ids=lambda s: s.name)
def test_scenarios(case: Scenario, nested: str, tiny_folder: Path, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(nested if case.start == "nested" else tiny_folder, folder)
    if case.change is not None:
        case.change(folder)
    args = ["check", str(folder), "--target", case.target, *case.more]
    if case.settings is not None:
        (tmp_path / "serve.toml").write_text(case.settings)
        args += ["--serve", str(tmp_path / "serve.toml")]
    done = qbe(*args, "--json", home=home)
    assert done.returncode == case.code, done.stderr.decode()
    found = json.loads(done.stdout)
    assert [layer["layer"] for layer in found["layers"]] == list(LAYERS)
    assert (found["status"] == "fail") == (case.code == 1)
    layer, status, text = case.line
    lines = {
        (one["layer"], f["status"], f"{f['saw']}: {f['remedy']}") for one in found["layers"] for f in one["findings"]
    }
    assert any((layer, status) == line[:2] and text in line[2] for line in lines), lines
    for one in found["layers"]:
        assert all(f["remedy"] for f in one["findings"] if f["status"] != "pass"), "whatever is not well has a remedy"


def test_a_batch_is_run_and_noted(nested: str, home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(nested, tmp_path / "model"))
    done = qbe("check", str(folder), "--target", "cpu", "--smoke", home=home)
    assert done.returncode == 0, done.stderr.decode()
    shown = " ".join(done.stdout.decode().split())
    assert "pass kernels a batch of 4 requests of all tiers is answered" in shown
    assert shown.endswith("warn"), "nothing has judged it"
    made = provenance.check(folder)
    assert made is not None
    assert len(made["hardware"]["tried_on"]) == 1, "the machine that made it"


def test_bad_input_is_one_line(nested: str, home: Path, tmp_path: Path) -> None:
    at = ("check", nested, "--target")
    assert "choose cpu, cuda, b200" in refused(*at, "abacus", home=home)
    assert "choose qbe or vllm" in refused(*at, "h100", "--runtime", "other", home=home)
    assert "on this machine" in refused(*at, "h100", "--smoke", home=home)
    (tmp_path / "serve.toml").write_text("colour = 1")
    assert "no such setting" in refused(*at, "cpu", "--serve", str(tmp_path / "serve.toml"), home=home)
    assert "no such file" in refused("check", "./nowhere", "--target", "cpu", home=home)


def test_memory_is_what_is_predicted(nested: str, home: Path) -> None:
    found = json.loads(qbe("check", nested, "--target", "cpu", "--json", home=home).stdout)
    (line,) = (f["saw"] for one in found["layers"] if one["layer"] == "hardware" for f in one["findings"])
    total = predicted(Path(nested), torch.device("cpu")).describe()["total"]
    assert line.startswith(f"{total / (1 << 30):.2f} of ")


@pytest.mark.parametrize("name", _GPUS)
def test_hardware_by_name(name: str) -> None:
    profile = target(name)
    assert profile.capability is not None
    assert profile.family is not Family.CPU
    assert 10 < profile.memory_bytes / (1 << 30) < 200
