"""The planner by itself: books that never overrun, the most-read slices there, no thrashing, new traffic followed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.errors import QBEError
from qbe.residency.planner import IN_FLIGHT, Counts, Numbers, Planner, Slice
from qbe.residency.size import at_least, parse_size

EXPERTS, TOP, SLICES = 200, 4, 3


def planner(budget: int, use: Numbers | None = None, sites: int = EXPERTS) -> Planner:
    """Slices of 4, 2 and 2 bytes, so that 4 bytes of a site are not there at the start."""
    sizes: Counts = np.tile(np.array([4, 2, 2], np.int64), (sites, 1))
    return Planner(sizes, budget, np.ones(sites) if use is None else use)


def skewed(hot: Counts) -> Numbers:
    """Probabilities with which a token chooses each expert: a tenth of them takes 80 % of the tokens."""
    chances = np.full(EXPERTS, 0.2 / (EXPERTS - len(hot)))
    chances[hot] = 0.8 / len(hot)
    return chances


def serve(plan: Planner, chances: Numbers, tokens: int, draw: np.random.Generator) -> tuple[float, int]:
    """Decodes tokens that ask for all slices of each expert that they choose, with fetches that take a step.

    Returns:
        The share of the bits above the lowest slices that reads found, and the bytes fetched.
    """
    found, reads, moved = 0.0, 0, 0
    coming: list[Slice] = []
    for step in range(tokens // 4):
        for one in coming:
            plan.arrived(one)
        coming = []
        if step % 8 == 0:
            moves = plan.moves()
            coming = moves.fetched
            moved += sum(int(plan.sizes[s]) for s in moves.fetched)
        # Gumbel: experts without replacement, by their chances
        noise = np.log(chances) + draw.gumbel(size=(4, EXPERTS))
        chosen = np.argpartition(-noise, TOP, axis=1)[:, :TOP].ravel()
        found += float((plan.levels[chosen] - 1).sum()) / (SLICES - 1)
        reads += len(chosen)
        plan.count(chosen, np.full(len(chosen), SLICES))
        plan.age(4)
        check_books(plan)
    return found / reads, moved


def test_lowest_slices_that_may_leave_come_before_all_others() -> None:
    """And leave last: without them a row reads from the host's memory."""
    sizes: Counts = np.tile(np.array([4, 2, 2], np.int64), (10, 1))
    plan = Planner(sizes, 44, np.ones(10), np.zeros(10, np.int64))
    plan.fill()
    assert plan.levels.tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    plan.count(np.arange(5, 8), np.full(3, 3), 500.0)
    moves = plan.moves()
    assert moves.dropped == [Slice(0, 1), Slice(1, 1)]
    assert moves.fetched == [Slice(5, 1), Slice(6, 1)]
    assert (plan.levels >= 1).all()


def check_books(plan: Planner) -> None:
    held = sum(int(plan.sizes[s, 1:level].sum()) for s, level in enumerate(plan.levels))
    coming = sum(int(plan.sizes[s, plan.levels[s]]) for s in np.flatnonzero(plan._coming))
    assert plan.held == held + coming <= plan.budget
    assert plan.levels.min() >= 1
    assert plan.levels.max() <= plan.sizes.shape[1]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_books_are_right_whatever_happens(data: st.DataObject) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sites = data.draw(st.integers(1, 12))
    sizes: Counts = draw.integers(1, 9, (sites, data.draw(st.integers(1, 4))))
    plan = Planner(sizes, data.draw(st.integers(0, int(sizes.sum()))), draw.random(sites))
    assert all(plan.levels[s] > n for s, n in plan.fill())
    check_books(plan)
    coming: list[Slice] = []
    for action in data.draw(st.lists(st.sampled_from(["count", "moves", "arrive", "fail", "age"]), max_size=30)):
        if action == "count":
            some = draw.integers(0, sites, 5)
            plan.count(some, draw.integers(1, sizes.shape[1] + 1, 5), draw.random(5) * 1000)
        elif action == "moves":
            levels, moves = plan.levels.copy(), plan.moves()
            for one in moves.dropped:  # the highest that is there, and never the lowest slice
                levels[one.site] -= 1
                assert one.number == levels[one.site] > 0
            assert (levels == plan.levels).all()
            assert all(one.number == plan.levels[one.site] for one in moves.fetched)
            coming += moves.fetched
            assert plan.in_flight == len(coming) <= IN_FLIGHT
        elif action == "age":
            plan.age(500)
        elif coming:
            one = coming.pop(int(draw.integers(len(coming))))
            plan.arrived(one) if action == "arrive" else plan.failed(one)
        check_books(plan)
        assert (np.diff(plan.heat, axis=1) <= 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40))
