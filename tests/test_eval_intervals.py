"""Bootstrap intervals: where they lie, how often they are right, and when two settings are a tie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.datasets.intervals import difference, interval, ratio, verdict

positive = st.floats(1e-6, 1e3)
samples = st.lists(st.tuples(positive, positive), min_size=2, max_size=40)


@settings(max_examples=40, deadline=None)
@given(samples)
def test_intervals_hold_the_estimate_and_stay_within_the_queries(pairs: list[tuple[float, float]]) -> None:
    over, under = np.asarray(pairs).T
    found = interval(over, under)
    assert found is not None
    each = over / under
    slack = 1e-9 * each.max()
    assert each.min() - slack <= found[0] <= found[1] + slack <= each.max() + 2 * slack
    assert interval(over, under) == found, "the same numbers, the same interval"


@settings(max_examples=20, deadline=None)
@given(samples, st.floats(0.1, 10))
def test_settings_that_differ_by_a_factor_differ_for_sure(pairs: list[tuple[float, float]], factor: float) -> None:
    values = np.asarray(pairs)[:, 0]
    found = interval(values * factor, values)
    assert found == pytest.approx((factor, factor)), "the spread of the queries cancels where they are paired"
    if abs(factor - 1) > 1e-6:
        assert verdict(found, 1.0, True, 40) == ("better" if factor < 1 else "worse")


def test_about_one_in_twenty_intervals_misses() -> None:
    rng, missed = np.random.default_rng(1), 0
    for _ in range(100):
        tokens = rng.integers(20, 60, 60).astype(float)
        missed += not _holds(interval(rng.gamma(4.0, 0.25, 60) * tokens, tokens), 1.0)
    assert 1 <= missed <= 15  # 5 are expected, with a deviation of 2; percentiles of 60 queries miss somewhat more


def _holds(found: tuple[float, float] | None, value: float) -> bool:
    assert found is not None
    return found[0] <= value <= found[1]


def test_equal_settings_are_mostly_a_tie_and_different_ones_are_not() -> None:
    rng, verdicts = np.random.default_rng(2), []
    for shift in (1.0, 0.7):
        for _ in range(50):
            base = rng.gamma(4.0, 0.25, 40)
            now, before = (base * rng.gamma(20.0, 0.05, 40) for _ in range(2))
            verdicts.append(verdict(interval(shift * now, before), 1.0, True, len(now)))
    assert verdicts[:50].count("tie") >= 40
    assert verdicts[50:].count("better") >= 48


def test_degenerate_cases() -> None:
    one, zeros = np.ones(1), np.zeros(5)
    assert interval(one, one) is None
    assert interval(zeros, zeros) is None
    assert interval(zeros, np.ones(5)) == (0, 0)
    assert interval(np.ones(5), np.asarray([1.0, 0, 0, 0, 0])) is None, "most resamples have nothing below"
    assert difference(np.ones(5), zeros) == (1, 1)
    assert verdict(None, 1.0, True, 6) == "tie"
    assert verdict((0.1, 0.2), 0.0, False, 6) == "better"
    assert verdict((0.1, 0.2), 0.0, False, 5) == "too few queries"
    assert verdict((-0.2, -0.1), 0.0, False, 6) == "worse"
    assert verdict((-0.1, 0.0), 0.0, False, 6) == "tie"
    np.testing.assert_array_equal(ratio(np.ones((2, 3)), np.asarray([[1.0, 1, 1], [2, 2, 2]])), [1, 0.5])
