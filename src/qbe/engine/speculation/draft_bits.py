"""The bits of draft tokens: a sequence's own blueprint, no site of it above a gear, which `speculator` chooses."""

from __future__ import annotations

from dataclasses import replace

from qbe.blueprint import Blueprint
from qbe.sites import SiteTable


class DraftBits:
    """The blueprints that drafts run at, and what they read; each is made once.

    Args:
        table: the model's sites.
    """

    def __init__(self, table: SiteTable) -> None:
        self._table = table
        self._lowered: dict[tuple[str, int], tuple[Blueprint, int]] = {}
        self._averages: dict[str, float] = {}

    def lowered(self, blueprint: Blueprint, gear: int) -> tuple[Blueprint, int]:
        """The blueprint with no weight read above `gear`, and the bytes that a token reads at it."""
        key = blueprint.linear_key, gear
        if key not in self._lowered:
            bits = tuple(min(b, gear) for b in blueprint.weight_bits)
            lowered = replace(blueprint, weight_bits=bits, dynamic_precision=None)
            self._lowered[key] = lowered, lowered.bytes_per_token(self._table)
        return self._lowered[key]

    def average(self, blueprint: Blueprint) -> float:
        """Mean gear over the weights."""
        if blueprint.linear_key not in self._averages:
            self._averages[blueprint.linear_key] = blueprint.average_weight_bits(self._table)
        return self._averages[blueprint.linear_key]
