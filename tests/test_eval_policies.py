"""`qbe eval --policies` on a tiny model: what it measures, what it says of it, how it goes on."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import forked
from cli_process import cache_at, refused
from conftest import as_read, byte_tokenizer, tiny_llama
from qbe import Engine, QBEError
from qbe.datasets.items import Item, read
from qbe.datasets.results import Results
from qbe.eval.compare import FULL, Comparison, ComparisonResult, Setting, settings_of
from qbe.eval.summary import _fair, describe, render
from test_eval_answers import write_data

ALL = ("text", "gsm8k", "bbh", "humaneval")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = tiny_llama(max_position_embeddings=2048)
    with Engine(model, tokenizer=byte_tokenizer(), device="cpu", records=False, max_sequences=8) as made:
        yield made


@pytest.fixture(scope="module")
def outcome(engine: Engine, data: Path, tmp_path_factory: pytest.TempPathFactory) -> ComparisonResult:
    settings = settings_of(("uniform", "static", "random", "tiered"), (5, 6), 2)
    results = Results(["tiny"], tmp_path_factory.mktemp("results"))
    return Comparison(engine, _short(read(ALL, data, 3)), settings, results).run()


def test_a_seed_in_a_name_is_the_seed() -> None:
    assert settings_of(("random:2", "random", "static"), (5,), 2) == [
        Setting("random", 5, 2), Setting("random", 5, 0), Setting("random", 5, 1), Setting("static", 5)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "bits", "fair"),
    [
        ("better", (5.04, 5.0), "better"), ("better", (5.06, 5.0), "not at equal bits"),
        ("better", (4.0, 5.0), "better"), ("worse", (4.96, 5.0), "worse"),
        ("worse", (4.9, 5.0), "not at equal bits"), ("worse", (6.0, 5.0), "worse"),
        ("tie", (6.0, 5.0), "tie"), ("too few queries", (6.0, 5.0), "too few queries"),
    ],
)  # fmt: skip
def test_who_had_more_bits_is_not_better(said: str, bits: tuple[float, float], fair: str) -> None:
    assert _fair(said, bits) == fair


def _short(items: list[Item]) -> list[Item]:
    """With answers of a few tokens: a random model never ends one."""
    from dataclasses import replace

    return [replace(i, max_tokens=min(i.max_tokens, 6)) for i in items]


def test_every_setting_runs_every_query(outcome: ComparisonResult) -> None:
    names = [(s.policy, s.bits, s.seed) for s in outcome.settings]
    assert names == [("static", 5, None), ("random", 5, 0), ("random", 5, 1), ("tiered", 5, None),
                     ("uniform", 6, None), ("static", 6, None), ("random", 6, 0), ("random", 6, 1),
                     ("tiered", 6, None)]  # fmt: skip
    assert len(outcome.skipped) == 1
    assert "uniform policy cannot run at 5 bits" in outcome.skipped[0]
    for query in outcome.queries:
        full = query.measured[FULL].fidelity
        assert (full.kl, full.agreed) == (0, full.tokens)
        assert full.tokens == len(query.encoded.reference_ids)
        for setting in outcome.settings:
            measured = query.measured[setting]
            assert setting.bits - 0.3 <= measured.bits <= setting.bits + 1e-9  # two layers have few averages
            assert measured.fidelity.kl > 0
            assert (measured.answer is None) == (query.item.right is None)


def test_bytes_are_counted_as_served_though_the_comparison_is_in_float32(
    outcome: ComparisonResult, engine: Engine
) -> None:
    assert engine.core.pool.dtype is torch.float32
    for query in outcome.queries:
        full = query.blueprints[FULL]
        assert query.measured[FULL].bytes_per_token == full.bytes_per_token(engine.table) / 2
        low = next(s for s in outcome.settings if s.policy == "uniform")
        dense = sum(s.bytes_at[16] for s in engine.table if not s.nested) // 2
        codes = sum(s.bytes_at[6] for s in engine.table.nested)
        assert query.measured[low].bytes_per_token == dense + codes


@torch.inference_mode()
def test_numbers_are_those_of_the_model_itself(outcome: ComparisonResult, engine: Engine, data: Path) -> None:
    """Logits of a copy that was never nested, its weights replaced by what a blueprint reads."""
    query = next(q for q in outcome.queries if q.item.dataset == "text")
    setting = Setting("random", 5, 1)
    plain, tokenizer = tiny_llama(max_position_embeddings=2048), byte_tokenizer()
    ids = torch.tensor([[*query.encoded.prompt_ids, *query.encoded.reference_ids]])
    first = len(query.encoded.prompt_ids) - 1

    def logs() -> torch.Tensor:
        return plain(input_ids=ids).logits[0, first:-1].double().log_softmax(-1)

    before = logs()
    chosen = zip(engine.table.nested, query.blueprints[setting].weight_bits, strict=True)
    as_read(engine.model, plain, {site.name: bits for site, bits in chosen})
    now, labels = logs(), ids[0, first + 1 :]
    found = query.measured[setting].fidelity
    assert tokenizer.decode(labels) == query.item.plain.reference
    assert found.kl == pytest.approx(float((before.exp() * (before - now)).sum()), rel=0.02)
    assert found.loss == pytest.approx(-float(now.gather(1, labels[:, None]).sum()), rel=1e-3)
    assert abs(found.agreed - int((before.argmax(-1) == now.argmax(-1)).sum())) <= 2


def test_rows_comparisons_and_flips(outcome: ComparisonResult) -> None:
    described = json.loads(json.dumps(describe(outcome), allow_nan=False))
    assert len(described["rows"]) == len(outcome.settings) * 5
    for row in described["rows"]:
        low, high = row["kl_interval"] if row["n"] > 1 else (row["kl"], row["kl"])
        assert low * (1 - 1e-9) <= row["kl"] <= high * (1 + 1e-9)
        assert 0 <= row["top1"] <= 1
        assert row["perplexity"] > 1
        assert (row["accuracy"] is None) == (row["dataset"] == "text")
        own = [q for q in outcome.queries if row["dataset"] in (q.item.dataset, "all")]
        setting = Setting(row["policy"], row["bits"], row["seed"])
        kl = [q.measured[setting].fidelity for q in own]
        assert row["kl"] == pytest.approx(sum(f.kl for f in kl) / sum(f.tokens for f in kl))
        assert row["perplexity"] == pytest.approx(math.exp(sum(f.loss for f in kl) / sum(f.tokens for f in kl)))
        measured, tokens = [q.measured[setting] for q in own], sum(f.tokens for f in kl)
        for name, places in (("bytes_per_token", 1), ("bits", 1e-3)):
            value = sum(getattr(m, name) * m.fidelity.tokens for m in measured) / tokens
            assert row["average_bits" if name == "bits" else name] == pytest.approx(value, abs=places)
    pairs = {(c["policy"], c["baseline"]) for c in described["comparisons"] if c["bits"] == 6}
    assert pairs == {("static", "random"), ("static", "uniform"), ("random", "uniform"), ("tiered", "static"),
                     ("tiered", "random"), ("tiered", "uniform")}  # fmt: skip
    for c in described["comparisons"]:
        low, high = c["kl_ratio_interval"] or (c["kl_ratio"], c["kl_ratio"])
        assert (c["kl_verdict"] == "too few queries") == (c["n"] < 6)
        if c["n"] >= 6:
            assert (c["kl_verdict"] == "tie") == (c["kl_ratio_interval"] is None or low <= 1 <= high)
    flips = {(f["item"], f["policy"], f["bits"], f["seed"]) for f in described["flips"]}
    for query in outcome.queries:
        for s in outcome.settings if query.item.right else []:
            changed = query.measured[FULL].answer.right != query.measured[s].answer.right  # type: ignore[union-attr]
            assert changed == ((query.item.name, s.policy, s.bits, s.seed) in flips)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(described, "tiny"))
    shown = console.export_text()
    for part in ("tiny, gsm8k: 3 queries", "16 bits", "random:1", "tiered and static at 6 bits: KL", "cannot run at 5"):
        assert part in shown


def test_a_run_goes_on_where_it_was(
    engine: Engine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, settings = _short(read(("text", "bbh"), data, 4)), settings_of(("static", "random"), (6,), 1)
    done: list[int] = []

    def stop_at(step: int) -> None:
        done.append(1)
        if len(done) == step:
            raise KeyboardInterrupt

    for step in (5, 14, 99):
        done.clear()
        results = Results(["tiny"], tmp_path)
        comparison = Comparison(engine, items, settings, results)
        try:
            whole = comparison.run(lambda step=step: stop_at(step))  # type: ignore[misc]
        except KeyboardInterrupt:
            results.close()
    assert len(done) == comparison.steps == (4 + 8) * 3
    fresh = Comparison(engine, items, settings, Results(["fresh"], tmp_path)).run()
    assert describe(whole) == describe(fresh)

    def refuse(*_: Any) -> None:
        raise AssertionError("what is known is not computed again")

    monkeypatch.setattr(engine.core, "step", refuse)
    again = Comparison(engine, items, settings, Results(["tiny"], tmp_path)).run()
    assert describe(again) == describe(fresh)


def test_what_cannot_be_compared(engine: Engine, data: Path, tmp_path: Path) -> None:
    results = Results(["x"], tmp_path)
    with pytest.raises(QBEError, match="uniform policy cannot run at 5 bits"):
        Comparison(engine, read(("text",), data, 1), settings_of(("uniform",), (5,), 1), results)
    with pytest.raises(QBEError, match="unknown policy 'best'"):
        settings_of(("best",), (5,), 1)
    (item,) = read(("text",), data, 1)
    from dataclasses import replace

    long = replace(item, name="long", plain=replace(item.plain, prompt=item.plain.prompt * 20))
    assert Comparison(engine, [item, long], [FULL], results).left_out == ["long"]
    with pytest.raises(QBEError, match="no query fits the context"):
        Comparison(engine, [long], [FULL], results)
    results.path.write_bytes(b"no database" * 100)
    with pytest.raises(QBEError, match="delete that file"):
        Results(["x"], tmp_path)


def command(*args: str, home: Path) -> list[str]:
    return [sys.executable, "-m", "qbe", "eval", *args]


def environment(home: Path) -> dict[str, str]:
    env = dict(os.environ, NO_COLOR="1", **cache_at(home), QBE_RECORDS=str(home / "records.sqlite"))
    env.pop("QBE_DATA", None)
    return env


def run(*args: str, home: Path) -> subprocess.CompletedProcess[str]:
    return forked.run(command(*args, home=home), capture_output=True, text=True, env=environment(home),
                          timeout=300, cwd=home)  # fmt: skip


def test_the_command_in_a_process(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    args = ("--policies", "static,random", "--bits", "5", "--limit", "2", "--json", "r.json", "--model",
            str(tiny_folder), "--data", str(data), "--datasets", "bbh", "--device", "cpu")  # fmt: skip
    begun = forked.Popen(command(*args, home=tmp_path), env=environment(tmp_path), cwd=tmp_path,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("eval/*.sqlite")) and begun.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    begun.send_signal(signal.SIGTERM)
    assert begun.wait(60) in (0, 128 + signal.SIGTERM), begun.stderr.read()  # type: ignore[union-attr]
    done = run(*args, "--plot", "r.png", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "static and random at 5 bits" in done.stdout
    found = json.loads((tmp_path / "r.json").read_text())
    keys = {"policy", "bits", "kl", "kl_interval", "top1", "perplexity", "bytes_per_token", "seed", "dataset", "n"}
    assert all(keys <= set(row) for row in found["rows"])
    assert [(r["policy"], r["seed"]) for r in found["rows"]] == [("static", None), *(("random", i) for i in range(3))]
    assert {"model", "dtype", "group_size", "gears", "kv_cache", "intervals"} <= set(found["conditions"])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "eval").glob("*.sqlite"))) == 1
    alone = run(*(a for a in args if a != "r.json"), home=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout)["rows"] == found["rows"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--bits", "5"], "--policies '' names none"),
        (["--policies", "static,"], "names none"),
        (["--policies", "static", "needle"], "give it without 'needle'"),
        (["--policies", "best", "--datasets", "text"], "there is no text in '../shared/data'"),
        (["--policies", "static", "--data", "nowhere"], "there is no text in 'nowhere'"),
        (["--policies", "static", "--bits", "0"], "--bits has a number out of range"),
        (["--policies", "static", "--datasets", "mmlu"], "--datasets has 'mmlu'"),
        (["--policies", "static", "--limit", "0"], "--limit is 0"),
        (["--policies", "static", "--seeds", "0"], "--seeds is 0"),
        (["--policies", "static", "--json", "/no/such/folder/r.json"], "/no/such/folder"),
        (["--policies", "static", "--plot", "r.jpg"], "png"),
    ],
)
def test_bad_input_is_one_line(args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QBE_DATA", raising=False)
    assert says in refused("eval", *args, home=tmp_path, cwd=tmp_path)
