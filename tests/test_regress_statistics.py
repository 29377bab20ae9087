"""What `qbe regress` says that paired answers show, against searches, draws and SciPy's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest, norm

from qbe.regress.divergence import bound
from qbe.regress.gate import Flips, Judge
from qbe.regress.statistics import Pairs, items_needed, per_success_bounds, rate_bounds, ratio_bounds

ALPHA = 0.05


@pytest.mark.parametrize("pairs", [Pairs(40, 0, 0), Pairs(44, 0, 1), Pairs(50, 5, 5), Pairs(50, 12, 2), Pairs(9, 8, 1)])
def test_the_bound_of_a_loss_is_where_tangos_score_reaches_it(pairs: Pairs) -> None:
    """Against the likelihood, maximised by search under a given difference."""
    difference, n, b, c = pairs.most_loss(ALPHA), pairs.n, pairs.lost, pairs.gained
    assert pairs.loss < difference < 1

    def unlikely(gains: float) -> float:
        shares = ((gains + difference, b), (gains, c), (1 - 2 * gains - difference, n - b - c))
        return -sum(k * math.log(max(p, 1e-300)) for p, k in shares if k)

    gains = minimize_scalar(unlikely, bounds=(0, (1 - difference) / 2), method="bounded", options={"xatol": 1e-12}).x
    spread = n * (2 * gains + difference * (1 - difference))
    assert (b - c - n * difference) / math.sqrt(spread) == pytest.approx(-norm.isf(ALPHA), abs=1e-3)


def test_the_bound_covers_the_loss_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for lost, gained in ((0.05, 0.05), (0.1, 0.02), (0.3, 0.2)):
        drawn = rng.multinomial(80, [lost, gained, 1 - lost - gained], size=400)
        covered = np.mean([Pairs(80, int(b), int(c)).most_loss(ALPHA) >= lost - gained for b, c, _ in drawn])
        assert covered >= 0.92


def test_losses_by_chance_are_mcnemars() -> None:
    assert Pairs(50, 12, 2).loss_is_chance() == pytest.approx(binomtest(12, 14, alternative="greater").pvalue)
    assert Pairs(50, 12, 2).gain_is_chance() == pytest.approx(binomtest(2, 14, alternative="greater").pvalue)
    assert Pairs(50, 0, 0).loss_is_chance() == 1


def test_the_items_that_are_named_decide_and_one_less_does_not() -> None:
    for pairs in (Pairs(20, 0, 0), Pairs(30, 1, 1)):
        needed = items_needed(pairs, 0.05, ALPHA, 0.01)
        assert needed is not None
        judge = Judge(ALPHA, 5)
        names = [str(i) for i in range(needed)]
        flips = [round(k * needed / pairs.n) for k in (pairs.lost, pairs.gained)]
        split = tuple(names[: flips[0]]), tuple(names[flips[0] : sum(flips)])
        assert judge.loss("x", Flips(names, *split), 0.05, "answers").status == "pass"
    assert items_needed(Pairs(20, 0, 0), 0.05, ALPHA, 0.01) == 52
    assert Pairs(52, 0, 0).most_loss(ALPHA) <= 0.05 < Pairs(51, 0, 0).most_loss(ALPHA)


def test_gates_pass_fail_and_hesitate() -> None:
    names, judge = [str(i) for i in range(60)], Judge(ALPHA, 4)

    def status(lost: int, gained: int) -> str:
        flips = Flips(names, tuple(names[:lost]), tuple(names[lost : lost + gained]))
        return judge.loss("logic.loss", flips, 0.1, "answers").status

    assert [status(0, 0), status(3, 3), status(5, 0), status(20, 2)] == ["pass", "pass", "inconclusive", "fail"]
    assert [judge.rate("r", names[:k], 60, 0.1, "flipped").status for k in (0, 5, 20)] == [
        "pass",
        "inconclusive",
        "fail",
    ]
    low, high = rate_bounds(5, 60, ALPHA)
    assert low < 5 / 60 < high


def test_ratios_are_bounded_by_pairs() -> None:
    rng = np.random.default_rng(1)
    before = rng.exponential(1.0, 200)
    low, high = ratio_bounds(1.5 * before, before, ALPHA) or (0, 0)
    assert (low, high) == (pytest.approx(1.5), pytest.approx(1.5)), "paired: what both share does not count"
    right = np.tile([1, 0], 100)
    assert per_success_bounds(before, right, before, right, ALPHA) == (1, 1)
    half = per_success_bounds(before, right, before / 2, right, ALPHA)
    assert half == (pytest.approx(0.5), pytest.approx(0.5)), "half the bits, as many right"
    assert per_success_bounds(before, right, before, np.zeros(200), ALPHA) is None


def test_a_divergence_is_a_lower_bound_and_0_for_the_same() -> None:
    rng = np.random.default_rng(2)
    p, q = (rng.dirichlet(np.ones(30)) for _ in range(2))
    whole = float(np.sum(p * np.log(p / q)))

    def likeliest(of: np.ndarray, k: int) -> dict[str, float]:
        return {str(i): math.log(of[i]) for i in np.argsort(of)[-k:]}

    assert bound(likeliest(p, 30), likeliest(q, 30)) == pytest.approx(whole, abs=1e-6)
    assert 0 < bound(likeliest(p, 12), likeliest(q, 12)) <= whole
    assert bound(likeliest(p, 12), likeliest(p, 12)) == 0
