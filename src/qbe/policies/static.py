"""The best static mixed precision: the baseline that a choice for each query has to beat."""

from __future__ import annotations

from functools import lru_cache

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.policies.allocate import allocate, reachable
from qbe.policies.base import Policy
from qbe.policies.kv import allocate_kv
from qbe.sites import FULL_BITS, SiteTable


class StaticPolicy(Policy):
    """One assignment for every query: the least sum of measured sensitivities at the budget's average, else at the
    middle of its tier (the linearity theorem's allocation, `qbe.policies.allocate`). No floors by role: the measurement
    alone is asked. The KV cache has the budget's bits, else 16.

    The average is never above what was asked for and, where the model has an assignment that close, at most 0.05 bits
    below.
    """

    name = "static"
    reads_score = False
    needs_sensitivity = True

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError for a budget below the store's lowest average, or without measured sensitivities."""
        kv_bits = FULL_BITS if budget.kv_bits is None else float(budget.kv_bits)
        gears = _allocation(table, reachable(budget.bits_for(0.5, profile.least_bits), budget, table))
        return Blueprint.of(
            self.name, table, gears, table.activations(budget.activation_bits), allocate_kv(table, kv_bits)
        )


@lru_cache(maxsize=256)
def _allocation(table: SiteTable, bits: float) -> tuple[int, ...]:
    return allocate(table, bits, {})
