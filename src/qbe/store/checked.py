"""What `qbe quantize` measured of assignments, as it is kept with a store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CheckedAverage:
    """The assignment with the least summed sensitivity at an average, on passages that sensitivities were not made on.

    Attributes:
        bits: the average, all weights that a token reads counted.
        predicted: its summed sensitivities, nats per token.
        measured: its divergence, nats per token.
        uniform: what the same gear everywhere does at that average: between two gears the mean of both, each by the
            share of tokens that would run at it.
        ratio: measured over uniform.
        low, high: where the ratio lies with 95 % confidence (bootstrap over passages).
        uncorrected: the ratio of the assignment by sensitivities as they were before they were corrected.
    """

    bits: float
    predicted: float
    measured: float
    uniform: float
    ratio: float
    low: float
    high: float
    uncorrected: float


@dataclass(frozen=True)
class AllocationCheck:
    """A check of the sensitivities of a store.

    Attributes:
        passages: that were read, and tokens of each.
        blend: gear -> share of uniform damage in the corrected sensitivities (`qbe.store.correction`); at 1 nothing is
            left of what was estimated or measured of single sites.
    """

    passages: int
    tokens: int
    blend: Mapping[int, float]
    averages: tuple[CheckedAverage, ...]

    def describe(self) -> dict[str, Any]:
        """As JSON; numbers with six digits."""
        told = asdict(self)
        for row in told["averages"]:
            row.update({key: float(f"{value:.6g}") for key, value in row.items()})
        return {**told, "blend": {str(gear): share for gear, share in self.blend.items()}}

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> AllocationCheck:
        """The inverse of `describe`. Raises ValueError, KeyError or TypeError for what it cannot have written."""
        averages = tuple(CheckedAverage(**{str(k): float(v) for k, v in row.items()}) for row in raw["averages"])
        blend = {int(gear): float(share) for gear, share in raw["blend"].items()}
        found = cls(int(raw["passages"]), int(raw["tokens"]), blend, averages)
        numbers = [value for row in averages for value in asdict(row).values()]
        if not all(map(math.isfinite, [*numbers, *blend.values()])):
            raise ValueError("a number of the check is not finite")
        return found
