"""The bits of draft tokens: a sequence's own blueprint, no site of it above the gear that is likely to be fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from qbe.blueprint import Blueprint
from qbe.engine.speculation.acceptance_statistics import progress
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

    def fastest(
        self, blueprints: Sequence[Blueprint], gears: Iterable[int], most: int, acceptance: Callable[[int], float],
        seconds: Callable[[int, float], float],
    ) -> tuple[float, int, int] | None:  # fmt: skip
        """The gear and the number of draft tokens with which sequences of these blueprints write the most.

        Args:
            gears: that may draft; those that lower no blueprint's average do not.
            most: draft tokens at most.
            acceptance: gear -> probability that a draft token of it is accepted.
            seconds: rows and their highest average -> what a step takes.

        Returns:
            Tokens a second of all sequences, the gear and the number of draft tokens; None where nothing can draft.
        """
        n, bits = len(blueprints), max(map(self.average, blueprints))
        ways = list[tuple[float, int, int]]()
        for gear in (g for g in gears if g < bits):
            low = max(self.average(self.lowered(b, gear)[0]) for b in blueprints)
            for k in range(1, most + 1 if low < bits else 1):
                written = n * progress(acceptance(gear), k)
                ways.append((written / (k * seconds(n, low) + seconds(n * (k + 1), bits)), gear, k))
        return max(ways, key=lambda way: way[0], default=None)

    def average(self, blueprint: Blueprint) -> float:
        """Mean gear over the weights."""
        if blueprint.linear_key not in self._averages:
            self._averages[blueprint.linear_key] = blueprint.average_weight_bits(self._table)
        return self._averages[blueprint.linear_key]
