"""The default policy: score and budget give an average, an exact allocation gives each site its bits."""

from __future__ import annotations

import threading
from collections import OrderedDict

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.policies.allocate import allocate
from qbe.sites import Role, SiteTable

# Where a calibration text says too little: an error in the output head reaches every token's choice directly, and
# one in an SSM projection is carried on by the state (specification, section 12).
ROLE_FLOORS = {Role.OUTPUT_HEAD: 6, Role.SSM_IN: 6, Role.SSM_OUT: 6}
STEP = 0.05  # average bits are rounded to this when the score chose them, so that similar queries share a blueprint
CACHE_SIZE = 512


class TieredPolicy:
    """Average bits from score and budget; bits per site by `qbe.policies.allocate`, remembered per average."""

    name = "tiered"
    needs_sensitivity = True

    def __init__(self) -> None:
        self._solved: OrderedDict[tuple[SiteTable, float, int], Blueprint] = OrderedDict()
        self._lock = threading.Lock()

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError for a budget below the store's lowest average, or without measured sensitivities."""
        bits = budget.bits_for(profile.score)
        if budget.bits is None:
            bits = max(table.gears()[0], round(round(bits / STEP) * STEP, 2))
        key = (table, bits, budget.activation_bits)
        with self._lock:
            if key in self._solved:
                self._solved.move_to_end(key)
                return self._solved[key]
        weight_bits = allocate(table, bits, ROLE_FLOORS)
        found = Blueprint.of(self.name, table, weight_bits, table.activations(budget.activation_bits))
        with self._lock:
            self._solved[key] = found
            while len(self._solved) > CACHE_SIZE:
                self._solved.popitem(last=False)
        return found
