"""What paired answers can show: exact tests, score bounds and bootstraps, one-sided throughout."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import DegenerateDataWarning, binomtest, bootstrap, norm

from qbe.datasets.intervals import ratio

_MOST_ITEMS = 1 << 20
_RESAMPLES = 5000


@dataclass(frozen=True)
class Pairs:
    """The same items under baseline and candidate.

    Attributes:
        n: items.
        lost: right before and wrong now.
        gained: the other way round.
    """

    n: int
    lost: int
    gained: int

    @property
    def loss(self) -> float:
        """How much lower the share of right answers is now."""
        return (self.lost - self.gained) / self.n

    def loss_is_chance(self) -> float:
        """Exact McNemar, one-sided: how likely as many losses are where gains are as likely."""
        return self._tail(self.lost)

    def gain_is_chance(self) -> float:
        """The same of the gains."""
        return self._tail(self.gained)

    def _tail(self, count: int) -> float:
        changed = self.lost + self.gained
        return float(binomtest(count, changed, 0.5, alternative="greater").pvalue) if changed else 1.0

    def most_loss(self, alpha: float) -> float:
        """Upper bound of the loss at confidence 1 - alpha: Tango's score interval (1998), which needs no flip to be
        wider than nothing.
        """
        z = float(norm.isf(alpha))
        if self.lost == self.n:
            return 1.0
        return float(brentq(lambda d: self._score(d) + z, self.loss, 1 - 1e-9))

    def _score(self, difference: float) -> float:
        """Tango's statistic of a true loss of `difference`; it falls as that rises."""
        n, b, c = self.n, self.lost, self.gained
        # Likelihood's estimate of the share of gains, given the difference.
        first = -b - c + (2 * n - b + c) * difference
        second = -c * difference * (1 - difference)
        gains = (math.sqrt(max(0.0, first * first - 8 * n * second)) - first) / (4 * n)
        spread = n * (2 * gains + difference * (1 - difference))
        return (b - c - n * difference) / math.sqrt(spread) if spread > 0 else 0.0


def items_needed(pairs: Pairs, margin: float, alpha: float, significance: float) -> int | None:
    """Items that would decide, were flips as frequent among them: the loss within the margin, or beyond it and no
    chance.

    Args:
        alpha: of the bound. significance: below which a loss is no chance.

    Returns:
        None where the loss lies so near the margin that a million would not.
    """

    def decides(n: int) -> bool:
        scaled = Pairs(n, round(pairs.lost * n / pairs.n), round(pairs.gained * n / pairs.n))
        if scaled.loss > margin:
            return scaled.loss_is_chance() <= significance
        return scaled.most_loss(alpha) <= margin

    high = next((2**i for i in range(1, _MOST_ITEMS.bit_length()) if decides(2**i)), None)
    if high is None:
        return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def rate_bounds(count: int, n: int, alpha: float) -> tuple[float, float]:
    """One-sided Wilson bounds of a rate, each at confidence 1 - alpha; (0, 1) of nothing."""
    if not n:
        return 0.0, 1.0
    found = [
        binomtest(count, n, alternative=side).proportion_ci(1 - alpha, method="wilson") for side in ("greater", "less")
    ]
    return float(found[0].low), float(found[1].high)


def rate_items_needed(rate: float, limit: float, alpha: float) -> int | None:
    """Items of which so many would show by Wilson's bound that the rate is below the limit; None where it is not."""
    z = float(norm.isf(alpha))
    return math.ceil(z * z * limit * (1 - limit) / (limit - rate) ** 2) if rate < limit else None


def ratio_bounds(over: Any, under: Any, alpha: float) -> tuple[float, float] | None:
    """One-sided bounds of sum over sum, each at confidence 1 - alpha: percentile bootstrap over pairs.

    Args:
        over, under: of the same items.

    Returns:
        None for fewer than two items, or where nothing is in `under`.
    """
    above, below = np.asarray(over, np.float64), np.asarray(under, np.float64)
    if len(above) < 2 or not below.any():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)
        found = bootstrap(
            (above, below), ratio, paired=True, vectorized=True, n_resamples=_RESAMPLES, confidence_level=1 - 2 * alpha,
            method="percentile", rng=np.random.default_rng(0), batch=max(1, 2_000_000 // len(above)),
        ).bootstrap_distribution  # fmt: skip
    found = found[np.isfinite(found)]
    return (float(np.quantile(found, alpha)), float(np.quantile(found, 1 - alpha))) if len(found) else None


def per_success_bounds(
    costs: Any, right: Any, costs_now: Any, right_now: Any, alpha: float
) -> tuple[float, float] | None:
    """The same of the candidate's cost per right answer over the baseline's: all four are of the same items.

    Returns:
        None where one of the two gets too few right for resamples to have any.
    """
    drawn = [np.asarray(x, np.float64) for x in (costs, right, costs_now, right_now)]
    if len(drawn[0]) < 2 or min(drawn[1].sum(), drawn[3].sum(), drawn[0].sum()) <= 0:
        return None
    index = np.random.default_rng(0).integers(len(drawn[0]), size=(_RESAMPLES, len(drawn[0])))
    before, successes, now, successes_now = (x[index].sum(1) for x in drawn)
    there = (successes > 0) & (successes_now > 0) & (before > 0)
    if there.mean() < 1 - alpha:
        return None
    found = (now[there] / successes_now[there]) / (before[there] / successes[there])
    return float(np.quantile(found, alpha)), float(np.quantile(found, 1 - alpha))
