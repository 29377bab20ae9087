"""Which pages the scheduler shares, and in which format they are filled."""

from __future__ import annotations

import pytest

from engine_models import request
from qbe.blueprint import Blueprint
from scheduler_samples import FULL, LOW, advance, scheduler, shape


def test_sequences_that_begin_alike_share_pages() -> None:
    s = scheduler(tokens=256, pages=8)
    first = request("first", list(range(150)), max_tokens=5)
    s.add(first)
    advance(s)
    same, shorter, other = (
        request(name, tokens, max_tokens=5)
        for name, tokens in (
            ("same", list(range(150))),
            ("shorter", list(range(64))),
            ("other", [*range(100), 7, *range(101, 150)]),
        )
    )
    for r in (same, shorter, other):
        s.add(r)
    advance(s)
    assert same.pages[:2] == first.pages[:2]
    assert same.pages[2] is not first.pages[2], "a page that is not full is nobody else's"
    assert other.pages[0] is first.pages[0]
    assert other.pages[1] is not first.pages[1]
    cached = [r.paging.cached for r in (same, shorter, other)]
    assert cached == [128, 0, 64], "the last token is always computed"
    while s.has_work():
        advance(s)
    again = request("again", list(range(150)), Blueprint("other", (4,), (16,), ()), max_tokens=5)
    s.add(again)
    advance(s)
    assert again.paging.cached == 0, "computed at other bits, they are other pages"


def test_a_blueprint_that_changes_ends_sharing() -> None:
    s = scheduler(tokens=256)
    first = request("first", [5] * 60, max_tokens=150)
    s.add(first)
    advance(s)
    first.blueprint = Blueprint("other", (4,), (16,), ())
    for _ in range(80):
        advance(s)
    assert first.paging.page_keys == []
    assert all(p.key is None for p in first.pages)


def test_pages_take_the_format_that_a_sequence_has_when_they_are_filled() -> None:
    chosen = {"r": LOW}
    s = scheduler(pages=8, tokens=512, format_of=lambda r, _: chosen[r.request_id])
    r = request("r", [5] * 100, max_tokens=100)
    s.add(r)
    advance(s)
    assert [p.format for p in r.pages] == [LOW, LOW]
    assert r.paging.quantised == 0
    chosen["r"] = FULL
    advance(s)
    assert [p.format for p in r.pages] == [LOW, FULL], "what is written stays, what is being filled follows"
    chosen["r"] = LOW
    while not r.finish_reason:
        pages = list(r.pages)
        advance(s)
    assert [p.format for p in pages] == [LOW] * 4
    assert s.allocator.free == 8


def test_a_twin_shares_the_open_page_until_one_of_the_two_writes() -> None:
    s = scheduler(tokens=256)
    one, two = (request(n, [5] * 100, max_tokens=60) for n in ("one", "two"))
    two.paging.fork_parent = one
    s.add(one)
    advance(s)
    s.add(two)
    shared = one.pages[1]
    assert shape(s.schedule()) == [("one", 100, 1), ("two", 99, 1)]
    assert two.pages[0] is one.pages[0]
    assert one.pages[1] is shared
    assert s.paging.copies == [(shared.block_id, two.pages[1].block_id)], "copied once; the other one may then write"
    assert (two.paging.cached, two.paging.fork_parent) == (99, None)
    while s.has_work():
        advance(s)
    assert s.allocator.free == s.allocator.num_pages


@pytest.mark.parametrize(
    ("length", "steps", "shares"), [(100, 1, True), (100, 27, True), (100, 28, False), (128, 1, False), (65, 1, False)]
)
def test_a_twin_shares_no_page_that_is_sealed_or_will_be(length: int, steps: int, shares: bool) -> None:
    s = scheduler(tokens=256)
    one, two = (request(n, [5] * length, max_tokens=60) for n in ("one", "two"))
    two.paging.fork_parent = one
    s.add(one)
    for _ in range(steps):
        advance(s)
    s.add(two)
    s.schedule()
    assert bool(s.paging.copies) is shares
    assert two.paging.cached == (length - 1 if shares else 64)
    other = request("other", [5] * (length - 1) + [6], max_tokens=60)
    other.paging.fork_parent = one
    s.add(other)
    s.schedule()
    assert other.paging.cached == 64
