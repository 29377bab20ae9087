"""Requests of recurrent models and hybrids share steps: what they say, and what becomes of their states' slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import qbe
from conftest import byte_tokenizer
from engine_models import CONFIGS, NO_SITES, build, greedy, prompts, request, run
from qbe.budget import Budget
from qbe.engine.adaptive.activation_statistics import ActivationStats
from qbe.engine.core import Core
from qbe.engine.scheduling import kv_size
from server_running import running

PARAMS = qbe.SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
TEXTS = ["What is the capital of France?", "x", "one two three " * 5, "Write a function that reverses a list. " * 2]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def engine_of(name: str, **options: Any) -> qbe.Engine:
    torch.manual_seed(0)
    kind, arguments = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**{**arguments, "vocab_size": 320})
    )
    model = model.float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.2)
    given = {"policy": "uniform", "device": "cpu", "records": False, "max_sequences": 4} | options
    return qbe.Engine(model, tokenizer=byte_tokenizer(), **given)


@pytest.fixture(scope="module", params=["granite-moe-hybrid", "mamba", "qwen3-next", "lfm2"])
def engine(request: pytest.FixtureRequest) -> Iterator[qbe.Engine]:
    with engine_of(request.param, max_batch_tokens=48) as found:
        yield found


def free_slots(engine: qbe.Engine) -> int:
    slots = engine.core.scheduler.slots
    assert slots is not None
    return slots.free


def test_answers_in_a_batch_of_several_precisions_are_those_of_each_alone(engine: qbe.Engine) -> None:
    """Prompts longer than a step, and rows of 4, 6, 8 and 16 bits beside each other."""
    requests = [
        qbe.Request(t, PARAMS, Budget(bits=b)) for t, b in zip(TEXTS * 2, (4, 16, 8, 6, 8, 4, 6, 16), strict=True)
    ]
    alone = [engine.generate_batch([r])[0].token_ids for r in requests]
    rows: list[int] = []
    step = engine.core.runner.step
    engine.core.runner.step = lambda work: rows.append(len(work)) or step(work)  # type: ignore[method-assign]
    together = engine.generate_batch(requests)
    del engine.core.runner.step
    assert [r.token_ids for r in together] == alone
    assert max(rows) == 4
    assert together[0].average_weight_bits < 6 < together[1].average_weight_bits == 16
    assert len({tuple(a) for a in alone}) > 5, "precisions and prompts that say the same test nothing"
    assert free_slots(engine) == 4


def test_what_a_prompt_shows_to_a_policy_is_the_same_beside_others(engine: qbe.Engine) -> None:
    def stats(others: list[str]) -> ActivationStats:
        keys = [engine.submit(qbe.Request(t, PARAMS, Budget(bits=8))) for t in [*others, TEXTS[3]]]
        found = engine.sequence(keys[-1]).activation_stats = ActivationStats.of(engine.table)
        while not engine.started(keys[-1]):
            engine.step()
        for key in keys:
            engine.cancel(key)
            engine.take_result(key)
        return found

    alone, beside = stats([]), stats(TEXTS[:2])
    assert alone.tokens == beside.tokens == len(TEXTS[3])
    for a, b in zip(alone.squares + alone.sums, beside.squares + beside.sums, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))


def test_a_cancelled_request_gives_its_slot_up_and_changes_nobody(engine: qbe.Engine) -> None:
    kept = qbe.Request(TEXTS[0], PARAMS, Budget(bits=6))
    alone = engine.generate_batch([kept])[0].token_ids
    first, second = engine.submit(qbe.Request(TEXTS[2], PARAMS, Budget(bits=8))), engine.submit(kept)
    for _ in range(8):
        engine.step()
    assert free_slots(engine) == 2
    engine.cancel(first)
    assert free_slots(engine) == 3
    third = engine.submit(qbe.Request(TEXTS[3], PARAMS, Budget(bits=4)))  # in the slot that was given up
    while not (engine.finished(second) and engine.finished(third)):
        engine.step()
    assert engine.take_result(second).token_ids == alone
    assert engine.take_result(third).token_ids == engine.generate(TEXTS[3], PARAMS, budget=Budget(bits=4)).token_ids
    assert engine.take_result(first).finish_reason == "cancelled"


def test_slots_that_do_not_follow_one_another_are_read_and_written_where_they_are(engine: qbe.Engine) -> None:
    requests = [
        qbe.Request(t, replace(PARAMS, max_tokens=n), Budget(bits=8))
        for t, n in zip(TEXTS, (24, 3, 24, 24), strict=True)
    ]
    alone = [engine.generate_batch([r])[0].token_ids for r in requests]
    keys, groups = [engine.submit(r) for r in requests], []
    mixers = engine.core.runner.mixers
    assert mixers is not None
    step, size = engine.core.runner.step, engine.core.states.slot_bytes(None)

    def watched(work: Any) -> Any:
        groups.append([w.sequence.state_slot.at // size for w in work])
        return step(work)

    engine.core.runner.step = watched  # type: ignore[method-assign]
    while not all(map(engine.finished, keys)):
        engine.step()
    del engine.core.runner.step
    assert [engine.take_result(key).token_ids for key in keys] == alone
    assert [0, 2, 3] in [sorted(g) for g in groups]  # the second one has left a hole


def test_a_preempted_request_begins_again_and_says_the_same() -> None:
    model, texts = build("bamba"), prompts(100, 90, 80)
    expected = [greedy(model, p, 60) for p in texts]
    core = Core(model, NO_SITES, max_batch_tokens=32, max_sequences=3, kv_tokens=6 * 64)
    requests = [request(str(i), p, max_tokens=60) for i, p in enumerate(texts)]
    assert run(core, *requests) == expected
    assert sum(r.preemptions for r in requests) > 0
    assert core.scheduler.slots is not None
    assert core.scheduler.slots.free == 3
    assert core.scheduler.allocator.free == core.scheduler.allocator.num_pages


def test_where_memory_holds_the_states_of_two_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qbe.engine.setup.state_slots", lambda *_: 2)
    model, texts = build("mamba2"), prompts(9, 12, 5, 30)
    expected = [greedy(model, p, 8) for p in texts]
    core = Core(model, NO_SITES, max_sequences=4)
    assert "room for the recurrent states of 2 sequences" in caplog.text
    assert core.states is not None
    size = core.states.slot_bytes(None)
    assert len(core.states.memory) == 3 * size
    requests = [request(str(i), p, max_tokens=8) for i, p in enumerate(texts)]
    for r in requests:
        core.add(r)
    core.step()
    assert [r.state_slot and r.state_slot.at // size for r in requests] == [0, 1, None, None]
    assert run(core) == []
    assert [r.output_ids for r in requests] == expected


def test_slots_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_size, "free_memory", lambda _: 1000)
    cpu = torch.device("cpu")
    assert [kv_size.state_slots(16, cpu, size) for size in (1, 30, 100, 400)] == [16, 10, 3, 1]
    assert kv_size.state_slots(16, cpu, 30, coming=500) == 5


def test_bits_change_in_the_middle_of_an_answer() -> None:
    """A refresh: the state goes on, tokens to come have other bits; computed again after it, all have theirs."""
    with engine_of("granite-moe-hybrid") as engine:
        low, high = (engine.explain(TEXTS[0], budget=Budget(bits=b)).blueprint for b in (4, 16))
        answers = []
        for restart in (False, True):
            key = engine.submit(qbe.Request(TEXTS[0], PARAMS, Budget(bits=4)))
            sequence = engine.sequence(key)
            while len(sequence.output_ids) < 10:
                engine.step()
            assert engine.core.refresh(sequence, high)
            if restart:
                engine.core.scheduler.restart(sequence)
            while not engine.finished(key):
                engine.step()
            assert [b.weight_bits for b, _ in sequence.parts] == [low.weight_bits, high.weight_bits]
            answers.append(engine.take_result(key).token_ids)
        assert answers[0] == answers[1] != engine.generate(TEXTS[0], PARAMS, budget=Budget(bits=4)).token_ids


def test_over_http_requests_that_come_together_get_the_answers_of_each_alone() -> None:
    with running(lambda: engine_of("granite-moe-hybrid")) as server:
        bodies = [
            {"prompt": t, "max_tokens": 16, "temperature": 0, "qbe": {"bits": b}}
            for t, b in zip(TEXTS, (16, 6, 8, 6), strict=True)
        ]
        alone = [server.post("completions", body).json()["choices"][0]["text"] for body in bodies]
        found: list[Any] = [None] * len(bodies)

        def ask(i: int) -> None:
            found[i] = server.post("completions", bodies[i])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert [f.status_code for f in found] == [200] * 4
        assert [f.json()["choices"][0]["text"] for f in found] == alone
        assert free_slots(server.engine) == 4
