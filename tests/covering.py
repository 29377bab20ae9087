"""Which combinations of parameters a test tries, where all of them would take too long."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

FULL = os.environ.get("QBE_TEST_FULL") == "1"  # every combination, before a release


def covering(strength: int, *values: Sequence[Any], full: bool = False) -> list[tuple[Any, ...]]:
    """Combinations of one value each, few of them, the same ones every time.

    Args:
        strength: 1, every value is in one of them; 2, so is every pair of values of two parameters.
        full: all combinations, as `QBE_TEST_FULL=1` has them.
    """
    everything = list(itertools.product(*(range(len(v)) for v in values)))
    chosen = everything if full or FULL else _few(strength, everything)
    return [tuple(v[i] for v, i in zip(values, numbers, strict=True)) for numbers in chosen]


def _few(strength: int, everything: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Greedily: the one that has most of what is missing; of several, the one whose values were taken least."""

    def parts(numbers: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(numbers), min(strength, len(numbers))))

    missing = set().union(*map(parts, everything))
    taken: dict[tuple[int, int], int] = {}
    chosen = []
    while missing:
        best = max(everything, key=lambda n: (len(parts(n) & missing), -sum(taken.get(v, 0) for v in enumerate(n))))
        chosen.append(best)
        missing -= parts(best)
        for value in enumerate(best):
            taken[value] = taken.get(value, 0) + 1
    return sorted(chosen)
