"""Every option on every kind of model: it has its effect, or a line says that it has none (`qbe.compatibility`)."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import qbe
from conftest import byte_tokenizer
from engine_models import CONFIGS
from qbe.budget import Budget
from qbe.compatibility import ANYWHERE, ENGINE, REQUEST, SITUATIONS, Situation, check_engine, check_request, limit
from qbe.engine.execution.runner import Runner
from qbe.engine.result import Result
from qbe.errors import QBEError
from qbe.refresh.thresholds import Thresholds

KINDS = {
    "attention": "llama",
    "sliding windows": "mistral-sliding",
    "experts": "mixtral",
    "latent attention": "deepseek-v3",
    "attention and recurrent layers": "granite-moe-hybrid",
    "recurrent layers alone": "mamba2",
    "one sequence a forward": "phi3-longrope",
}
PROMPT = "one two one two " * 9
PARAMS = qbe.SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)


@dataclasses.dataclass
class Started:
    """An engine with every option that it can be started with, and what was said of them."""

    engine: qbe.Engine
    warned: list[str]
    compiled: bool


def start(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Compiling takes minutes, so that it is only counted."""
    torch.manual_seed(0)
    name, arguments = CONFIGS[KINDS[kind]]
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**{**arguments, "vocab_size": 320})
    )
    model = model.float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.2)
    compiled: list[int] = []
    monkeypatch.setattr(Runner, "compile_steps", lambda *_, **__: compiled.append(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = qbe.Engine(
            model, tokenizer=byte_tokenizer(), device="cpu", records=False, blueprint_cache=folder / kind, compile=True,
            speculate=True, rows="shared", tune=True, kv_tokens=640, max_batch_tokens=48, analysis_tier=3,
        )  # fmt: skip
    return Started(engine, [str(w.message) for w in caught], bool(compiled))


@pytest.fixture(scope="module", params=KINDS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Started]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qbe.sites.ACTIVATION_LOSS", 1e9)  # random sites cost more than real ones: all take 8 bits
        found = start(request.param, tmp_path_factory.mktemp("cache"), patch)
        found.engine._table = replace(found.engine.table, difficult_entropy=0.0)  # all tokens are hard
        yield request.param, found
        found.engine.close()


def steps_of_a_prompt(engine: qbe.Engine) -> int:
    key, steps = engine.submit(qbe.Request(PROMPT, PARAMS)), 0
    while not engine.started(key):
        engine.step()
        steps += 1
    engine.cancel(key)
    engine.take_result(key)
    return steps


OF_ENGINE: dict[str, Callable[[Started], bool]] = {
    "compile": lambda s: s.compiled,
    "speculate": lambda s: s.engine.core.speculator is not None,
    "rows": lambda s: s.engine.core.plan.shared is not None,
    "tune": lambda s: s.engine._tuner is not None,
    "kv_tokens": lambda s: s.engine.core.pool.num_pages == 640 // 64,
    "analysis_tier": lambda s: s.engine.explain("hi").profile.tier == 3,
    "blueprint_cache": lambda s: [s.engine.explain("hello").cache for _ in range(2)][1] == "exact",
    "max_batch_tokens": lambda s: steps_of_a_prompt(s.engine) > 1,
}
"""Whether an option that the engine was started with has had its effect."""

OF_REQUEST: dict[str, tuple[Budget, bool, Callable[[Result, bool], bool]]] = {
    "high_precision_tokens": (
        Budget(bits=6, activation_bits=8, high_precision_tokens=True), False, lambda r, _: r.high_precision_tokens > 0,
    ),
    "refresh": (Budget(refresh=True, refresh_interval=2, refresh_count=1), False, lambda r, _: len(r.refreshes) > 0),
    "cascade": (Budget(bits=6, cascade=True), False, lambda r, _: r.raised_tokens + r.lowered_tokens > 0),
    "kv_bits": (Budget(bits=6, kv_bits=4), False, lambda r, _: r.average_kv_bits < 16),
    "kv_error": (Budget(bits=6, kv_bits=4, kv_error=0.1), False, lambda r, _: r.kv_error == 0.1),
    "state_bits": (Budget(bits=6, state_bits=8), False, lambda r, _: r.blueprint.least_state_bits == 8),
    "speculate": (Budget(bits=6), True, lambda _, drafts: drafts),
}  # fmt: skip
"""What to ask for, whether to speculate, and whether that had its effect: by the result, and whether it could draft."""


def answer(engine: qbe.Engine, budget: Budget, speculate: bool) -> tuple[Result, bool]:
    key = engine.submit(qbe.Request(PROMPT, replace(PARAMS, speculate=speculate), budget))
    drafts = engine.sequence(key).speculation is not None
    while not engine.finished(key):
        engine.step()
    return engine.take_result(key), drafts


def met(kind: str, started: Started, option: str, of: Any = REQUEST) -> tuple[str, str] | None:
    """What becomes of an option that does nothing, and its line; the cascade is trained for no model here."""
    name = started.engine.table.model_name
    not_trained = (
        f"the cascade has not been trained for {name}; run 'qbe train cascade --model {name}', or leave it out"
    )
    situation = replace(SITUATIONS[kind], no_cascade=not_trained)
    found = limit(option, situation, of)
    return None if found is None else (found.outcome, found.line(situation))


@pytest.mark.parametrize("option", OF_ENGINE)
def test_what_an_engine_is_started_with(started: tuple[str, Started], option: str) -> None:
    kind, found = started
    expected = met(kind, found, option, ENGINE)
    assert OF_ENGINE[option](found) == (expected is None)
    assert [w for w in found.warned if w.startswith(f"{option} ")] == ([] if expected is None else [expected[1]])


@pytest.mark.parametrize("option", OF_REQUEST)
def test_what_a_request_asks_for(started: tuple[str, Started], option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, found = started
    budget, speculate, has_effect = OF_REQUEST[option]
    hard = Thresholds(hard_entropy=-1.0, easy_entropy=-1.0, hard_margin=1e9, easy_margin=1e9, windows=1)
    monkeypatch.setattr(found.engine._selector, "_learned", hard)
    expected = met(kind, found, option)
    if expected is None:
        result, drafts = answer(found.engine, budget, speculate)
        assert has_effect(result, drafts)
        assert result.error is None
        assert not result.ignored
        return
    outcome, line = expected
    if outcome == "refused":
        with pytest.raises(QBEError, match="does nothing here") as refused:
            answer(found.engine, budget, speculate)
        assert str(refused.value) == line
        assert refused.value.field == option
        assert "\n" not in line
        budget = replace(budget, best_effort=True)
    result, drafts = answer(found.engine, budget, speculate)
    assert not has_effect(result, drafts)
    assert result.ignored[option] == result.describe()["usage"]["ignored"][option] == line
    assert len(result.token_ids) == PARAMS.max_tokens


def test_a_policy_without_a_score_cannot_be_refreshed(started: tuple[str, Started]) -> None:
    kind, found = started
    with pytest.raises(QBEError, match="a forward of its own" if kind == "one sequence a forward" else "same bits"):
        found.engine.explain(PROMPT, budget=Budget(refresh=True), policy="uniform")
    left = found.engine.explain(PROMPT, budget=Budget(refresh=True, best_effort=True), policy="uniform")
    assert list(left.ignored) == list(left.describe()["ignored"]) == ["refresh"]


def test_options_that_exclude_speculation_say_so() -> None:
    for situation in (Situation(bounded=True), Situation(high_precision=True), Situation(drafts=False)):
        assert list(check_request(["speculate"], situation)) == ["speculate"]


def test_every_option_is_in_the_table_or_works_everywhere() -> None:
    from qbe.server.protocol import Contract

    limited = {found.option for found in (*ENGINE, *REQUEST)}
    there = set(inspect.signature(qbe.Engine).parameters) | {f.name for f in dataclasses.fields(Budget)}
    there |= {"speculate"} | set(Contract.model_fields)
    assert limited | set(ANYWHERE) == there
    assert not limited & set(ANYWHERE)
    assert set(OF_ENGINE) == {found.option for found in ENGINE}
    assert set(OF_REQUEST) == {found.option for found in REQUEST}


def test_inside_vllm_arguments_that_it_cannot_honour_are_unknown() -> None:
    from qbe.vllm.request_options import RequestOptions

    refused = {found.option for found in REQUEST if found.meets(SITUATIONS["in vLLM"])}
    for option in refused:
        with pytest.raises(QBEError, match="unknown argument"):
            RequestOptions.of({f"qbe_{option}": 1})
    assert "refresh" not in refused


def test_a_policy_with_demands_of_its_own_says_which_options_it_leaves_unused() -> None:
    learned = SITUATIONS["a learned policy"]
    for option in ("analysis_tier", "blueprint_cache"):
        with pytest.warns(RuntimeWarning, match=f"{option} does nothing here, because the policy"):
            check_engine([option], learned)


def test_a_tokenizer_that_would_not_be_used_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(QBEError, match="tokenizer is for a model given in memory"):
        qbe.Engine(str(tiny_folder), tokenizer=byte_tokenizer())
