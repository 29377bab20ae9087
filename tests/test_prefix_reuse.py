"""Pages with more bits than asked serve those who allow it, never fewer, and never across salts."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_models import request
from qbe.blueprint import Blueprint, DynamicPrecision, kv_covers
from qbe.engine.scheduling.scheduler import Scheduler
from qbe.engine.scheduling.sequence import Sequence
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kvcache.allocator import Page, PageFormat
from qbe.sites import FULL_BITS, TURBO, KVBits
from scheduler_samples import FULL, advance, scheduler

FORMATS = {16: FULL, 8: PageFormat(1, 9 * 256), 4: PageFormat(2, 5 * 256)}
LAYERS = 2

gears = st.sampled_from([4, 6, 8, 16])
head_bits = st.sampled_from([2, 4, 8, FULL_BITS, TURBO | 2, TURBO | 4])
kv_bits = st.tuples(*[head_bits | st.tuples(head_bits, head_bits)] * 2)
blueprints = st.builds(
    Blueprint, st.just("x"), st.tuples(gears, gears), st.tuples(*[st.sampled_from([8, 16])] * 2), kv_bits,
    st.sampled_from([None, 0.0, 0.05]), st.sampled_from([None, DynamicPrecision("cascade", 3)]),
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(one=blueprints, two=blueprints, three=blueprints)
def test_as_precise_as_is_a_partial_order(one: Blueprint, two: Blueprint, three: Blueprint) -> None:
    assert one.covers(one)
    assert kv_covers(one.kv_bits, one.kv_bits)
    if one.covers(two):
        assert all(map(int.__ge__, one.weight_bits, two.weight_bits))
        assert all(map(int.__ge__, one.activation_bits, two.activation_bits))
        assert one.dynamic_precision == two.dynamic_precision
        assert two.kv_error is None or (one.kv_error is not None and one.kv_error <= two.kv_error)
        assert not two.covers(one) or one.computed_key == two.computed_key
        assert not two.covers(three) or one.covers(three)
    if kv_covers(one.kv_bits, two.kv_bits):
        assert not kv_covers(two.kv_bits, one.kv_bits) or one.with_kv_bits(two.kv_bits).key == one.key
        assert not kv_covers(two.kv_bits, three.kv_bits) or kv_covers(one.kv_bits, three.kv_bits)


@pytest.mark.parametrize(
    ("kept", "asked", "serves"),
    [((8, 4), (4, 4), True), ((8, 4), (4, 8), False), (((8, 4),), (4,), True), ((4,), ((4, 8),), False),
     ((16,), (TURBO | 4,), True), ((8,), (TURBO | 4,), False), ((TURBO | 4,), (4,), False),
     ((TURBO | 4,), (TURBO | 2,), False), ((4,), (4, 4), False)],
)  # fmt: skip
def test_keys_in_turboquants_form_serve_for_no_others(kept: Any, asked: Any, serves: bool) -> None:
    assert kv_covers(kept, asked) is serves


class Watched:
    """A scheduler, and of every page what it really holds: whose, which tokens, at what."""

    def __init__(self, pages: int) -> None:
        self.scheduler: Scheduler = scheduler(
            pages,
            3 * PAGE_SIZE,
            4,
            1024,
            format_of=lambda s, i: FORMATS[s.kv_bits_of(i)[0]],  # type: ignore[index]
        )
        self.holds: dict[Page, tuple[bytes, list[int], list[Blueprint], tuple[KVBits, ...]]] = {}
        self.reused = self.with_more = 0
        self._begin, self.scheduler.paging.begin = self.scheduler.paging.begin, self.begin  # type: ignore[method-assign]

    def begin(self, sequence: Sequence) -> None:
        again = sequence.preemptions and [sequence.blueprint_at(p) for p in range(len(sequence.token_ids))]
        self._begin(sequence)
        own, paging = sequence.blueprint_history.first, sequence.paging
        for i, page in enumerate(p for p in sequence.pages if p.key is not None):
            salt, tokens, computed, kept = self.holds[page]
            asked = own.kv_bits_of(i)
            assert salt == paging.cache_salt
            assert tokens == sequence.token_ids[: (i + 1) * PAGE_SIZE]
            assert len(set(computed)) == 1
            assert computed[0].covers(own) if paging.more else computed[0].computed_key == own.computed_key
            assert kv_covers(kept, asked) if paging.more_kv else kept == asked
            assert sequence.blueprint_at(i * PAGE_SIZE).computed_key == computed[0].computed_key
            assert sequence.kv_bits_of(i) == kept
            self.with_more += (computed[0].computed_key, kept) != (own.computed_key, asked)
        self.reused += len(sequence.pages)
        if again:
            assert again == [sequence.blueprint_at(p) for p in range(len(sequence.token_ids))], "as it was"

    def step(self) -> None:
        for w in advance(self.scheduler):
            sequence = w.sequence
            for i in range(w.start // PAGE_SIZE, min(w.start + w.count, len(sequence.pages) * PAGE_SIZE) // PAGE_SIZE):
                at = range(i * PAGE_SIZE, (i + 1) * PAGE_SIZE)
                self.holds[sequence.pages[i]] = (
                    sequence.paging.cache_salt, sequence.token_ids[: at.stop], [sequence.blueprint_at(p) for p in at],
                    sequence.kv_bits_of(i),
                )  # fmt: skip


def test_whoever_comes_and_goes_no_page_is_read_with_fewer_bits_than_asked() -> None:
    reused = with_more = preempted = 0
    for seed in range(60):
        draw, pages = random.Random(seed), 18 + seed % 20
        watched, added = Watched(pages), []
        for number in range(12):
            kept = draw.choice((4, 8, 16))
            bits = draw.choice((4, 6, 8)), draw.choice((4, 6, 8))
            blueprint = Blueprint("x", bits, (16, 16), (kept,) * LAYERS, first_kv_bits=max(8, kept))
            text = [draw.randrange(2)] * (draw.randint(1, 13) * 50)
            new = request(str(number), text, blueprint, max_tokens=80)
            new.paging.cache_salt = draw.choice((b"", b"other"))
            new.paging.more, new.paging.more_kv = draw.random() < 0.7, draw.random() < 0.7
            watched.scheduler.add(new)
            added.append(new)
            for _ in range(draw.randint(0, 60)):
                watched.step()
            if draw.random() < 0.3 and new.finish_reason is None:
                watched.scheduler.finish(new, "cancelled")
        while watched.scheduler.has_work():
            watched.step()
        assert watched.scheduler.allocator.free == pages
        assert all(s.finish_reason in ("length", "cancelled") for s in added)
        reused, with_more = reused + watched.reused, with_more + watched.with_more
        preempted += watched.scheduler.preempted
    assert reused > with_more > 100
    assert preempted > 50


def serve(watched: Watched, name: str, tokens: list[int], blueprint: Blueprint, more: bool = True) -> Sequence:
    asked = request(name, tokens, blueprint, max_tokens=4)
    asked.paging.more = asked.paging.more_kv = more
    watched.scheduler.add(asked)
    while asked.finish_reason is None:
        watched.step()
    return asked


def at(weights: int, kept: int = 16) -> Blueprint:
    return Blueprint("x", (weights, weights), (16, 16), (kept,) * LAYERS)


def test_a_prompt_begins_on_the_longest_prefix_with_as_many_bits() -> None:
    watched, prompt = Watched(64), [*range(400)]
    cached = lambda s: s.paging.cached  # noqa: E731
    assert cached(serve(watched, "a", prompt[:200], at(6))) == 0
    assert cached(serve(watched, "b", prompt, at(4))) == 192, "three pages, and its own after them"
    assert cached(serve(watched, "c", prompt, at(4, 8))) == 384, "the fewer bits that it asks for come after those"
    assert cached(serve(watched, "d", prompt, at(6))) == 192, "what was written at 4 bits serves no 6"
    assert cached(serve(watched, "e", prompt, at(8))) == 0
    assert cached(serve(watched, "f", prompt, at(4), more=False)) == 0, "exactly 4 bits all along"
    last = serve(watched, "g", prompt, at(4))
    assert cached(last) == 384
    assert [last.blueprint_at(p).weight_bits[0] for p in (0, 399)] == [4, 4], "its own where there are, not the most"


@pytest.mark.parametrize(("tokens", "cached"), [(1000, 0), (700, 576)])
def test_a_prefix_that_takes_too_much_room_is_left_alone(tokens: int, cached: int) -> None:
    watched, prompt = Watched(12), [*range(600)]
    serve(watched, "a", prompt, at(6))
    long = request("b", prompt, at(6, 4), max_tokens=tokens - 600)  # nine pages of 16 bits are most of the cache
    long.paging.more = long.paging.more_kv = True
    watched.scheduler.add(long)
    while watched.scheduler.has_work():
        watched.step()
    assert (long.finish_reason, len(long.token_ids), long.paging.cached) == ("length", tokens, cached)


def test_answers_to_one_prompt_begin_alike_on_pages_with_more_bits() -> None:
    watched, prompt = Watched(64), [*range(150)]
    serve(watched, "a", prompt, at(8))
    first, second = (request(n, prompt, at(4), max_tokens=60) for n in ("b", "c"))
    first.paging.more = second.paging.more = True
    second.paging.fork_parent = first
    watched.scheduler.add(first)
    watched.step()
    watched.scheduler.add(second)
    watched.step()
    assert (first.paging.cached, second.paging.cached) == (128, 149)
    assert second.pages[:2] == first.pages[:2]
    assert second.blueprint_history.prefix == first.blueprint_history.prefix
    assert [b.weight_bits[0] for b in map(second.blueprint_at, (0, 127, 128))] == [8, 8, 4]
    while watched.scheduler.has_work():
        watched.step()
    assert second.parts == [(at(4), 60)]
    assert [*itertools.chain(first.rows(0, 150))] == [(at(8), 128), (at(4), 22)]
