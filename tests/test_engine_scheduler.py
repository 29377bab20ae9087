"""The scheduler with a runner that only counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models import request
from qbe.blueprint import Blueprint, DynamicPrecision
from qbe.engine.scheduling.sequence import Sequence, Status
from qbe.errors import QBEError
from qbe.format.kv_blocks import PAGE_SIZE
from scheduler_samples import FULL, LOW, advance, scheduler, shape


def test_writing_goes_before_a_long_prompt_and_the_prompt_is_chunked() -> None:
    s = scheduler()
    s.add(request("short", [5] * 3, max_tokens=10))
    assert shape(advance(s)) == [("short", 0, 3)]
    s.add(request("long", [5] * 40, max_tokens=10))
    assert shape(advance(s)) == [("short", 3, 1), ("long", 0, 15)]
    assert shape(advance(s)) == [("short", 4, 1), ("long", 15, 15)]
    assert shape(advance(s)) == [("short", 5, 1), ("long", 30, 10)]
    assert shape(advance(s)) == [("short", 6, 1), ("long", 40, 1)]


def test_several_prompts_share_a_step_first_come_first_served() -> None:
    s = scheduler()
    for name, n in (("a", 6), ("b", 6), ("c", 6)):
        s.add(request(name, [5] * n, max_tokens=5))
    assert shape(advance(s)) == [("a", 0, 6), ("b", 0, 6), ("c", 0, 4)]
    assert shape(advance(s)) == [("a", 6, 1), ("b", 6, 1), ("c", 4, 2)]


def test_without_chunks_a_long_prompt_is_the_only_prompt_of_its_step() -> None:
    s = scheduler(chunked=False)
    for name, n in (("a", 3), ("b", 40), ("c", 3)):
        s.add(request(name, [5] * n, max_tokens=5))
    assert shape(advance(s)) == [("a", 0, 3)]
    assert shape(advance(s)) == [("a", 3, 1), ("b", 0, 40)]
    assert shape(advance(s)) == [("a", 4, 1), ("b", 40, 1), ("c", 0, 3)]


def test_admission_waits_for_pages_and_nobody_overtakes() -> None:
    s = scheduler(pages=4, tokens=256)
    s.add(request("a", [5] * 150, max_tokens=28))
    s.add(request("b", [6] * 100, max_tokens=28))
    s.add(request("c", [7], max_tokens=3))
    advance(s)
    assert [r.request_id for r in s.running] == ["a"]
    assert s.allocator.free == 1, "c would fit, but b was first"
    first = s.get("a")
    assert first is not None
    s.finish(first, "cancelled")
    assert first.status is Status.FINISHED
    advance(s)
    assert [r.request_id for r in s.running] == ["b", "c"]


def test_the_youngest_gives_its_pages_up_and_comes_back_first() -> None:
    s = scheduler(pages=3, tokens=256, sequences=3)
    old, young, next_one = (request(n, [i] * 60, max_tokens=40) for i, n in enumerate(("old", "young", "next")))
    for r in (old, young, next_one):
        s.add(r)
    advance(s)
    assert s.running == [old, young, next_one]
    while not next_one.preemptions:
        advance(s)
    assert (len(old.token_ids), next_one.computed, next_one.pages) == (66, 0, [])
    assert (s.running, list(s.waiting)) == ([old], [young, next_one]), "old and young both wanted a second page"
    while not old.finish_reason:
        assert [w.sequence for w in advance(s)] == [old], "each of the others needs two pages, and one is free"
    assert shape(advance(s)) == [("young", 64, 1)], "its first page is still known"
    while s.has_work():
        advance(s)
    assert [len(r.token_ids) for r in (old, young, next_one)] == [100] * 3
    assert s.allocator.free == 3


def test_low_bits_admit_more_and_their_refusal_states_the_numbers() -> None:
    s = scheduler(pages=4, context=None, tokens=64, format_of=lambda *_: LOW)
    with pytest.raises(QBEError, match=r"10 prompt tokens and up to 375 new ones .* cache, which holds 384 tokens"):
        s.add(request("r", [5] * 10, max_tokens=375))
    r = request("r", [5] * 10, max_tokens=374)
    s.add(r)
    while s.has_work():
        advance(s)
    assert len(r.token_ids) == 6 * PAGE_SIZE, "two frames of quantised pages, one to write in and one to look back on"
    assert r.preemptions == 0


def test_a_sequence_that_no_longer_fits_alone_ends_with_the_numbers() -> None:
    chosen = [LOW]
    s = scheduler(pages=4, context=None, tokens=64, format_of=lambda *_: chosen[0])
    r = request("r", [5] * 10, max_tokens=374)
    s.add(r)
    for _ in range(150):
        advance(s)
    chosen[0] = FULL
    for _ in range(300):
        advance(s)
    assert (r.finish_reason, s.oversized, s.has_work()) == ("error", [r], False)
    assert "tokens do not fit in the KV cache" in (r.error or "")
    assert s.allocator.free == 4


def test_max_sequences_run_at_the_same_time() -> None:
    s = scheduler(sequences=2)
    for i in range(5):
        s.add(request(str(i), [5], max_tokens=4))
    assert len(advance(s)) == 2


def test_refusals_state_the_numbers() -> None:
    s = scheduler(pages=3)
    s.add(request("a", [5], max_tokens=8))
    for bad, message in (
        (request("a", [5]), "'a' is already running"),
        (request("b", []), "empty"),
        (request("b", [5] * 300), "300 tokens, but the model's context is 256"),
        (request("b", [5] * 250, max_tokens=9), f"250 prompt tokens and up to 6 new ones .* {3 * PAGE_SIZE} tokens"),
    ):
        with pytest.raises(QBEError, match=message):
            s.add(bad)
    with pytest.raises(QBEError, match="max_sequences is 17"):
        scheduler(sequences=17)


def test_a_model_without_attention_needs_no_pages() -> None:
    s = scheduler(pages=0, context=None, paged=False, chunked=False)
    s.add(request("a", [5] * 1000, max_tokens=3))
    assert shape(advance(s)) == [("a", 0, 1000)]


def routed(name: str, routers: str, prompt: int = 1, tokens: int = 3) -> Sequence:
    dynamic_precision = DynamicPrecision("routers", 9, routers) if routers else None
    return request(
        name, [5] * prompt, Blueprint("", (4,), (16,), (16,), dynamic_precision=dynamic_precision), max_tokens=tokens
    )


def test_routers_are_exchanged_between_batches_of_those_that_were_there() -> None:
    """Who waits for other routers is overtaken by those without routers and those that were there: one exchange
    here, not four.
    """
    s = scheduler(sequences=3, tokens=64)
    kinds = {"a1": "a", "b1": "b", "a2": "a", "b2": "b", "plain": ""}
    for name, routers in kinds.items():
        s.add(routed(name, routers))
    advance(s)
    assert [r.request_id for r in s.running] == ["a1", "a2", "plain"]
    s.add(routed("late", "a"))
    s.add(routed("plain, late", ""))
    advance(s)
    advance(s)
    assert not s.running
    advance(s)
    assert [r.request_id for r in s.running] == ["b1", "b2", "plain, late"]
    while s.get("b1"):
        advance(s)
    advance(s)
    assert [r.request_id for r in s.running] == ["late"]


@pytest.mark.parametrize("flood", ["a", ""])
def test_a_flood_does_not_keep_other_routers_out(flood: str) -> None:
    """Of a policy with routers, which alone would fill every place for ever, or of one without."""
    s = scheduler(sequences=3, tokens=64)
    s.add(routed("first", "a", tokens=40))
    for i in range(3):
        s.add(routed(f"before {i}", flood, tokens=9))
    waits, ended = [routed("waits", "b"), routed("waits, too", "b")], 0
    for now in range(400):
        if now in (2, 20):
            s.add(waits[now == 20])
        s.add(routed(f"flood {now}", flood, tokens=4))
        ended += sum(s.get(w.sequence.request_id) is None for w in advance(s))
        if all(r.finish_reason for r in waits):
            break
    assert [r.finish_reason for r in waits] == ["length"] * 2
    assert now < 60, "as soon as those that ran, and those that came before, had ended"
    assert flood == "a" or ended > 15, "the flood went on meanwhile"


@settings(deadline=None, max_examples=120)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(1, 160),
            st.integers(1, 90),
            st.integers(0, 9),
            st.integers(0, 2),
            st.sampled_from(["", "a", "b"]),
        ),
        min_size=1,
        max_size=12,
    ),
    cancels=st.sets(st.integers(0, 11), max_size=4),
    chunked=st.booleans(),
    lowered=st.sets(st.integers(0, 11)),
)
def test_any_traffic_is_served_to_the_end(
    arrivals: list[tuple[int, int, int, int, str]], cancels: set[int], chunked: bool, lowered: set[int]
) -> None:
    """Also with far too few pages, with pages of two formats, prompts that begin alike and routers of two policies."""
    s = scheduler(pages=8, chunked=chunked, format_of=lambda r, _: LOW if int(r.request_id) in lowered else FULL)
    pending: list[tuple[int, Sequence]] = []
    at = 0
    for i, (prompt, tokens, gap, kind, routers) in enumerate(arrivals):
        at += gap
        dynamic_precision = DynamicPrecision("routers", 9, routers) if routers else None
        blueprint = Blueprint("", (4,), (16,), (4 if i in lowered else 16,), dynamic_precision=dynamic_precision)
        pending.append((at, request(str(i), [5 + kind] * prompt, blueprint, max_tokens=tokens)))
    everyone = [r for _, r in pending]
    for now in range(10_000):
        for r in [r for when, r in pending if when <= now]:
            s.add(r)
        pending = [(when, r) for when, r in pending if when > now]
        if now in cancels and (r := s.get(str(now))):
            s.finish(r, "cancelled")
        deciding = {r.request_id for r in s.running if r.remaining == 1}
        oldest = s.running[0] if s.running else None
        work = advance(s)
        assert (
            len({r.blueprint.dynamic_precision for r in (w.sequence for w in work) if r.blueprint.dynamic_precision})
            < 2
        )
        preempted = {r.request_id for r in s.waiting}
        assert deciding - preempted <= {w.sequence.request_id for w in work}, "a sequence that writes never waits"
        assert oldest is None or oldest not in s.waiting or oldest.paging.alone_at, "nobody can starve the oldest one"
        assert sum(w.count for w in work) <= 16 or not chunked
        held = [p for r in s.running for p in r.pages]
        assert all(p.owners == held.count(p) for p in held)
        taken = sum(p.format.nbytes + (0 if p.staging_page is None else FULL.nbytes) for p in set(held))
        assert taken == 8 * FULL.nbytes - s.allocator.free_bytes
        assert all(len(r.pages) == -(-r.computed // PAGE_SIZE) for r in s.running)
        if not pending and not s.has_work():
            break
    for r, (prompt, tokens, *_) in zip(everyone, arrivals, strict=True):
        assert r.finish_reason == "cancelled" or len(r.token_ids) == prompt + tokens
    assert s.allocator.free == s.allocator.num_pages
    assert not s.oversized
