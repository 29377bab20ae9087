"""The exact allocation (`qbe.allocation.knapsack`) as policies use it."""

from __future__ import annotations

from qbe.allocation.knapsack import TOLERANCE, allocate, solve
from qbe.budget import Budget
from qbe.sites import SiteTable

__all__ = ["TOLERANCE", "allocate", "reachable", "solve"]


def reachable(bits: float, budget: Budget, table: SiteTable) -> float:
    """The average; a range's, which nobody asked for by number, is no lower than what can be met."""
    return bits if budget.bits is not None else max(bits, table.reads.lowest_average)
