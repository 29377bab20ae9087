"""One precision for every site: the baseline of every comparison."""

from __future__ import annotations

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies.base import Policy
from qbe.sites import FULL_BITS, KV_BITS, SiteTable


class UniformPolicy(Policy):
    """Every nested site at the budget's bits, else at the widest gear its tier allows; the KV cache at the budget's,
    else at 16. Blind to the query.
    """

    name = "uniform"
    reads_score = False
    needs_sensitivity = False
    cache_version = "1"

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError for bits the store does not have."""
        wanted = budget.bits
        if wanted is None:
            allowed = [g for g in table.gears() if g <= budget.bits_for(1.0)]
            wanted = max(allowed, default=table.gears()[0])
        if wanted not in table.gears():
            have = ", ".join(map(str, table.gears()))
            raise QBEError(
                f"the uniform policy cannot run at {wanted:g} bits: the store has {have}; "
                "choose one of those, or --policy tiered for an average in between"
            )
        kv_bits = FULL_BITS if budget.kv_bits is None else budget.kv_bits
        if kv_bits not in KV_BITS:
            raise QBEError(
                f"the uniform policy cannot keep the KV cache at {kv_bits:g} bits: it has "
                f"{', '.join(map(str, KV_BITS))}; choose one of those, or --policy tiered for an average in between",
                field="kv_bits",
            )
        weight_bits = (int(wanted),) * len(table.nested)
        activation_bits = table.activations(budget.activation_bits)
        return Blueprint.of(self.name, table, weight_bits, activation_bits, (int(kv_bits),) * table.layers)
