"""KV precision in the engine: what a token sees does not depend on chunks, sharing or preemption."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from conftest import byte_tokenizer, tiny_llama
from engine_models import DEVICE, NO_SITES, build, greedy, prompts, request, run
from qbe import Budget, Engine, QBEError, SamplingParams
from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.scheduling.sequence import Sequence
from qbe.explain.heatmap import kv_note
from qbe.kvcache.pages import PAGE_SIZE
from test_engine_decode import fixed

TOKENS = 40
LOW = [8, 4, 2]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kv(*bits: Any, first: int | None = None) -> Blueprint:
    """These bits at the layers, in turn; in the first page these at least."""
    return Blueprint("kv", (), (), tuple(bits[i % len(bits)] for i in range(4)), first_kv_bits=first)


def core(name: str = "llama", **sizes: Any) -> Core:
    model = build(name)
    model.config.max_position_embeddings = 1024
    return Core(model, NO_SITES, **{"max_batch_tokens": 512, "max_sequences": 8, "kv_tokens": 4096} | sizes)


def alone(name: str, prompt: list[int], blueprint: Blueprint, tokens: int = TOKENS) -> list[int]:
    return run(core(name), request("alone", prompt, blueprint, max_tokens=tokens))[0]


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2-softcap", "gpt-oss"])
def test_answers_do_not_depend_on_chunks_or_company(name: str) -> None:
    """Each of a batch of mixed KV precision gets the answer that it gets alone, its prompt cut in any way."""
    # Products of other shapes round differently on a GPU; over long prompts at few bits some answer shows it.
    texts = prompts(150, 201, 64, 3, 650, 505) if DEVICE == "cpu" else prompts(150, 201, 64, 3, 140, 130)
    blueprints = [kv(8), kv(68), kv(2, 16), kv(8, 4, 66, 4), kv(2, 4, first=8), kv(4)]
    expected = [alone(name, p, b) for p, b in zip(texts, blueprints, strict=True)]
    for tokens in (16, 100, 512):
        together = core(name, max_batch_tokens=tokens)
        requests = [
            request(str(i), p, b, max_tokens=TOKENS) for i, (p, b) in enumerate(zip(texts, blueprints, strict=True))
        ]
        assert run(together, *requests) == expected
        assert together.scheduler.allocator.free == together.scheduler.allocator.num_pages


@pytest.mark.parametrize("name", ["jamba", "phi3-longrope"])
def test_models_that_run_one_sequence_at_a_time(name: str) -> None:
    texts = prompts(100, 70)
    expected = [alone(name, p, b) for p, b in zip(texts, (kv(4), kv(2)), strict=True)]
    assert run(core(name, max_batch_tokens=16), *(
        request(str(i), p, b, max_tokens=TOKENS) for i, (p, b) in enumerate(zip(texts, (kv(4), kv(2)), strict=True))
    )) == expected  # fmt: skip


def test_fewer_bits_are_further_from_16() -> None:
    """By the logits after a prompt of which two pages are quantised."""
    prompt = prompts(210)[0]
    found = {}
    for bits in (16, *LOW):
        c = core()
        c.add(request("r", prompt, kv(bits), max_tokens=1))
        found[bits] = c.runner.step(c.scheduler.schedule())[0][0]
    errors = [float((found[b] - found[16]).norm() / found[16].norm()) for b in LOW]
    assert 0 < errors[0] < 0.05
    assert all(a < b for a, b in pairwise(errors))


@pytest.mark.parametrize("bits", [16, 4])
def test_preempted_requests_resume_with_the_same_answer(bits: int) -> None:
    """Five sequences of up to 4 pages in a cache that holds fewer."""
    texts = prompts(100, 150, 64, 90, 130, 20)
    blueprints = [kv(bits), kv(bits, first=8), kv(16), kv(2), kv(bits, 8), kv(2, first=16)]
    expected = [alone("llama", p, b, 90) for p, b in zip(texts, blueprints, strict=True)]
    small = core(kv_tokens=6 * PAGE_SIZE)
    requests = [request(str(i), p, b, max_tokens=90) for i, (p, b) in enumerate(zip(texts, blueprints, strict=True))]
    assert run(small, *requests) == expected
    assert sum(r.preemptions for r in requests) > 0
    assert small.scheduler.allocator.free == 6


def test_requests_preempted_past_a_stretch_of_pages_go_on_after_it() -> None:
    texts, blueprint = prompts(500, 505, 500), kv(4)
    expected = [alone("llama", p, blueprint, 160) for p in texts]
    small = core(kv_tokens=9 * PAGE_SIZE)
    requests = [request(str(i), p, blueprint, max_tokens=160) for i, p in enumerate(texts)]
    begun, begin = [], small.scheduler.paging.begin
    small.scheduler.paging.begin = lambda r: (begin(r), begun.append((r.preemptions, r.computed)))[0]
    assert run(small, *requests) == expected
    assert sum(r.preemptions for r in requests) > 0
    assert {at for times, at in begun if times} <= {0, 512}
    assert small.scheduler.allocator.free == 9


def test_sampling_goes_on_where_it_was_after_preemption() -> None:
    texts, params = prompts(60, 61, 62), {"max_tokens": 80, "temperature": 1.0, "seed": 5}
    expected = [run(core(), request("r", p, **params))[0] for p in texts]
    requests = [request(str(i), p, **params) for i, p in enumerate(texts)]
    assert run(core(kv_tokens=4 * PAGE_SIZE), *requests) == expected
    assert sum(r.preemptions for r in requests) > 0


@pytest.mark.parametrize(("bits", "first"), [(16, None), (4, None), (4, 8)])
def test_a_shared_prefix_changes_no_answer(bits: int, first: int | None) -> None:
    own = kv(bits, first=first)
    prompt, other, early = prompts(720)[0], prompts(720)[0], prompts(720)[0]
    other[590:], early[200:] = prompts(130)[0], prompts(520)[0]
    expected = [alone("llama", p, own) for p in (prompt, other, early)]
    c = core()
    before, again, branch, fork, full = (request(n, p, b, max_tokens=TOKENS) for n, p, b in (
        ("before", prompt, own), ("again", prompt, own), ("branch", other, own), ("fork", early, own),
        ("full", prompt, kv(8)),
    ))  # fmt: skip
    assert run(c, before) == expected[:1]
    assert run(c, again, branch, fork, full)[:3] == expected
    # Below 16 bits a sequence goes on after a whole stretch of quantised pages only.
    cached = [0, 704, 576, 192] if bits == 16 else [0, 512, 512, 0]
    assert [r.paging.cached for r in (before, again, branch, fork, full)] == [*cached, 0]


@pytest.mark.parametrize("name", ["llama", "jamba"])
@pytest.mark.parametrize("blueprint", [kv(16), kv(4), kv(4, first=8), kv(2, first=16)])
def test_the_longest_request_that_is_taken_runs_to_its_end(name: str, blueprint: Blueprint) -> None:
    model, prompt = build(name), prompts(20)[0]
    model.config.max_position_embeddings = 1024
    c = Core(model, NO_SITES, kv_tokens=4 * PAGE_SIZE, max_batch_tokens=PAGE_SIZE)
    most = c.scheduler.paging.capacity(request("probe", prompt, blueprint, max_tokens=1))
    assert PAGE_SIZE < most < 1024
    with pytest.raises(QBEError, match=f"holds {most} tokens"):
        c.add(request("more", prompt, blueprint, max_tokens=most - 19))
    longest = request("most", prompt, blueprint, max_tokens=most - 20)
    run(c, longest)
    assert (longest.finish_reason, longest.preemptions) == ("length", 0)


@pytest.mark.parametrize(("blueprint", "pages", "tokens"), [(kv(4), 6, 640), (kv(8), 8, 576), (kv(4, first=8), 8, 900)])
def test_a_long_prompt_in_a_pool_that_just_holds_it_runs_to_its_end(blueprint, pages: int, tokens: int) -> None:
    """Its chunks take the staging pages of several pages at once."""
    model = build("llama")
    model.config.max_position_embeddings = 4096
    c = Core(model, NO_SITES, kv_tokens=pages * PAGE_SIZE, max_batch_tokens=512)
    most = c.scheduler.paging.capacity(request("probe", prompts(tokens)[0], blueprint, max_tokens=1))
    r = request("r", prompts(tokens)[0], blueprint, max_tokens=most - tokens)
    run(c, r)
    assert (r.finish_reason, r.computed) == ("length", most - 1)
    assert c.scheduler.allocator.free == pages


def test_fewer_bits_are_not_taken_where_pages_of_more_leave_no_room_for_them() -> None:
    c = core(kv_tokens=4 * PAGE_SIZE)
    r = request("r", prompts(60)[0], kv(16), max_tokens=4 * PAGE_SIZE - 60)
    c.add(r)
    while r.computed < 130:
        c.step()
    c.raise_kv(r, (2, 2, 2, 2))
    while c.has_work():
        c.step()
    assert r.finish_reason == "length"


def test_the_first_page_has_bits_of_its_own() -> None:
    c, r = core(), request("r", prompts(150)[0], kv(2, 16, first=8), max_tokens=60)
    run(c, r)
    assert r.paging.quantised_bits == [(8, 16, 8, 16), (2, 16, 2, 16), (2, 16, 2, 16)]


def test_low_bits_hold_more() -> None:
    texts = prompts(*[120] * 6)
    preempted = []
    for bits in (16, 2):
        requests = [request(str(i), p, kv(bits), max_tokens=60) for i, p in enumerate(texts)]
        run(core(kv_tokens=10 * PAGE_SIZE), *requests)
        preempted.append(sum(r.preemptions for r in requests))
    assert preempted[0] > preempted[1] == 0


def test_pages_follow_a_blueprint_that_is_exchanged() -> None:
    c = core()
    r = request("r", prompts(70)[0], kv(4), max_tokens=100)
    c.add(r)
    c.step()
    r.blueprint = kv(2)
    for _ in range(70):
        c.step()
    assert [p.format.bits[0][0] for p in r.pages] == [4, 2, 2]
    assert [p.staging_page is None for p in r.pages] == [True, False, False]
    while c.has_work():
        c.step()
    assert r.computed == 169
    assert r.paging.average_kv_bits == pytest.approx((64 * 4 + 105 * 16) / 169)


@pytest.mark.parametrize(("bits", "tokens"), [(16, 100), (4, 100), (4, 620)])
def test_a_twin_goes_on_as_if_it_had_its_own_pages(bits: int, tokens: int) -> None:
    prompt = prompts(tokens)[0]
    params = {"max_tokens": 60, "temperature": 1.0}
    expected = [run(core(), request("alone", prompt, kv(bits), seed=i, **params))[0] for i in range(3)]
    c = core()
    requests = [request(str(i), prompt, kv(bits), seed=i, **params) for i in range(3)]
    c.add(requests[0])
    for fork_parent in requests[1:]:
        for _ in range(5):
            c.step()
        fork_parent.paging.fork_parent = requests[0]
        c.add(fork_parent)
    while c.has_work():
        c.step()
    assert [r.output_ids for r in requests] == expected
    assert [r.paging.cached for r in requests] == [0, tokens - 1, tokens - 1]
    assert c.scheduler.allocator.free == c.scheduler.allocator.num_pages


def test_answers_to_one_prompt_share_its_pages_and_have_their_own_seeds() -> None:
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device="cpu", policy="uniform", records=False,
                    max_sequences=3)  # fmt: skip
    prompt, params = "Count the stars. " * 9, SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True, seed=7)
    found = engine.answers(prompt, 5, params)
    assert [r.prompt_tokens for r in found] == [153] * 5
    assert [r.cached_tokens for r in found[:3]] == [0, 152, 152]
    assert all(r.cached_tokens >= 128 for r in found[3:])
    assert len({r.text for r in found}) > 1
    assert [r.token_ids for r in found] == [
        engine.generate(prompt, replace(params, seed=7 + i)).token_ids for i in range(5)
    ]
    assert len({r.text for r in engine.answers(prompt, 3, replace(params, seed=None))}) > 1
    for n in (0, -1, True, 1.5, 1025):
        with pytest.raises(QBEError, match=r"n is .*, but must be a whole number, 1 to 1024"):
            engine.answers(prompt, n)
    assert not engine.core.has_work()
    engine.close()


def test_what_is_not_a_number_in_a_sealed_page_ends_its_request() -> None:
    model = build("llama")
    good = prompts(100)[0]
    bad = next(t for t in range(199) if t not in good)
    expected = [greedy(model, good, 8)]
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    c = Core(model, NO_SITES, kv_tokens=8 * PAGE_SIZE, max_batch_tokens=32)
    poisoned, fine = request("bad", [bad, *good], kv(4), max_tokens=8), request("good", good, max_tokens=8)
    assert run(c, poisoned, fine) == [[], *expected]
    assert poisoned.finish_reason == "error"
    assert c.scheduler.allocator.evictable == 1, "the pages of the good one only"
    assert run(c, request("again", good, max_tokens=8), request("more", good, max_tokens=8)) == expected * 2


def test_decode_steps_read_mixed_pages_as_eager_ones_do(device: torch.device) -> None:
    """Also from CUDA graphs, which were captured before any of these precisions was known."""
    engine = Engine(tiny_llama(), tokenizer=byte_tokenizer(), device=device.type, policy="uniform", records=False,
                    max_sequences=5, max_batch_tokens=1024)  # fmt: skip
    c = fixed(engine.core)
    decode = c.runner.decode
    assert decode is not None
    captures, table = decode.captures, c.table
    plain = Blueprint.of("kv", table, tuple(s.gears[-1] for s in table.nested))
    bits = [(16, 16), (8, 8), (4, 4), (2, 2), (4, 16)]
    sequences: list[Sequence] = []
    for i, b in enumerate(bits):
        own = Blueprint("kv", plain.weight_bits, plain.activation_bits, b)
        sequences.append(request(str(i), [(7 * i + j) % 320 for j in range(50 + 40 * i)], own, max_tokens=250))
        c.add(sequences[-1])
    c.step()
    for step in range(90):
        work = c.scheduler.schedule()
        assert len(work) == 5
        logits, best = (t.clone() for t in decode.run(work)[:2])
        c.plan.forget()
        eager = c.runner._forward(work)
        torch.testing.assert_close(logits, eager, rtol=1e-3, atol=1e-3 * float(eager.abs().max()))
        c.runner.step(work)
        c.scheduler.complete(work)
        for w, token in zip(work, best.tolist(), strict=True):
            w.sequence.token_ids.append(token)
        if step == 30:
            sequences[0].blueprint, sequences[3].blueprint = sequences[3].blueprint, sequences[0].blueprint
    assert decode.captures == captures
    assert len({p.format.number for s in sequences for p in s.pages}) == 5
    for entropy in decode.entropy:
        assert entropy is not None
        lengths = torch.tensor([[float(s.computed)] for s in sequences], device=device)
        assert (entropy >= 0).all()
        assert (entropy <= lengths.log() + 1e-4).all()
        assert entropy.std() > 0


@pytest.mark.parametrize(("bits", "kind"), [(4, 4), ("turbo4", 68)])
def test_the_budgets_kv_bits_reach_pages_and_results(tmp_path, bits: int | str, kind: int) -> None:
    engine = Engine(tiny_llama(max_position_embeddings=1024), tokenizer=byte_tokenizer(), device="cpu",
                    policy="uniform", records=tmp_path / "records.sqlite")  # fmt: skip
    prompt, params = "Count the stars. " * 40, SamplingParams(max_tokens=8, ignore_eos=True)
    low = engine.generate(prompt, params, budget=Budget(kv_bits=bits))
    again = engine.generate(prompt, params, budget=Budget(kv_bits=bits))
    plain = engine.generate(prompt, params)
    computed = low.prompt_tokens + 7
    quantised = (computed // PAGE_SIZE - 1) * PAGE_SIZE
    assert low.average_kv_bits == pytest.approx((quantised * 4 + (computed - quantised) * 16) / computed)
    assert plain.average_kv_bits == 16
    assert again.text == low.text
    assert (low.cached_tokens, again.cached_tokens, plain.cached_tokens) == (0, 512, 0)
    usage = again.describe()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 512}
    assert usage["average_kv_bits"] == round(low.average_kv_bits, 4)
    record = engine._records.list(3)[1]
    assert set(record.kv_bits) == {kind}
    assert sum(record.tokens_by_bits.values()) == pytest.approx(computed - 512, abs=2)
    explained = engine.explain(prompt, budget=Budget(kv_bits=2)).describe()
    assert explained["blueprint"]["average_kv_bits"] == explained["budget"]["kv_bits"] == 2
    turbo = engine.explain(prompt, budget=Budget(kv_bits="turbo2"))
    assert turbo.describe()["blueprint"]["average_kv_bits"] == 2
    assert set(turbo.describe()["blueprint"]["kv_bits"]) == {turbo.describe()["budget"]["kv_bits"]} == {"turbo2"}
    assert "2 bits, keys in TurboQuant's form" in kv_note(turbo)
    engine.close()


@pytest.mark.parametrize("bits", [1.9, 0, 16.5, True, "4", float("nan"), 68, "turbo8", [4]])
def test_kv_bits_that_cannot_be_are_refused(bits: Any) -> None:
    with pytest.raises(QBEError, match=r"kv_bits is .* an average between 2 and 16"):
        Budget(kv_bits=bits)
