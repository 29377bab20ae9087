"""Likelihoods of continuations, and the adapter for lm-evaluation-harness (where that is installed)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from cli_process import cache_at
from conftest import as_read, byte_tokenizer, tiny_llama
from qbe import Budget, Engine, QBEError
from qbe.eval.likelihood import Continuation, likelihoods


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "!"
    with Engine(tiny_llama(), tokenizer=tokenizer, device="cpu", records=False) as made:
        yield made


@torch.inference_mode()
def expected(engine: Engine, before: str, text: str, bits: int = 16) -> tuple[float, bool]:
    model, tokenizer = (
        as_read(engine.model, tiny_llama(), {s.name: bits for s in engine.table.nested}),
        engine.tokenizer,
    )
    ids, labels = tokenizer(before + text)["input_ids"], torch.tensor(tokenizer(text)["input_ids"])
    logs = model(input_ids=torch.tensor([ids])).logits[0, -len(labels) - 1 : -1].log_softmax(-1)
    return float(logs.gather(1, labels[:, None]).sum()), bool((logs.argmax(-1) == labels).all())


def test_likelihoods_are_the_models(engine: Engine) -> None:
    def ids(text: str) -> list[int]:
        return engine.tokenizer(text)["input_ids"]

    pairs = [
        ("The lamp was", " lit", 16),
        ("The lamp was", " out at dusk", 4),
        ("A", "B", 6),
        ("x" * 300, "y" * 90, 16),
    ]
    items = []
    for before, text, bits in pairs:
        blueprint = engine.explain(before, budget=Budget(bits=bits, kv_bits=16), policy="uniform").blueprint
        items.append(Continuation(ids(before), ids(text), blueprint))
    for (before, text, bits), (value, greedy) in zip(pairs, likelihoods(engine.core, items), strict=True):
        assert value == pytest.approx(expected(engine, before, text, bits)[0], rel=2e-3)
        assert greedy == expected(engine, before, text, bits)[1]
    written = engine.generate("The lamp was", budget=Budget(bits=16), policy="uniform").token_ids[:9]
    (found,) = likelihoods(engine.core, [Continuation(ids("The lamp was"), written, items[0].blueprint)])
    assert found[1], "what greedy decoding writes is greedy"
    long = Continuation(ids("z" * 700), ids(" end"), items[0].blueprint)
    cut = Continuation(ids("z" * 508), ids(" end"), items[0].blueprint)
    assert likelihoods(engine.core, [long])[0][0] == pytest.approx(likelihoods(engine.core, [cut])[0][0])
    with pytest.raises(QBEError, match="context is 512"):
        likelihoods(engine.core, [Continuation([1], [2] * 600, items[0].blueprint)])


@pytest.fixture(scope="module")
def adapter(engine: Engine) -> Any:
    pytest.importorskip("lm_eval")
    from qbe.eval.harness import QBEModel

    return QBEModel(engine, policy="uniform", bits=6)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]


def test_the_harness_asks_for_likelihoods(adapter: Any, engine: Engine) -> None:
    asked = instances("loglikelihood", ("The lamp was", " lit"), ("", "Dusk"), ("Trailing ", "space"))
    first, second, third = adapter.loglikelihood(asked, disable_tqdm=True)
    assert first[0] == pytest.approx(expected(engine, "The lamp was", " lit", 6)[0], rel=2e-3)
    assert second[0] == pytest.approx(expected(engine, "!", "Dusk", 6)[0], rel=2e-3)
    assert third[0] == pytest.approx(expected(engine, "Trailing", " space", 6)[0], rel=2e-3)
    short, long = adapter.loglikelihood_rolling(instances("loglikelihood_rolling", ("Dusk",), ("lamp " * 200,)))
    assert short == pytest.approx(second[0], rel=1e-5)
    assert long < short


def test_the_harness_asks_for_text(adapter: Any, engine: Engine) -> None:
    asked = instances(
        "generate_until", ("The lamp", {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}),
        ("The lamp", {"until": "", "max_new_tokens": 4}), ("w" * 900, {"max_gen_toks": 5}),
    )  # fmt: skip
    eight, four, _ = adapter.generate_until(asked)
    from qbe.engine.sampling.sampling_params import SamplingParams

    own = engine.generate("The lamp", SamplingParams(max_tokens=8), budget=Budget(bits=6), policy="uniform").text
    assert eight == own.partition("\n\n")[0]
    assert own.startswith(four)
    with pytest.raises(QBEError, match="leave no room"):
        adapter.generate_until(instances("generate_until", ("x", {"max_gen_toks": 600})))


def test_a_task_of_the_harness_in_a_process(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"question": f"{i} or {i + 1}?", "choices": [str(i), str(i + 1)], "answer": i % 2} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "which.yaml").write_text(
        f"task: which\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path}/rows.jsonl\ntest_split: train\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n"
    )
    done = forked.run(
        [sys.executable, "-m", "qbe.eval.harness", "run", "--model", "qbe", "--model_args",
         f"model={tiny_folder},policy=uniform,bits=4", "--device", "cpu", "--tasks", "which",
         "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=400, cwd=tmp_path,
        env={**os.environ, **cache_at(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(found.read_text())["results"]["which"]["acc,none"] <= 1


def test_the_command_of_a_missing_harness_ends_in_one_line(tmp_path: Path) -> None:
    code = "import sys, runpy; sys.modules['lm_eval'] = None; runpy.run_module('qbe.eval.harness', run_name='__main__')"
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'qbe[lm-eval]'" in done.stderr


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "qbe.eval.harness", raising=False)
    with pytest.raises(QBEError, match=r"pip install 'qbe\[lm-eval\]'"):
        import qbe.eval.harness  # noqa: F401
