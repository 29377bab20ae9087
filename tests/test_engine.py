"""`qbe.Engine` as a user meets it: exact at 16 bits, different queries at different blueprints, no weight copied."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import ARITHMETIC, CODE, FACT
from qbe import Budget, Engine, QBEError, Request, SamplingParams
from qbe.records import RecordStore
from qbe.store.nested_linears import nested_linears


@pytest.fixture(scope="module")
def engine(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    records = tmp_path_factory.mktemp("engine") / "records.sqlite"
    return Engine(tiny_llama(), tokenizer=byte_tokenizer(), device=device.type, records=records)


def test_three_kinds_of_query_get_three_blueprints(engine: Engine) -> None:
    found = [engine.explain(p) for p in (FACT, ARITHMETIC, CODE)]
    assert len({e.blueprint.key for e in found}) == 3
    assert found[0].profile.score < min(found[1].profile.score, found[2].profile.score)


@pytest.mark.parametrize("bits", [4.5, 5.0, 6.3, 8.0])
def test_budgets_are_met(engine: Engine, bits: float) -> None:
    average = engine.explain(FACT, budget=Budget(bits=bits)).average_bits
    # tiny layers are large steps; a real model meets 0.05 (tests/test_policies.py, tests/test_engine_default_model.py)
    assert average <= bits + 1e-6
    assert average > bits - 0.35


def test_sixteen_bits_is_transformers(engine: Engine) -> None:
    plain = tiny_llama()
    prompts = [FACT, ARITHMETIC, CODE, "ab", "x" * 70]
    params = SamplingParams(max_tokens=40)
    ours = engine.generate_batch([Request(p, params, Budget(bits=16), "uniform") for p in prompts])
    for prompt, result in zip(prompts, ours, strict=True):
        ids = torch.tensor([engine.tokenizer(prompt)["input_ids"]])
        theirs = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert result.token_ids == theirs[0, ids.shape[1] :].tolist()
        assert result.finish_reason == "length"


def logits_of(engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Logits that each request saw, [tokens, V], in the order of the requests."""
    seen: dict[str, list[torch.Tensor]] = {}
    step = engine.core.runner.step

    def spy(work):  # type: ignore[no-untyped-def]
        scores = step(work)
        for row, sequence in zip(scores.logits, [w.sequence for w in work if w.samples], strict=True):
            seen.setdefault(sequence.request_id, []).append(row.float().cpu().clone())
        return scores

    with monkeypatch.context() as m:
        m.setattr(engine.core.runner, "step", spy)
        results = engine.generate_batch(requests)
    return [torch.stack(seen[r.id]) for r in results]


def test_rows_of_a_mixed_batch_equal_themselves_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=6)
    prompts = [FACT, CODE, ARITHMETIC, "one two three"]
    requests = [Request(p, params, Budget(bits=b), "uniform") for p, b in zip(prompts, (4, 6, 8, 16), strict=True)]
    together = logits_of(engine, requests, monkeypatch)
    alone = [logits_of(engine, [r], monkeypatch)[0] for r in requests]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
    assert not torch.allclose(together[0][0], logits_of(engine, [requests[0].__class__(
        FACT, params, Budget(bits=16), "uniform")], monkeypatch)[0][0], rtol=1e-3)  # fmt: skip


def test_a_new_blueprint_copies_no_weight(engine: Engine) -> None:
    def addresses() -> list[int | None]:
        return [
            t.data_ptr() if t is not None else None
            for _, _, w in nested_linears(engine.model)
            for t in (w.packed, w.meta, w.bits, w.original)
        ]

    def versions() -> list[int]:
        return [t._version for _, _, w in nested_linears(engine.model) for t in (w.packed, w.meta)]

    engine.generate(FACT, SamplingParams(max_tokens=2), budget=Budget(bits=4))
    before = addresses(), versions()
    for bits in (16, 8, 5.5, 4):
        engine.generate(FACT, SamplingParams(max_tokens=2), budget=Budget(bits=bits))
        assert (addresses(), versions()) == before


def test_the_plan_is_what_the_model_ran_at(engine: Engine) -> None:
    blueprint = engine.generate(FACT, SamplingParams(max_tokens=3), budget=Budget(bits=5.5)).blueprint
    assert engine.core.plan.precision_words[:, 0].tolist() == list(blueprint.weight_bits)


def test_streaming_gives_the_same_text_and_stops_at_stop_strings(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30)
    whole = engine.generate(FACT, params)
    stream = engine.stream(FACT, params)
    assert "".join(stream) == whole.text == stream.result.text
    middle = whole.text[10:13]
    stopped = engine.generate(FACT, SamplingParams(max_tokens=30, stop=(middle,)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(middle)]


def test_two_streams_interleave_and_a_dropped_one_frees_its_pages(engine: Engine) -> None:
    free = engine.core.scheduler.allocator.free
    params = SamplingParams(max_tokens=12)
    a, b = engine.stream(FACT, SamplingParams(max_tokens=200)), engine.stream(CODE, params)
    first = iter(a)
    next(first)
    assert "".join(b) == engine.generate(CODE, params).text
    first.close()
    assert a.result.finish_reason == "cancelled"
    assert engine.core.scheduler.allocator.free == free


def test_every_sampling_option_works_on_the_models_own_logits(engine: Engine) -> None:
    greedy = engine.generate(FACT, SamplingParams(max_tokens=8)).token_ids
    banned = engine.generate(FACT, SamplingParams(max_tokens=8, logit_bias={greedy[0]: -1e9})).token_ids
    assert greedy[0] not in banned
    penalised = engine.generate(FACT, SamplingParams(max_tokens=30, repetition_penalty=50.0)).token_ids
    assert len(set(penalised)) == 30
    narrow = SamplingParams(max_tokens=8, temperature=2.0, top_k=1)
    assert engine.generate(FACT, narrow).token_ids == greedy
    mixed = SamplingParams(
        max_tokens=8, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3
    )
    assert engine.generate(FACT, mixed).token_ids == engine.generate(FACT, mixed).token_ids


def test_seeds_repeat_and_do_not_depend_on_the_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=7)
    alone = engine.generate(FACT, params).token_ids
    assert alone == engine.generate(FACT, params).token_ids
    batch = engine.generate_batch(
        [Request(CODE, SamplingParams(max_tokens=10, temperature=1.0)), Request(FACT, params)]
    )
    assert batch[1].token_ids == alone


def test_every_request_leaves_one_record(engine: Engine, tmp_path: Path) -> None:
    store = engine._records
    assert store is not None
    before = store.count()
    result = engine.generate(ARITHMETIC, SamplingParams(max_tokens=4), budget=Budget(tier="priority"))
    record = store.list(1)[0]
    assert store.count() == before + 1
    assert (record.id, record.tier, record.completion_tokens) == (result.id, "priority", 4)
    assert record.weight_bits == result.blueprint.weight_bits
    computed = result.prompt_tokens - result.cached_tokens + 3
    assert sum(record.tokens_by_bits.values()) == pytest.approx(computed, abs=2)
    assert record.bytes_moved == 4 * result.bytes_per_token


def test_a_full_disk_does_not_stop_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=tmp_path / "r")

    def full(*_args: object) -> None:
        raise QBEError("the disk is full") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(RecordStore, "append", full)
    assert len(engine.generate(FACT, SamplingParams(max_tokens=3)).token_ids) == 3
