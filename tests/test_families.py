"""The script that tries every family of transformers, on a few of them: one of each kind of attention."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
script = runpy.run_path(str(ROOT / "scripts/families.py"))
PAGE = (ROOT / "docs/families.md").read_text(encoding="utf-8")
WORK = ("gpt_oss", "glm4_moe_lite", "gemma3n_text", "gemma4_text")
MUST = {
    "llama", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma3_text", "gemma3n_text",
    "mixtral", "jamba", "bamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "mamba", "mamba2", "phi3",
    "olmo2", "cohere2",
}  # fmt: skip


@pytest.mark.parametrize("family", WORK)
def test_a_family_that_works(family: str) -> None:
    outcome = script["tried"](family)
    assert (outcome.status, outcome.model != "") == ("works", True), outcome.why


def test_a_family_that_is_refused_is_so_by_name() -> None:
    outcome = script["tried"]("bloom")
    assert outcome.status == "refused"
    assert "BloomForCausalLM brings its own attention code" in outcome.why


def test_what_transformers_cannot_make_is_said() -> None:
    outcome = script["tried"]("xlstm")
    assert outcome.status == "not made"
    assert outcome.why


def test_other_answers_than_those_of_transformers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = script["tried"]
    monkeypatch.setitem(tried.__globals__, "greedy", lambda model, prompt: [1] * script["TOKENS"])
    assert tried("llama").status == "wrong"


def test_the_page_has_every_family_and_those_that_must_work() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    status = {row[0].strip("| `"): row[2] for row in rows}
    assert set(status) == set(script["families"]())
    assert {family for family in MUST if status[family] != "works"} == set()
    assert "wrong" not in status.values()
    assert sum(s == "works" for s in status.values()) >= 60
