"""Bootstrap intervals over queries (Efron's percentiles, by SciPy), paired where two settings ran the same queries."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import DegenerateDataWarning, bootstrap

Numbers = npt.NDArray[np.float64]
RESAMPLES = 5000
LEVEL = 0.95
FEWEST = 6  # queries of a verdict: that so many differ in one direction happens by chance in 3 % of cases, five in 6
TOO_FEW = "too few queries"


def ratio(over: Any, under: Any, axis: int = -1) -> Any:
    """Sum over sum along an axis; NaN where the lower one is 0."""
    above, below = np.sum(over, axis), np.sum(under, axis)
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below != 0)


def interval(over: Numbers, under: Numbers) -> tuple[float, float] | None:
    """Where the ratio of the two sums lies with 95 % confidence, had other queries been drawn.

    A mean per token is the ratio of sums over tokens and numbers of tokens; a mean over queries has ones below; the
    ratio of two settings on the same queries has the other setting below.

    Args:
        over, under: float64 [queries], of the same queries.

    Returns:
        low and high; None for fewer than two queries, or where nothing is in `under`.
    """
    if len(over) < 2 or not np.any(under):
        return None
    rng = np.random.default_rng(0)  # the same numbers give the same interval
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # it becomes None below
        bounds = bootstrap(
            (over, under), ratio, paired=True, vectorized=True, n_resamples=RESAMPLES, confidence_level=LEVEL,
            method="percentile", rng=rng, batch=max(1, 2_000_000 // len(over)),
        ).confidence_interval  # fmt: skip
    low, high = float(bounds.low), float(bounds.high)
    return (low, high) if np.isfinite([low, high]).all() else None


def difference(now: Numbers, before: Numbers) -> tuple[float, float] | None:
    """The same of the mean difference of two settings."""
    return interval(now - before, np.ones(len(now)))


def verdict(bounds: tuple[float, float] | None, equal: float, less_is_better: bool, queries: int) -> str:
    """`better`, `worse`, or `tie` where the interval holds the number that says both are equal, or there is none.

    Of fewer than `FEWEST` queries an interval says little, however narrow: `TOO_FEW`.
    """
    if queries < FEWEST:
        return TOO_FEW
    if bounds is None or bounds[0] <= equal <= bounds[1]:
        return "tie"
    return "better" if (bounds[1] < equal) is less_is_better else "worse"
