"""The scheduler with a runner that only counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models import request
from qbe.engine.scheduler import Scheduler, Work
from qbe.engine.sequence import Sequence, Status
from qbe.errors import QBEError
from qbe.kvcache.pages import PAGE_SIZE, PageAllocator, pages_for


def scheduler(
    pages: int = 64, tokens: int = 16, sequences: int = 4, context: int | None = 256, **kw: bool
) -> Scheduler:
    return Scheduler(PageAllocator(pages), max_batch_tokens=tokens, max_sequences=sequences, context=context, **kw)


def advance(s: Scheduler) -> list[Work]:
    """One step of a model that always says 1."""
    work = s.schedule()
    for w in work:
        assert w.start == w.sequence.computed
        w.sequence.computed = w.start + w.count
    for w in work:
        if w.samples:
            w.sequence.token_ids.append(1)
            if len(w.sequence.token_ids) == w.sequence.max_length:
                s.finish(w.sequence, "length")
    return work


def shape(work: list[Work]) -> list[tuple[str, int, int]]:
    return [(w.sequence.request_id, w.start, w.count) for w in work]


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
    s = scheduler(pages=4, tokens=64)
    s.add(request("a", [5] * 20, max_tokens=28))
    s.add(request("b", [5] * 20, max_tokens=28))
    s.add(request("c", [5], max_tokens=3))
    advance(s)
    assert [r.request_id for r in s.running] == ["a"]
    assert s.allocator.free == 1, "c would fit, but b was first"
    first = s.get("a")
    assert first is not None
    s.finish(first, "cancelled")
    assert first.status is Status.FINISHED
    advance(s)
    assert [r.request_id for r in s.running] == ["b", "c"]


def test_max_sequences_run_at_the_same_time() -> None:
    s = scheduler(sequences=2)
    for i in range(5):
        s.add(request(str(i), [5], max_tokens=4))
    assert len(advance(s)) == 2


def test_refusals_state_the_numbers() -> None:
    s = scheduler(pages=4)
    s.add(request("a", [5], max_tokens=8))
    for bad, message in (
        (request("a", [5]), "'a' is already running"),
        (request("b", []), "empty"),
        (request("b", [5] * 300), "300 tokens, but the model's context is 256"),
        (request("b", [5] * 60, max_tokens=5), f"60 prompt tokens and up to 5 new ones .* {4 * PAGE_SIZE} tokens"),
    ):
        with pytest.raises(QBEError, match=message):
            s.add(bad)
    with pytest.raises(QBEError, match="max_sequences is 17"):
        scheduler(sequences=17)


def test_a_model_without_attention_needs_no_pages() -> None:
    s = scheduler(pages=0, context=None, paged=False, chunked=False)
    s.add(request("a", [5] * 1000, max_tokens=3))
    assert shape(advance(s)) == [("a", 0, 1000)]


@settings(deadline=None, max_examples=80)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=12),
    cancels=st.sets(st.integers(0, 11), max_size=4),
    chunked=st.booleans(),
)
def test_any_traffic_is_served_to_the_end(
    arrivals: list[tuple[int, int, int]], cancels: set[int], chunked: bool
) -> None:
    s = scheduler(pages=9, chunked=chunked)
    pending: list[tuple[int, Sequence]] = []
    at = 0
    for i, (prompt, tokens, gap) in enumerate(arrivals):
        at += gap
        pending.append((at, request(str(i), [5] * prompt, max_tokens=tokens)))
    everyone = [r for _, r in pending]
    for now in range(10_000):
        for r in [r for when, r in pending if when <= now]:
            s.add(r)
        pending = [(when, r) for when, r in pending if when > now]
        if now in cancels and (r := s.get(str(now))):
            s.finish(r, "cancelled")
        deciding = {r.request_id for r in s.running if r.remaining == 1}
        work = advance(s)
        assert deciding <= {w.sequence.request_id for w in work}, "a sequence that writes never waits"
        assert sum(w.count for w in work) <= 16 or not chunked
        held = [p for r in s.running for p in r.pages]
        assert len(set(held)) == len(held) == s.allocator.num_pages - s.allocator.free
        assert all(len(r.pages) == pages_for(r.max_length) for r in s.running)
        if not pending and not s.has_work():
            break
    for r, (prompt, tokens, _) in zip(everyone, arrivals, strict=True):
        assert r.finish_reason == "cancelled" or len(r.token_ids) == prompt + tokens
    assert s.allocator.free == s.allocator.num_pages
