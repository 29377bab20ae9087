"""The default policy: score and budget give one of few averages, exact allocations give each site its bits."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.policies import kv
from qbe.policies.allocate import allocate, reachable
from qbe.policies.base import Policy
from qbe.sites import SiteTable

CACHE_SIZE = 1024


class TieredPolicy(Policy):
    """Average bits from score and budget; bits per site by `qbe.policies.allocate`, of the KV cache by
    `qbe.policies.kv`, both remembered per average. No floors by role: the measurement sees what lowering a role does,
    and a floor takes bits from where they do more. One of 6 bits at the output head cost SmolLM2 rotated 46 % more
    divergence at 4.5 bits (docs/quality.md), one at SSM projections cost hybrid-moe-tiny more at 5
    (docs/measurements/quality-weights.md).
    """

    name = "tiered"
    needs_sensitivity = True
    cache_version = "5"

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = threading.Lock()

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError for a budget below the store's lowest average, or without measured sensitivities."""
        bits = reachable(budget.average_for(profile.score, profile.least_bits), budget, table)

        def weights() -> tuple[Blueprint, int]:
            blueprint = Blueprint.of(
                self.name, table, allocate(table, bits, {}), table.activations(budget.activation_bits)
            )
            return blueprint, blueprint.bytes_per_token(table)

        full_kv, weight_bytes = self._once((table, bits, budget.activation_bits), weights)
        average = kv.average_bits(profile, budget, table, weight_bytes)
        return self._once(
            (table, bits, budget.activation_bits, average, budget.kv_bits is None),
            lambda: kv.with_cache(full_kv, budget, table, average),
        )

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` gave for this key the first time."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = make()
        with self._lock:
            self._known[key] = made
            while len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)
        return made
