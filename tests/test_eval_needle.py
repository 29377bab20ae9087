"""`qbe eval needle` on a tiny model and made-up essays: where needles lie, what is found, what the command says."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import forked
from cli_process import cache_at, refused
from conftest import byte_tokenizer
from qbe import Budget, QBEError
from qbe.cli.eval import _settings
from qbe.datasets.haystack import ESSAYS, Haystack, read_essays
from qbe.eval.needle import ANSWER_TOKENS, Grid, Needle, NeedleResult, NeedleResults, run
from qbe.eval.report import render, shown

TEXT = " ".join(f"The {i}th lamp was lit at dusk." for i in range(40))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / ESSAYS).mkdir()
    for i in range(3):
        (folder / ESSAYS / f"{i}.txt").write_text(f"Essay {i}. " + TEXT + "\n")
    return folder


def command(*args: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, NO_COLOR="1", **cache_at(home), QBE_RECORDS=str(home / "records.sqlite"))
    environment.pop("QBE_DATA", None)
    return forked.run(
        [sys.executable, "-m", "qbe", "eval", "needle", *args], capture_output=True, text=True, env=environment,
        timeout=300, cwd=home,
    )  # fmt: skip


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_a_needle_lies_at_its_depth_between_sentences(depth: float) -> None:
    tokenizer = byte_tokenizer()
    haystack = Haystack(TEXT, tokenizer, 3000)
    text = haystack.fitting("Here it is.", depth, 2000, lambda t: len(tokenizer(t)["input_ids"]))
    assert text is not None
    assert 1950 <= len(text) <= 2000
    before, _, after = text.partition("Here it is.")
    assert before == "" or before.endswith("dusk. ")
    assert after == "" or after.startswith(" The ")
    assert len(before) / (len(before) + len(after)) == pytest.approx(depth, abs=0.03)
    assert before.strip() in " ".join([TEXT] * 3), "the text begins again where it ends"
    assert haystack.fitting("Here it is.", depth, 10, len) is None


def test_settings_are_widths_names_of_budgets_and_the_policys_own() -> None:
    settings = _settings("8, turbo4,default,8")
    assert settings == (8, "turbo4", None)
    assert [shown(s) for s in settings] == ["8 bits", "turbo4", "default"]
    assert [Budget(kv_bits=s).kv_bits for s in settings] == [8, "turbo4", None]


def test_prompts_of_one_haystack_begin_alike() -> None:
    haystack = Haystack(TEXT, byte_tokenizer(), 2000)
    long, short = haystack.hide("X.", 1.0, 2000), haystack.hide("X.", 0.5, 1000)
    before = short.partition("X.")[0]
    assert len(before) > 400
    assert long.startswith(before)


def test_grids_are_whole_or_spread() -> None:
    grid = Grid((100, 200), (0.0, 1.0), 2)
    cells = grid.cells()
    assert [(c.length, c.depth, c.number) for c in cells[:3]] == [(200, 1.0, 0), (200, 1.0, 1), (200, 0.0, 0)]
    assert len(set(cells)) == 8
    few = Grid((100, 200), (0.0, 1.0), 2, 4).cells()
    assert few == cells[::2]
    assert Grid((100, 200), (0.0, 1.0), 2, 99).cells() == cells


def test_secrets_belong_to_their_place_and_are_not_in_the_text() -> None:
    cells = Grid().cells()
    secrets = [c.secret("") for c in cells]
    assert len(set(secrets)) > len(secrets) * 0.9
    assert all(len(s) == 5 and s.isdigit() for s in secrets)
    assert [c.secret("") for c in cells] == secrets
    assert cells[0].secret(f"before {secrets[0]} after") != secrets[0]


class Parrot:
    """An engine that finds every needle but those at these lengths when its cache has these bits."""

    def __init__(self, *blind: tuple[int | None, int], context: int | None = 4096) -> None:
        self.blind, self.asked = blind, list[tuple[Any, int | None]]()
        self.tokenizer, self.name = byte_tokenizer(), "parrot"
        self.core = SimpleNamespace(context=context)

    def explain(self, prompt: Any) -> Any:
        return SimpleNamespace(prompt_tokens=len(prompt[0]["content"]))

    def generate_batch(self, requests: Any) -> Any:
        (asked,) = requests
        prompt, params, budget = asked.prompt, asked.params, asked.budget
        assert asked.cache_salt == f"needle {budget.kv_bits}".encode()
        assert params.greedy
        assert params.max_tokens == ANSWER_TOKENS
        assert budget.bits == 16
        text = prompt[0]["content"]
        self.asked.append((text, budget.kv_bits))
        number = text.partition("magic number for ")[2].partition(" is ")[2][:5]
        lost = any(bits == budget.kv_bits and len(text) <= length for bits, length in self.blind)
        return [SimpleNamespace(
            text="I do not know 1." if lost else f"It is {number}.", error=None, prompt_tokens=len(text),
            cached_tokens=0, average_kv_bits=float(budget.kv_bits or 6),
        )]  # fmt: skip


def test_16_bits_go_first_and_verdicts_are_about_what_they_find() -> None:
    engine, done = Parrot((4, 1000), (2, 5000), (16, 500)), list[int]()
    grid = Grid((400, 900, 2000), (0.0, 0.5), 2)
    outcome = run(engine, TEXT, grid, (4, 16, 2, None), lambda: done.append(1))  # type: ignore[arg-type]
    assert outcome.settings == (16, 4, 2, None)
    assert [bits for _, bits in engine.asked] == [16] * 12 + [4] * 12 + [2] * 12 + [None] * 12
    assert len(done) == 48
    assert all(len(text) <= 2000 - ANSWER_TOKENS for text, _ in engine.asked)
    assert [len(outcome.lost(s)) for s in outcome.settings] == [0, 4, 8, 0]
    assert [outcome.verdict(s) for s in (4, 2, None)] == [False, False, True]
    described = json.loads(json.dumps(outcome.describe(), allow_nan=False))
    assert described["verdicts"][1] == {
        "kv_bits": 4, "found": 4, "of": 12, "lost": 4, "finds_all_that_16_bits_find": False,
    }  # fmt: skip
    assert {r["kv_bits"] for r in described["rows"]} == {16, 4, 2, "default"}
    assert all(r["found"] == (r["expected"] in r["answer"]) for r in described["rows"])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(outcome, grid, "parrot"))
    shown = console.export_text()
    assert "4 of the 8 needles that 16 bits find are lost" in shown
    assert "default (on average 6.0 bits): every needle that 16 bits find is found (12 of 12, 16 bits 8)" in shown


def test_without_a_needle_found_at_16_bits_there_is_no_verdict() -> None:
    outcome = NeedleResults((16, 4), [NeedleResult(Needle(9, 0.0, 0), s, False, "1", "", 9, 0, 16.0) for s in (16, 4)])
    assert outcome.verdict(4) is None
    assert outcome.describe()["verdicts"][1]["finds_all_that_16_bits_find"] is None


@pytest.mark.parametrize(("lengths", "says"), [((9000,), "context is 4096"), ((60,), "leaves no room for a haystack")])
def test_lengths_that_do_not_fit(lengths: tuple[int, ...], says: str) -> None:
    with pytest.raises(QBEError, match=says):
        run(Parrot(), TEXT, Grid(lengths, (0.5,)), (4,))  # type: ignore[arg-type]


def test_essays_are_read_in_order(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [read_essays(data).find(f"Essay {i}.") for i in range(3)] == sorted(
        read_essays(data).find(f"Essay {i}.") for i in range(3)
    )
    monkeypatch.setenv("QBE_DATA", str(data))
    assert read_essays(None) == read_essays(data)


def test_the_command_in_a_process(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = command(
        "--model", str(tiny_folder), "--data", str(data), "--lengths", "300,400", "--depths", "0,100", "--needles", "1",
        "--kv-bits", "4,default", "--device", "cpu", "--json", "r.json", "--plot", "r.png", home=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "found/hidden by depth" in done.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["eval"] == "needle"
    assert {"model", "device", "versions", "weights"} <= set(found["conditions"])
    assert len(found["rows"]) == 12
    for row in found["rows"]:
        assert row["length"] - 80 < row["prompt_tokens"] <= row["length"] - ANSWER_TOKENS
        assert row["found"] == (row["expected"] in row["answer"])
        most = {16: 16.0, 4: 12.0, "default": 16.0}[row["kv_bits"]]  # the policy's choice lies anywhere below
        assert row["average_kv_bits"] <= most
        assert row["kv_bits"] != 16 or row["average_kv_bits"] == 16
        assert row["error"] is None
    assert any(row["cached_tokens"] >= 64 for row in found["rows"]), "prompts of one haystack share pages"
    assert [v["kv_bits"] for v in found["verdicts"]] == [16, 4, "default"]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    few = command(
        "--model", str(tiny_folder), "--data", str(data), "--kv-bits", "8", "--limit", "2", "--device", "cpu", "--json",
        home=tmp_path,
    )  # fmt: skip
    assert few.returncode == 0, few.stderr
    rows = json.loads(few.stdout)["rows"]
    assert [(r["length"], r["kv_bits"]) for r in rows] == [(512, 16), (512, 16), (512, 8), (512, 8)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--data", "nowhere"], "there are no essays in 'nowhere/paul_graham_essays'"),
        ([], "../shared/data/paul_graham_essays"),
        (["--kv-bits", "8,3"], "--kv-bits has '3'"),
        (["--kv-bits", ""], "--kv-bits has ''"),
        (["--lengths", "many"], "--lengths 'many' is not a list of numbers"),
        (["--lengths", "0"], "--lengths has a number out of range"),
        (["--depths", "50,101"], "--depths has a number out of range; give 0 to 100"),
        (["--depths", "nan"], "--depths has a number out of range"),
        (["--limit", "0"], "--limit is 0"),
        (["--needles", "-1"], "--needles is -1"),
        (["--json", "/no/such/folder/r.json"], "/no/such/folder"),
        (["--plot", "r.jpg"], "png"),
    ],
)
def test_bad_input_is_one_line(args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QBE_DATA", raising=False)
    assert says in refused("eval", "needle", *args, home=tmp_path, cwd=tmp_path)
