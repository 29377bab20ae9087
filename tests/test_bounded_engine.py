"""Bounded mode in the engine: 16-bit KV's logits at threshold 0, counts, faults."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import DEVICE, prompts, request, run
from qbe import Budget, Engine, QBEError, SamplingParams
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.scheduling.sequence import Sequence
from qbe.kernels.ops import bounded_attention as bounded_ops
from qbe.kernels.ops import paged_attention as attention_ops
from qbe.kvcache import originals
from qbe.kvcache.pages import PAGE_SIZE
from test_kv_engine import core, kv

TOKENS = 40


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bounded(error: float, *bits: Any) -> Blueprint:
    return replace(kv(*bits), kv_error=error)


def logits(c: Core, r: Sequence, steps: int) -> torch.Tensor:
    """Of so many tokens, its prompt's last one first."""
    c.add(r)
    found: list[torch.Tensor] = []
    plain = c.runner.step

    def step(work: Any) -> Any:
        out = plain(work)
        if any(w.samples for w in work):
            found.append(out[0][0].clone())
        return out

    c.runner.step = step  # type: ignore[method-assign]
    while len(found) < steps:
        c.step()
    c.runner.step = plain  # type: ignore[method-assign]
    c.cancel(r.request_id)
    return torch.stack(found)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2-softcap", "gpt-oss", "jamba"])
def test_threshold_0_is_16_bits(name: str) -> None:
    prompt = prompts(480)[0]  # on to where a stretch of pages begins, so that short windows see a quantised one
    wanted = logits(core(name), request("r", prompt, kv(16), max_tokens=90), 60)
    low = request("low", prompt, bounded(0.0, 4, 2), max_tokens=90)
    found = logits(core(name), low, 60)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert low.bounded.pages_raised == low.bounded.pages_read > 0
    rough = logits(core(name), request("rough", prompt, kv(4, 2), max_tokens=90), 60)
    assert not torch.allclose(rough, wanted, rtol=1e-3, atol=1e-3)


