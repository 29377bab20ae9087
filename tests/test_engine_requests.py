"""What an engine refuses, and requests that end early: closed streams, interrupted batches, threads."""

from __future__ import annotations

import threading

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import ARITHMETIC, CODE, FACT
from qbe import Budget, Engine, QBEError, Request, SamplingParams


@pytest.fixture(scope="module")
def engine(device: torch.device) -> Engine:
    return Engine(tiny_llama(), tokenizer=byte_tokenizer(), device=device.type, records=False)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ("x" * 600, "context"),
        ("bad \udcff byte", "UTF-8"),
        ([], "conversation"),
        ([{"role": "user"}], "conversation"),
        (5, "conversation"),
        (b"hi", "conversation"),
        (["hi"], "conversation"),
        ({"role": "user", "content": "hi"}, "conversation"),
    ],
)
def test_bad_prompts_are_one_line(engine: Engine, prompt: object, says: str) -> None:
    with pytest.raises(QBEError, match=says) as error:
        engine.generate(prompt, SamplingParams(max_tokens=4))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_refused_request_in_a_batch_leaves_nothing_behind(engine: Engine) -> None:
    free = engine.core.scheduler.allocator.free
    with pytest.raises(QBEError, match="lowest average"):
        engine.generate_batch([Request(FACT), Request(FACT, budget=Budget(bits=3))])
    assert not engine.core.has_work()
    assert engine.core.scheduler.allocator.free == free


def test_chat_messages_use_the_template(engine: Engine) -> None:
    asked = engine.generate([{"role": "user", "content": FACT}], SamplingParams(max_tokens=3))
    plain = engine.generate(f"user: {FACT}\nassistant: ", SamplingParams(max_tokens=3), budget=Budget(bits=16))
    assert asked.prompt_tokens == plain.prompt_tokens


def test_a_message_may_be_empty(engine: Engine) -> None:
    """As OpenAI's may: what its template adds is a prompt."""
    asked = engine.generate([{"role": "user", "content": ""}], SamplingParams(max_tokens=3))
    assert asked.prompt_tokens == engine.generate("user: \nassistant: ", SamplingParams(max_tokens=3)).prompt_tokens
    assert 0 <= asked.profile.score <= 1


@pytest.mark.parametrize("template", ["{{ raise_exception('no such role') }}", "{{ oh", "{{ messages[0].a.b }}"])
def test_a_chat_template_that_fails_is_one_line(engine: Engine, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    with pytest.raises(QBEError, match="the chat template of LlamaForCausalLM fails") as error:
        engine.generate([{"role": "user", "content": FACT}])
    assert "\n" not in str(error.value)
    assert not engine.core.has_work()


def test_bad_arguments() -> None:
    model = tiny_llama()
    with pytest.raises(QBEError, match="needs its tokenizer"):
        Engine(model)
    with pytest.raises(QBEError, match="unknown policy"):
        Engine(model, tokenizer=byte_tokenizer(), policy="gold")
    with pytest.raises(QBEError, match="unknown device"):
        Engine(model, tokenizer=byte_tokenizer(), device="abacus")


def test_a_closed_stream_ends(engine: Engine) -> None:
    free = engine.core.scheduler.allocator.free
    stream = engine.stream(FACT, SamplingParams(max_tokens=60))
    read = []
    for piece in stream:
        read.append(piece)
        if len(read) == 2:
            stream.close()
    assert len(read) == 2
    assert stream.result.finish_reason == "cancelled"
    unread = engine.stream(FACT, SamplingParams(max_tokens=60))
    unread.close()
    assert list(unread) == []
    assert unread.result.token_ids == []
    assert engine.core.scheduler.allocator.free == free
    assert len(repr(unread.result)) < 5000


def test_threads_share_an_engine(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12)
    prompts = [FACT, CODE, ARITHMETIC, "one two three"]
    expected = [engine.generate(p, params).token_ids for p in prompts]
    found: dict[int, list[object]] = {}

    def ask(i: int) -> None:
        found[i] = [engine.generate(prompts[i], params).token_ids, "".join(engine.stream(prompts[i], params))]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert [found[i][0] for i in range(4)] == expected
    assert [found[i][1] for i in range(4)] == [engine.generate(p, params).text for p in prompts]


def test_a_stream_nobody_reads_does_not_go_on(engine: Engine) -> None:
    free = engine.core.scheduler.allocator.free
    unread = engine.stream(FACT, SamplingParams(max_tokens=50))
    del unread
    assert not engine.core.has_work()
    started = engine.stream(FACT, SamplingParams(max_tokens=5))
    first = iter(started)
    next(first)
    with pytest.raises(RuntimeError, match="read once"):
        next(iter(started))
    assert list(first) is not None
    assert engine.core.scheduler.allocator.free == free


def test_an_interrupted_batch_leaves_nothing_running(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = engine.core.runner.step, []

    def interrupt(work):  # type: ignore[no-untyped-def]
        calls.append(work)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step(work)

    with monkeypatch.context() as m:
        m.setattr(engine.core.runner, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate_batch([Request(FACT), Request(CODE)])
    assert not engine.core.has_work()
    assert not engine._live


def test_a_policy_that_fails_ends_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a batch, at its third token, which is not lost without a word."""

    def refresh(live):  # type: ignore[no-untyped-def]
        if live.request.params.max_tokens == 7 and live.tokens == 2:
            raise RuntimeError("a defect")

    both = [Request(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in ((FACT, 7), (CODE, 5))]
    with monkeypatch.context() as m:
        m.setattr(engine, "_refresh", refresh)
        failed, other = engine.generate_batch(both)
    assert failed.finish_reason == "error"
    assert failed.error == "its policy failed while it was answered (RuntimeError)"
    assert (other.finish_reason, len(other.token_ids)) == ("length", 5)
    assert not engine._live
    assert not engine.core.has_work()


def test_a_tiny_temperature_is_greedy(engine: Engine) -> None:
    greedy = engine.generate(FACT, SamplingParams(max_tokens=6)).token_ids
    assert engine.generate(FACT, SamplingParams(max_tokens=6, temperature=1e-300)).token_ids == greedy


def test_a_closed_engine_and_a_nested_model_are_refused() -> None:
    model = tiny_llama()
    engine = Engine(model, tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False)
    engine.close()
    with pytest.raises(QBEError, match="closed"):
        engine.generate(FACT)
    with pytest.raises(QBEError, match="nested already"):
        Engine(model, tokenizer=byte_tokenizer(), device="cpu")
    for name in ("kv_tokens", "max_batch_tokens", "max_sequences"):
        with pytest.raises(QBEError, match=name):
            Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", **{name: 0})
    for size in (1.5, 2**40):
        with pytest.raises(QBEError, match="kv_tokens"):
            Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", kv_tokens=size)
    with pytest.raises(QBEError, match="free on cpu hold at most"):
        Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", kv_tokens=2**39)
    with pytest.raises(QBEError, match="keeps its dtype"):
        Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", dtype="bfloat16")