def test_what_is_required_is_there_or_nothing_has_changed(seed: int, budget: int) -> None:
    draw = np.random.default_rng(seed)
    plan = planner(budget, draw.random(10), sites=10)
    plan.fill()
    sites = draw.choice(10, 3, replace=False)
    levels, pinned = draw.integers(1, 4, 3), np.zeros(10, bool)
    pinned[sites] = True
    pinned[draw.integers(10)] = True
    before = plan.levels.copy()
    moves = plan.require(sites, levels, pinned)
    check_books(plan)
    if moves is None:
        assert (plan.levels == before).all()
        assert int((plan.sizes[sites, 1:].sum(axis=1)).sum() + 4 * pinned.sum()) > budget
    else:
        assert (plan.levels[sites] >= levels).all()
        assert not any(pinned[one.site] for one in moves.dropped)
        assert {(s, n) for s, n in moves.fetched} == {
            (s, n) for s, level in zip(sites.tolist(), levels.tolist(), strict=True) for n in range(before[s], level)
        }


def test_at_the_start_the_likeliest_fit_and_without_use_the_low_slices_first() -> None:
    use = np.linspace(0.01, 1.0, EXPERTS)
    known = planner(EXPERTS * 2, use)
    known.fill()
    assert (np.diff(known.levels) >= 0).all()  # who is used more has as much
    assert known.levels[-1] == SLICES
    assert known.levels[0] == 1
    unknown = planner(EXPERTS * 2)
    unknown.fill()
    assert (unknown.levels == 2).all()
    plenty = planner(EXPERTS * 4)
    plenty.fill()
    assert (plenty.levels == SLICES).all()
    assert not plenty.moves().fetched


def test_half_the_memory_holds_what_skewed_routing_reads() -> None:
    """Nothing is known at the start; a tenth of the experts takes 80 % of the tokens."""
    draw = np.random.default_rng(0)
    hot = draw.choice(EXPERTS, EXPERTS // 10, replace=False)
    plan = planner(EXPERTS * 2)
    plan.fill()
    serve(plan, skewed(hot), 2000, draw)
    assert (plan.levels[hot] == SLICES).all()
    found, moved = serve(plan, skewed(hot), 2000, draw)
    assert found > 0.85  # the hot ones' part, and what is left of the memory for the others
    assert moved <= 0.05 * 2000 * TOP * 4  # of what fetching each read anew would move

    # Other traffic comes: its experts take the places within a half-life or two.
    other = np.setdiff1d(np.arange(EXPERTS), hot)[: EXPERTS // 10]
    serve(plan, skewed(other), 6000, draw)
    assert (plan.levels[other] == SLICES).all()


def test_equal_traffic_does_not_thrash() -> None:
    draw = np.random.default_rng(1)
    plan = planner(EXPERTS * 2)
    plan.fill()
    _, moved = serve(plan, np.full(EXPERTS, 1 / EXPERTS), 4000, draw)
    assert moved <= 0.02 * 4000 * TOP * 4


def test_a_whole_request_that_asks_for_more_brings_its_slices() -> None:
    """Room that others do not read enough goes to a prompt's sites, the low slices first."""
    plan = planner(budget=8, sites=4)
    plan.count(np.array([0, 1]), np.array([3, 3]), 100.0)
    plan.fill()
    assert plan.levels.tolist() == [3, 3, 1, 1]
    plan.age(20000)
    plan.count(np.array([2, 3]), np.array([3, 3]), 100.0)
    moves = plan.moves()
    assert moves.fetched == [(2, 1), (3, 1)]
    assert moves.dropped == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("500MB", 5 * 10**8), ("1.5k", 1500), (" 7 ", 7), (9, 9), ("2 tib", 2**41)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size("x", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "12 apples", "0", 0, True, "1e3", "٣GB", "9" * 30])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(QBEError, match=r"device_memory is .* must be a size"):
        parse_size("device_memory", text)


@given(st.integers(1, 2**50))
def test_a_size_that_is_told_suffices(size: int) -> None:
    assert size <= parse_size("x", at_least(size)) <= size * 1.02 + 128