def test_a_huge_threshold_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attention of a bounded step is then the plain one over the same pages.

    Logits of a bounded run and a plain one are further apart: prompts round differently, and codes that lie between two
    then fall to different sides.
    """
    kernel, compared = bounded_ops.bounded_attention, []

    def both(*arguments: Any) -> torch.Tensor:
        *shared, entropy, _, _, _, scaling, window, softcap, sinks = arguments
        plain = attention_ops.paged_attention(*shared, entropy.clone(), scaling, window, softcap, sinks)
        out = kernel(*arguments)
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
        compared.append(len(out))
        return out

    c = core()  # before: its warm-up on a GPU is not to be compared
    monkeypatch.setattr(bounded_ops, "bounded_attention", both)
    if DEVICE == "cuda":
        c.runner.decode = None  # in a graph nothing could be compared
    free = request("free", prompts(150)[0], bounded(1e20, 8), max_tokens=90)
    logits(c, free, 60)
    assert sum(compared) == 4 * (150 + 59)  # layers of tokens
    assert free.bounded.pages_raised == free.bounded.host_bytes == 0 < free.bounded.pages_read


def test_a_lower_threshold_raises_more() -> None:
    prompt, raised = prompts(200)[0], []
    for error in (1e20, 0.5, 0.05, 0.0):
        r = request("r", prompt, bounded(error, 8), max_tokens=TOKENS)
        c = core()
        run(c, r)
        raised.append(r.bounded.pages_raised / r.bounded.pages_read)
        block = c.pool.page_bytes // (4 * 2)  # 4 layers of 2 key heads
        assert r.bounded.host_bytes == r.bounded.pages_raised * block
        # Every token reads the pages before its own but one; the last token of all is not computed.
        assert r.bounded.pages_read == 8 * sum(max(0, p // PAGE_SIZE - 1) for p in range(200 + TOKENS - 1))
    assert raised == sorted(raised)
    assert raised[0] == 0 < raised[1] < raised[3] == 1


def test_answers_do_not_depend_on_chunks_company_or_sharing() -> None:
    texts = prompts(530, 601, 64, 530)
    blueprints = [bounded(0.2, 8), bounded(0.0, 2), kv(4), bounded(0.2, 8)]
    texts[3] = texts[0]
    expected = [run(core(), request("r", p, b, max_tokens=TOKENS))[0] for p, b in zip(texts, blueprints, strict=True)]
    for tokens in (16, 100, 512):
        c = core(max_batch_tokens=tokens)
        requests = [
            request(str(i), p, b, max_tokens=TOKENS) for i, (p, b) in enumerate(zip(texts, blueprints, strict=True))
        ]
        assert run(c, *requests) == expected
        again = [request(f"again {i}", p, b, max_tokens=TOKENS) for i, (p, b) in
                 enumerate(zip(texts, blueprints, strict=True))]  # fmt: skip
        assert run(c, *again) == expected
        assert [r.paging.cached for r in again] == [512, 512, 0, 512]
        assert requests[2].bounded.pages_read == 0 < requests[0].bounded.pages_read


def test_preempted_requests_resume_with_the_same_answer() -> None:
    texts = prompts(100, 150, 64, 90, 130)
    blueprints = [bounded(0.2, 8), bounded(0.0, 4), kv(16), kv(2), bounded(0.5, 8)]
    expected = [run(core(), request("r", p, b, max_tokens=90))[0] for p, b in zip(texts, blueprints, strict=True)]
    small = core(kv_tokens=6 * PAGE_SIZE)
    requests = [request(str(i), p, b, max_tokens=90) for i, (p, b) in enumerate(zip(texts, blueprints, strict=True))]
    assert run(small, *requests) == expected
    assert sum(r.preemptions for r in requests) > 0
    assert small.scheduler.allocator.free == 6
    while small.scheduler.allocator.evict():
        pass
    assert len(small.originals._free) == len(small.originals._at), "every original went with its page"


@pytest.mark.parametrize("fault", ["nothing is free", "the allocation fails"])
def test_a_host_without_memory_breaks_no_bound_in_silence(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first slab, which holds two pages here: who wants a bound gets an error, who asked for best effort an
    answer that says so."""
    texts = prompts(100, 150, 64)
    plain = [run(core(), request("r", p, kv(4), max_tokens=90))[0] for p in texts]
    c = core()
    with monkeypatch.context() as small:
        small.setattr(originals, "SLAB_BYTES", 2 * c.pool.page_bytes + originals.ALIGN)
        assert c.originals._grow()
    if fault == "nothing is free":
        monkeypatch.setattr(originals, "free_memory", lambda _: 0)
    else:
        monkeypatch.setattr(originals, "free_memory", lambda _: 2**62)
        monkeypatch.setattr(originals, "SLAB_BYTES", 2**60)
    requests = [request(str(i), p, bounded(0.0, 4), max_tokens=90) for i, p in enumerate(texts)]
    requests[2].bounded.best_effort = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(c, *requests)
        with pytest.raises(
            QBEError, match="kv_error does nothing here, because the host has no memory left"
        ) as refused:
            c.add(request("refused", texts[0], bounded(0.0, 4), max_tokens=90))
        assert refused.value.field == "kv_error"
        full = request("full", texts[0], bounded(0.0, 16), max_tokens=9)
        run(c, full)
        later = request("later", texts[0], bounded(0.0, 4), max_tokens=90)
        later.bounded.best_effort = True
        run(c, later)
    messages = [str(w.message) for w in caught if "16-bit originals" in str(w.message)]
    assert len(messages) == 1
    assert "no kv_error can be kept from now on" in messages[0]
    assert [r.finish_reason for r in requests] == ["error", "error", "length"]
    assert all("kv_error cannot be kept any more" in str(r.error) for r in requests[:2])
    assert all(r.blueprint.kv_error is None and r.bounded.dropped for r in (requests[2], later))
    assert (full.finish_reason, full.blueprint.kv_error, full.bounded.dropped) == ("length", 0.0, False)
    assert later.finish_reason == "length"
    assert later.output_ids == plain[0], "nothing of the bounded requests is found under another name"
    assert later.bounded.pages_read == 0
    assert c.scheduler.allocator.free == c.scheduler.allocator.num_pages


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("at", [5, 97, 104])
def test_keys_that_are_not_numbers_fail_their_request_alone(bad: float, bits: int, at: int) -> None:
    """One number of one head at one token, in a prompt (the last one is its own step) or in the answer."""
    texts = prompts(100, 98, 70)
    expected = [run(core(), request("r", p, kv(bits), max_tokens=20))[0] for p in texts]
    c = core(max_batch_tokens=64)
    if DEVICE == "cuda":
        c.runner.decode = None  # a graph would not come by here
    requests = [request(str(i), p, kv(bits), max_tokens=20) for i, p in enumerate(texts)]
    plain = c.runner.cache.update

    def update(keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **more: Any) -> Any:
        layout = c.runner.cache.layout
        if layer == 2:
            keys = keys.clone()
            for row, (sequence, position) in enumerate(running):
                if sequence is requests[1] and position == at:
                    keys[0, 1, row, 3] = bad
        assert layout is not None
        return plain(keys, values, layer, *rest, **more)

    c.runner.cache.update = update  # type: ignore[method-assign]
    running: list[tuple[Sequence, int]] = []
    schedule = c.scheduler.schedule

    def scheduled() -> Any:
        work = schedule()
        running[:] = [(w.sequence, w.start + i) for w in work for i in range(w.count)]
        return work

    c.scheduler.schedule = scheduled  # type: ignore[method-assign]
    found = run(c, *requests)
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    assert requests[1].finish_reason == "error"
    assert requests[1].error is not None
    assert requests[1].error.startswith("the keys of layer 2, key head 1 in the page of tokens ")
    assert "not numbers (NaN or infinity" in requests[1].error
    first = at // PAGE_SIZE * PAGE_SIZE
    assert f"tokens {first} to " in requests[1].error
    assert found[1] == expected[1][: max(0, at - 97)]


