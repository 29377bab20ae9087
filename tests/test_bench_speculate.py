"""`qbe bench speculate` on tiny shapes. No speed."""

# ruff: noqa: I001
from __future__ import annotations

import qbe  # before torch: it sets how torch's threads wait

import gzip
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench_samples import CPU, LIMITS, THIN, described
from engine_models import request
from qbe.bench import speculate


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model's folder; its nested store goes into a cache of the test's own."""
    monkeypatch.setenv("QBE_CACHE", str(tmp_path / "cache"))
    return tiny_folder


def test_speculate(folder: Path, device: torch.device) -> None:
    sizes = speculate.SpeculateSizes(
        folder, speculate.PROMPTS[:2], 20, targets=(8,), batches=(1, 2), compile=False, rounds=3
    )
    rows = described(speculate.run(CPU, LIMITS, sizes), CPU)
    ways = [speculate.CHOSEN, "drafts at 4 bits", "drafts at 6 bits", speculate.READ]
    assert [r["shape"].split(", ", 1)[1] for r in rows] == [f"batch {n}, {way}" for n in (1, 2) for way in ways]
    assert all(r["note"].endswith("2 of 2 answers the same") for r in rows)
    assert all(
        r["note"].startswith("accepted") and "no draft tokens" not in r["note"] for r in rows if "draft" in r["shape"]
    )
    random = replace(sizes, model=THIN, rates={8: {4: 1.0, 6: 0.0}}, batches=(1,), draft_tokens=2)
    rows = described(speculate.run(device, LIMITS, random), device)
    assert [r["shape"].split(", ")[-1] for r in rows] == [speculate.CHOSEN, "drafts at 4 bits", "drafts at 6 bits"]
    assert [r["note"].split()[1] for r in rows if "drafts" in r["shape"]] == ["100.0%", "0.0%"]
    assert all("replayed: of drafts drawn with 100% at 4 bits, 0% at 6 bits" in r["note"] for r in rows)


def test_a_random_model_writes_recorded_answers_and_what_was_read_is_compared_with_them(
    folder: Path, device: torch.device
) -> None:
    """The same draft tokens are read, and as many of them are right, as where the answers come from."""
    own = speculate.SpeculateSizes(folder, speculate.PROMPTS[:3], 40, targets=(8,), compile=False)
    replayed = replace(own, model={**THIN, "vocab_size": 512}, rates={8: {4: 0.0, 6: 0.0}}, recorded=folder)
    asked, scripts = speculate._recorded(device, replayed, progress=False)
    told = []
    for sizes, script in ((own, {}), (replayed, scripts[8])):
        core, prompts = speculate._core(device, sizes, asked, progress=False)
        assert prompts == asked
        assert core.speculator is not None
        core.speculator.costs, core.speculator.rows, core.speculator.drafters = (
            speculate.FreeDrafts(8),
            4,
            {speculate.NGRAM_DRAFTER},
        )
        told.append(speculate.TimedAnswers())
        case = speculate.SpeculateCase(core, prompts, sizes, 1, 8, script)
        speculate.answer(case, True, told[-1], random.Random(0))
    assert told[0].answers == told[1].answers == list(scripts[8].values())
    assert told[0].drafted == told[1].drafted > told[0].accepted == told[1].accepted > 0


def test_replayed_draft_tokens_are_right_at_the_recorded_rate_whatever_the_model_writes() -> None:
    replayed = speculate.Replayed({4: 0.8, 6: 0.0}, random.Random(0), request("r", [1], None))
    replayed.draft_tokens, replayed.source = [5, 6], 4
    outcomes = [replayed.right(i % 2, token=99) for i in range(4000)]
    assert sum(outcomes) / len(outcomes) == pytest.approx(0.8, abs=0.02)
    assert not replayed.right(2, token=5)  # there is no third draft token
    replayed.source = 6
    assert not any(replayed.right(0, token=5) for _ in range(100))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_replay_does_the_work_of_real_steps(batch: int, device: torch.device) -> None:
    """Three draft tokens, all right: four tokens for three draft steps and one that checks four rows of each answer."""
    sizes = speculate.SpeculateSizes(
        THIN, speculate.PROMPTS[:2], 18, (8,), (batch,), {8: {4: 1.0, 6: 0.0}}, compile=False
    )
    core, prompts = speculate._core(device, sizes, [], progress=False)
    assert core.speculator is not None
    core.speculator.drafters, core.speculator.costs = {4}, speculate.FreeDrafts(8)
    core.speculator.rows = batch * (sizes.draft_tokens + 1)
    told, run, rows = speculate.TimedAnswers(), core.runner.step, list[tuple[int, bool]]()
    case = speculate.SpeculateCase(core, prompts[:batch], sizes, batch, 8, {})

    def step(work):
        rows.append((len(work), work[0].draft is not None))
        return run(work)

    core.runner.step = step  # type: ignore[method-assign]
    speculate.answer(case, True, told, random.Random(0))
    drafts, check = [(batch, True)] * 3, (4 * batch, False)
    assert rows[1:9] == [*drafts, check, *drafts, check]
    assert [len(a) for a in told.answers] == [sizes.tokens] * batch
    assert told.accepted == told.drafted > 0
    # Left to itself the random model would not have written what it drafted.
    own = speculate.TimedAnswers()
    speculate.answer(replace(case, sizes=replace(sizes, rates={})), True, own, random.Random(0))
    assert own.accepted < own.drafted


def test_questions_of_data_sets_are_mixed_with_these_and_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(qbe.QBEError, match=r"there is no gsm8k in .*; give --data the folder that holds '[^']+'$"):
        speculate.with_traffic(speculate.SpeculateSizes(), tmp_path)
    (tmp_path / "gsm8k_test500.jsonl").write_text('{"question": "1 + 1?", "answer": "2 #### 2"}\n')
    (tmp_path / "gsm8k_train4000.jsonl").write_text('{"question": "1 + 2?", "answer": "3 #### 3"}\n')
    (tmp_path / "wikitext2_valid.txt").write_text("some words " * 400)
    (tmp_path / "alpaca_seed_tasks.jsonl").write_text(
        '{"id": "a", "instruction": "Name a colour.", "instances": [{"input": "", "output": "Red."}]}\n'
    )
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(
            '{"prompt": "def f():", "canonical_solution": " pass", "test": "", "entry_point": "f", "task_id": "h"}\n'
        )
    asked = speculate.with_traffic(speculate.SpeculateSizes(), tmp_path).prompts
    assert len(asked) == len(speculate.PROMPTS) + 3
    assert set(speculate.PROMPTS) < set(asked)
    assert asked[: len(speculate.PROMPTS)] != speculate.PROMPTS
    assert any("1 + 1?" in text for text in asked)
