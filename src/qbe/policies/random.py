"""Random bits for every query and site: only what beats them at the same average is a gain."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies.allocate import TOLERANCE, reachable
from qbe.policies.base import Policy
from qbe.policies.kv import allocate_kv
from qbe.sites import FULL_BITS, SiteTable

TRIES = 100  # draws for one query; where one site has most of the weights not every draw comes close
Widths = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


class RandomPolicy(Policy):
    """Draws each site's bits anew for each query, blind to what they cost. `random:1` is the policy with seed 1.

    The draws are independent, from the distribution of most entropy over the store's widths (16 bits only where an
    average asks for them) whose mean is the budget. As the sites are few and of different sizes, random ones are then
    lowered until the average is not above the budget and raised while one fits; a draw that stays more than 0.05 bits
    below is drawn again. The same query and seed give the same bits; the KV cache has the budget's, else 16.

    Without a budget in bits the average is what `tiered` would give the query.
    """

    needs_sensitivity = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.name = f"random:{seed}" if seed else "random"

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError for a budget below the store's lowest average."""
        wanted = reachable(budget.average_for(profile.score, profile.least_bits), budget, table)
        facts = (self.seed, profile.score, profile.prompt_class, sorted(profile.features.items()))
        draw = np.random.default_rng(int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()))
        kv_bits = FULL_BITS if budget.kv_bits is None else float(budget.kv_bits)
        return Blueprint.of(
            self.name, table, _draw(table, wanted, draw), table.activations(budget.activation_bits),
            allocate_kv(table, kv_bits),
        )  # fmt: skip


def _draw(table: SiteTable, wanted: float, draw: np.random.Generator) -> tuple[int, ...]:
    """A gear for every nested site; their average is at most `wanted` bits and, if the sites allow it, close to it."""
    below = [g for g in table.gears() if g < FULL_BITS]
    gears = np.asarray(below if below and wanted <= below[-1] else table.gears())
    if wanted < table.reads.lowest_average - 1e-9:
        raise QBEError(
            f"the random policy cannot meet a budget of {wanted:g} bits: this store's lowest average is "
            f"{table.reads.lowest_average:.4g}; raise --bits or quantise the model with narrower slices"
        )
    wanted = table.reads.of_nested(wanted)
    sizes = table.reads.sizes / table.reads.sizes.sum()
    p = _most_entropy(gears, wanted)
    best, closest = np.zeros(len(sizes), dtype=int), -1.0
    for _ in range(TRIES):
        drawn = _fitted(draw.choice(len(gears), len(sizes), p=p), gears, sizes, wanted, draw)
        average = float(sizes @ gears[drawn])
        if average > closest:
            best, closest = drawn, average
        if average >= wanted - TOLERANCE:
            break
    return tuple(int(g) for g in gears[best])


def _fitted(chosen: Widths, gears: Widths, sizes: Numbers, wanted: float, draw: np.random.Generator) -> Widths:
    """The draw with random sites lowered until the average is not above `wanted`, then raised as long as one fits."""
    for step in (-1, 1):
        moved = True
        while moved:
            moved = False
            for site in draw.permutation(len(sizes)):
                average, to = float(sizes @ gears[chosen]), chosen[site] + step
                if step < 0 and average <= wanted + 1e-9:
                    break
                if not 0 <= to < len(gears):
                    continue
                if step < 0 or average + sizes[site] * (gears[to] - gears[chosen[site]]) <= wanted + 1e-9:
                    chosen[site], moved = to, True
    return chosen


def _most_entropy(gears: Widths, mean: float) -> Numbers:
    """Probabilities float64 [gears] of the distribution of most entropy with this mean: proportional to exp(t gear)."""

    def at(t: float) -> Numbers:
        weights = np.exp(t * (gears - (gears[-1] if t > 0 else gears[0])))
        return weights / weights.sum()

    if mean <= gears[0] or mean >= gears[-1]:
        return np.eye(len(gears))[0 if mean <= gears[0] else -1]
    t = brentq(lambda t: float(at(t) @ gears) - mean, -60, 60)
    return at(float(t))