def test_the_budgets_threshold_reaches_results_and_records(tmp_path: Any) -> None:
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform",
                    records=tmp_path / "records.sqlite")  # fmt: skip
    prompt, params = "Count the stars. " * 9, SamplingParams(max_tokens=8, ignore_eos=True)
    close = engine.generate(prompt, params, budget=Budget(kv_bits=4, kv_error=0))
    plain = engine.generate(prompt, params, budget=Budget(kv_bits=4))
    full = engine.generate(prompt, params, budget=Budget(kv_error=0.1))
    usage = close.describe()["usage"]
    assert usage["kv_error"] == 0
    assert usage["kv_pages_raised"] == usage["kv_pages_read"] == close.pages_read > 0
    assert usage["kv_host_bytes"] == close.host_bytes > 0
    assert close.token_ids == full.token_ids
    assert full.pages_read == plain.pages_read == 0
    assert plain.describe()["usage"]["kv_error"] is None
    record = engine._records.list(3)[2]
    assert (record.kv_error, record.pages_read, record.pages_raised) == (0, close.pages_read, close.pages_raised)
    assert record.host_bytes == close.host_bytes
    explained = engine.explain(prompt, budget=Budget(kv_bits=2, kv_error=0.25)).describe()
    assert explained["blueprint"]["kv_error"] == explained["budget"]["kv_error"] == 0.25
    engine.close()


@pytest.mark.parametrize("error", [-0.1, float("nan"), float("inf"), 1e39, 10**400, True, "0.1"])
def test_thresholds_that_are_no_numbers_are_refused(error: Any) -> None:
    with pytest.raises(QBEError, match=r"kv_error is .* at least 0"):
        Budget(kv_error=error)


def test_a_cache_that_is_too_large_says_what_would_fit() -> None:
    with pytest.raises(
        QBEError, match=r"kv_tokens is 1099511627775, but .* GB free on cpu hold at most \d+: ask"
    ) as error:
        Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", kv_tokens=2**40 - 1)
    most = int(str(error.value).split("at most ")[1].split(":")[0])
    assert most % PAGE_SIZE == 0
    assert most > 0
