"""What a test tries of its parameters: every value or every pair, and everything where that is asked for."""

from __future__ import annotations

import itertools

import pytest

from covering import FULL, covering

VALUES = ([1, 2, 3, 4, 5], "abc", [False, True])


@pytest.mark.parametrize("strength", [1, 2])
def test_every_value_or_pair_is_tried(strength: int) -> None:
    tried = covering(strength, *VALUES)
    for some in itertools.combinations(range(3), strength):
        wanted = set(itertools.product(*(VALUES[i] for i in some)))
        assert {tuple(case[i] for i in some) for case in tried} == wanted
    assert tried == covering(strength, *VALUES)
    assert len(tried) == 30 if FULL else len(tried) <= (5 if strength == 1 else 18)


def test_everything_is_tried_where_it_is_asked_for() -> None:
    assert covering(2, *VALUES, full=True) == list(itertools.product(*VALUES))
