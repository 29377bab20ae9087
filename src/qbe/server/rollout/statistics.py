"""Whether the candidate is worse: one-sided bounds that may be looked at again and again.

Someone who tests after every answer finds everything worse sooner or later. Here tests are made at growing counts, and
the k-th of them has the level LEVEL / (k (k + 1)); these add up to LEVEL however many there are, so that an arm that is
no worse than its limit is called worse with at most that probability (the union bound).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from scipy.special import stdtrit

LEVEL = 0.01  # of all tests of one metric in one step, one-sided
_GROWTH = 1.25  # of the count between two tests, until the window is full
_QUANTILE = 0.95  # of latencies


@dataclass
class Looks:
    """When a metric is tested next, and at which level.

    Attributes:
        next: answers of the candidate that it waits for.
        number: of that test, from 1.
    """

    next: int
    window: int
    number: int = 1

    def take(self, seen: int) -> float | None:
        """The level of a test after so many answers; None while it is not due."""
        if seen < self.next:
            return None
        level = LEVEL / (self.number * (self.number + 1))
        self.number += 1
        self.next = max(seen + 1, min(math.ceil(seen * _GROWTH), seen + math.ceil(self.window / 4)))
        return level


def wilson(bad: float, n: int, level: float) -> tuple[float, float]:
    """A share's lower and upper bound, each one-sided at `level` (E. B. Wilson, 1927)."""
    z = NormalDist().inv_cdf(1 - level)
    share, square = bad / n, z * z / n
    centre = (share + square / 2) / (1 + square)
    half = z * math.sqrt(max(0.0, share * (1 - share)) / n + square / (4 * n)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def least_excess(bad: float, n: int, of: float, m: int, level: float) -> float:
    """The lower bound of how much the share bad/n exceeds of/m (Newcombe's hybrid score interval, 1998)."""
    share, other = bad / n, of / m
    low, high = wilson(bad, n, level)[0], wilson(of, m, level)[1]
    return share - other - math.hypot(share - low, high - other)


def least_mean(values: Sequence[float], level: float) -> float:
    """The lower bound of the mean of what values are drawn from, by Student's t; there are two at least."""
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return mean - float(stdtrit(n - 1, 1 - level)) * spread / math.sqrt(n)


def quantile(values: Sequence[float], part: float = _QUANTILE) -> float:
    """The smallest value that at least this part of them does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def slower(values: Sequence[float], than: Sequence[float], times: float, level: float) -> bool:
    """Whether the 95th percentile is more than so many times that of the others, of which no distribution is known.

    Were it not, at most 5 in 100 would exceed that. So worse is where the share that does, beyond the others' own,
    is above 5 % for sure.
    """
    bound = times * quantile(than)
    over, own = (sum(v > bound for v in some) for some in (values, than))
    return least_excess(over, len(values), own, len(than), level) > 1 - _QUANTILE
