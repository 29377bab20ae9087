"""A finished answer scored by the widest gear: what teacher forcing says offline, in steps that can be left."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from conftest import byte_tokenizer, tiny_llama
from engine_models import build
from qbe import Budget, Engine, Request, SamplingParams
from qbe.engine.sampling.answer_scoring import AnswerScore, AnswerScoring, widest
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError
from qbe.eval.fidelity import Teacher

PROMPT = "a prompt of some length, so that its pages are full. " * 3
GREEDY = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = {"policy": "uniform", "records": False, "blueprint_cache": False, "max_sequences": 4, "kv_tokens": 2048}
    with Engine(tiny_llama(), tokenizer=byte_tokenizer(), max_batch_tokens=48, rows="shared", **options) as made:  # type: ignore[arg-type]
        yield made


def answered(engine: Engine, budget: Budget, params: SamplingParams = GREEDY, prompt: str = PROMPT) -> Sequence:
    """A finished request, as a server has it."""
    key = engine.submit(Request(prompt, params, budget))
    sequence = engine.sequence(key)
    while not engine.finished(key):
        engine.step()
    engine.take_result(key)
    return sequence


def scored(scoring: AnswerScoring) -> AnswerScore:
    while (found := scoring.step()) is None:
        pass
    return found


@pytest.mark.parametrize(
    "budget",
    [Budget(bits=4), Budget(bits=6, activation_bits=8), Budget(bits=8, kv_bits=2), Budget(bits=16)],
    ids=["4 bits", "8-bit activations", "2-bit KV", "widest"],
)
def test_it_agrees_with_the_offline_measure(engine: Engine, budget: Budget) -> None:
    served = answered(engine, budget)
    found = scored(AnswerScoring(engine.core, served, 128))
    teacher = Teacher(engine.core, widest(engine.table), served.prompt_ids, served.output_ids, engine.table)
    offline = teacher.compare(served.blueprint)
    assert found.tokens == offline.tokens == 90
    assert found.kl == pytest.approx(offline.kl / 90, rel=0.01, abs=1e-7)
    assert found.top1 == pytest.approx(offline.agreed / 90)
    assert found.reference_bits == 16
    assert len(found.windows) == 90 // 32
    assert min(margin for _, _, margin in found.windows) > 0
    assert all(0 < entropy < math.log(engine.core.vocabulary) for _, entropy, _ in found.windows)
    if budget.bits == 16:
        assert found.kl < 1e-6
        assert found.flip_margin is None
    else:
        assert found.kl > 1e-5
    assert not engine.core.has_work()


def test_a_score_that_is_left_again_and_again_is_the_same(engine: Engine) -> None:
    served = answered(engine, Budget(bits=4))
    whole = scored(AnswerScoring(engine.core, served, 128))
    scoring, left = AnswerScoring(engine.core, served, 128, inputs=True), 0
    for step in range(1, 100):
        if (found := scoring.step()) is not None:
            break
        if step % 3 == 0:
            scoring.leave()
            left += 1
            assert not engine.core.has_work()
    assert left >= 2
    assert found is not None
    assert found.kl == pytest.approx(whole.kl, rel=1e-3)
    assert found.opening_kl == pytest.approx(whole.opening_kl, rel=1e-3)
    assert not found.inputs, "an interruption gives them up"


def test_what_it_leaves_in_the_cache_is_found_by_nobody(engine: Engine) -> None:
    served = answered(engine, Budget(bits=4), prompt=f"another {PROMPT}")
    before = engine.core.scheduler.allocator.free_bytes
    scored(AnswerScoring(engine.core, served, 128))
    assert engine.core.scheduler.allocator.free_bytes == before
    fresh = answered(engine, Budget(bits=16), prompt=f"another {PROMPT}")
    assert fresh.paging.cached == 0


def test_part_of_a_long_answer_is_scored(engine: Engine) -> None:
    served = answered(engine, Budget(bits=4))
    whole = scored(AnswerScoring(engine.core, served, 90))
    parts = [scored(AnswerScoring(engine.core, served, 45, at)) for at in (0.0, 0.999)]
    assert [p.first for p in parts] == [0, 45]
    assert sum(p.kl for p in parts) / 2 == pytest.approx(whole.kl, rel=0.01)
    assert parts[0].opening_kl == pytest.approx(whole.opening_kl, rel=1e-3)
    assert parts[1].opening_kl is None


def test_it_is_scored_at_the_bits_that_each_token_had(engine: Engine) -> None:
    """A blueprint that was exchanged in the middle, and tokens of high precision."""
    key = engine.submit(Request(PROMPT, GREEDY, Budget(bits=4, activation_bits=8)))
    sequence = engine.sequence(key)
    while not engine.finished(key):
        engine.step()
        if len(sequence.output_ids) == 30:
            engine.core.refresh(sequence, engine.explain(PROMPT, budget=Budget(bits=16)).blueprint)
    engine.take_result(key)
    assert len(sequence.blueprint_history.earlier) == 1
    found = scored(AnswerScoring(engine.core, sequence, 128))
    low = scored(AnswerScoring(engine.core, answered(engine, Budget(bits=4, activation_bits=8)), 128))
    assert 0 < found.kl < low.kl
    late = scored(AnswerScoring(engine.core, sequence, 50, 0.999))
    assert late.kl < found.kl, "only what the cache holds is of 4 bits"


def test_greedy_tokens_are_the_likeliest_of_what_was_served(engine: Engine) -> None:
    found = scored(AnswerScoring(engine.core, answered(engine, Budget(bits=4)), 128))
    assert max(found.behind) < 1e-3
    drawn = SamplingParams(max_tokens=90, temperature=3.0, seed=1, ignore_eos=True)
    assert max(scored(AnswerScoring(engine.core, answered(engine, Budget(bits=4), drawn), 128)).behind) > 0.5


def test_inputs_are_seen(engine: Engine) -> None:
    found = scored(AnswerScoring(engine.core, answered(engine, Budget(bits=4)), 128, inputs=True))
    assert found.inputs_tokens >= len(PROMPT)
    seen = [x for x in found.inputs if x is not None]
    assert len(seen) == len(engine.table.nested) - 1, "all but the head"
    assert min(seen) > 0


@pytest.mark.parametrize("kind", ["mixtral", "mamba2", "granite-moe-hybrid", "phi3-longrope"])
def test_other_kinds_of_models_are_scored_alike(kind: str) -> None:
    """Experts, recurrent layers, and one sequence a forward."""
    model = build(kind, vocab_size=320)
    with Engine(
        model, tokenizer=byte_tokenizer(), policy="uniform", records=False, blueprint_cache=False, kv_tokens=640,
        max_batch_tokens=64, max_sequences=2,
    ) as made:  # fmt: skip
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        served = answered(made, Budget(bits=6), params, "a short prompt of some tokens")
        found = scored(AnswerScoring(made.core, served, 128))
        teacher = Teacher(made.core, widest(made.table), served.prompt_ids, served.output_ids, made.table)
        offline = teacher.compare(served.blueprint)
        assert found.kl == pytest.approx(offline.kl / 12, rel=0.01)
        assert found.top1 == pytest.approx(offline.agreed / 12)
        if kind == "phi3-longrope":
            long = answered(made, Budget(bits=6), params, "x" * 70)
            with pytest.raises(QBEError, match="in one step"):
                AnswerScoring(made.core, long, 128)


def test_what_cannot_be_scored_is_refused(engine: Engine) -> None:
    served = answered(engine, Budget(bits=4, kv_bits=2), prompt="x" * 400)
    served.cascade.moved = lambda blueprint, _: blueprint
    with pytest.raises(QBEError, match="cascade"):
        AnswerScoring(engine.core, served, 128)
