"""The rule for experts that fixed shares give: what is used often has moderate bits, what is used rarely the fewest.

It stands beside the measured policies to be compared with: `static` and `tiered` weigh what lowering an expert does to
a token that uses it against its use, in one allocation with all other sites.
"""

from __future__ import annotations

from functools import lru_cache

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies.allocate import allocate, reachable
from qbe.policies.base import Policy
from qbe.policies.kv import allocate_kv
from qbe.sites import FULL_BITS, SiteTable

OFTEN, RARELY = 0.10, 0.01  # shares of the tokens that use an expert
MODERATE = 6  # bits; the next gear below where a store lacks it


class ByUsePolicy(Policy):
    """Experts by their use alone: those that more than 10 % of the tokens use have 6 bits, those below 1 % the fewest,
    and those in between 6 bits where the budget allows it; where it does not even allow the first, all have the
    fewest. All other sites share what is left by their measured sensitivities, as in `static`.
    """

    name = "by_use"
    needs_sensitivity = True

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError for a budget below the store's lowest average, or without measured sensitivities."""
        kv_bits = FULL_BITS if budget.kv_bits is None else float(budget.kv_bits)
        return Blueprint.of(
            self.name, table, _allocation(table, reachable(budget.bits_for(0.5, profile.least_bits), budget, table)),
            table.activations(budget.activation_bits), allocate_kv(table, kv_bits),
        )  # fmt: skip


@lru_cache(maxsize=256)
def _allocation(table: SiteTable, bits: float) -> tuple[int, ...]:
    experts = [(i, s) for i, s in enumerate(table.nested) if s.expert is not None]
    for moderate_from in (RARELY, OFTEN, 1.0):
        fixed = {
            i: max((g for g in s.gears if g <= MODERATE), default=s.gears[0]) if s.use > moderate_from else s.gears[0]
            for i, s in experts
        }
        try:
            return allocate(table, bits, {}, fixed)
        except QBEError:
            if moderate_from == 1.0:
                raise
    raise AssertionError
