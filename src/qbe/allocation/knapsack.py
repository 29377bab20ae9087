"""Bits per site under a budget of average bits: a multiple-choice knapsack, solved exactly by SciPy's HiGHS, and by a
Lagrangian (`qbe.allocation.lagrangian`) where experts are thousands of sites.

Minimise the summed sensitivity (KL of the logits when a site alone is lowered) subject to the average over all weights
that a token reads; an expert's sensitivity and weights both count by how often it is used.
That the damage of single sites adds up is the linearity theorem of HIGGS (Malinovskii et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from qbe.allocation import lagrangian
from qbe.errors import QBEError
from qbe.sites import Role, SiteTable

TOLERANCE = 0.05  # average bits a solution may stay below its budget
LARGE = 1000  # sites from which a Lagrangian takes over; models without experts have a few hundred
NODES = 500  # of the search; the incumbent is used after that, the same one on a busy machine as on an idle one
TIME_LIMIT = 20.0  # seconds, for what never ends: a search takes a tenth of one, and mostly one node


def allocate(
    table: SiteTable, average_bits: float, floors: Mapping[Role, int], fixed: Mapping[int, int] = MappingProxyType({})
) -> tuple[int, ...]:
    """The gear of every nested site with the least total sensitivity at an average of at most `average_bits`.

    Args:
        table: with measured sensitivities.
        floors: role -> lowest gear. They give way, all together, when the budget cannot be met with them.
        fixed: place of a nested site -> the gear that it has in any case.

    Raises:
        QBEError: the sensitivities were not measured, or even the lowest gears exceed the budget.
    """
    if not table.measured:
        raise QBEError(
            "this model has no sensitivity table: run 'qbe quantize' on it, or use --policy uniform", field="policy"
        )
    lowest = table.reads.lowest_average
    if average_bits < lowest - 1e-9:
        raise QBEError(
            f"a budget of {average_bits:g} bits cannot be met: this store's lowest average is "
            f"{lowest + 0.005:.2f}, all weights counted; raise --bits or quantise the model with narrower slices"
        )
    sizes, most = table.reads.sizes, table.reads.of_nested(average_bits)
    for rules in (floors, {}):
        if len(sizes) >= LARGE:
            gears, costs = _matrix(table, tuple(rules.items()))
            for i, gear in fixed.items():
                costs[i, gears != gear] = math.inf
            found = lagrangian.solve(gears, costs, sizes, most)
            if found is not None:
                return found
            continue
        few = _costs(table, rules)
        for i, gear in fixed.items():
            few[i] = {gear: few[i].get(gear, 0.0)}
        for least in (most - TOLERANCE, 0.0):  # a model with few sites may have no assignment that close
            found = solve(few, sizes.tolist(), most, least)
            if found is not None:
                return found
    raise QBEError(f"no assignment was found for a budget of {average_bits:g} bits; try a higher one")


def solve(
    costs: Sequence[Mapping[int, float]], sizes: Sequence[float], most: float, least: float = 0.0
) -> tuple[int, ...] | None:
    """The gear of every site with the least total cost at an average of `least` to `most` bits; None if there is none.

    Args:
        costs: per site gear -> cost; the gears it can have.
        sizes: per site its weight in the average.
    """
    choices = [(i, gear) for i, site in enumerate(costs) for gear in site]  # one binary variable each
    cost = np.asarray([max(0.0, costs[i][gear]) for i, gear in choices])
    weight = np.asarray([sizes[i] * gear / sum(sizes) for i, gear in choices])
    columns = np.arange(len(choices))
    one_each = coo_array((np.ones(len(choices)), ([i for i, _ in choices], columns)), shape=(len(costs), len(choices)))
    # Costs span many decades and the solver's tolerances are absolute, so they are scaled to at most 1.
    scaled = cost / max(cost.max(), 1e-30)
    # Of two assignments that cost the same, the one with fewer bits.
    result = milp(
        scaled + 1e-7 * weight,
        constraints=[
            LinearConstraint(one_each.tocsr(), 1, 1),
            LinearConstraint(weight[None, :], least, most + 1e-9),
        ],
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        options={"node_limit": NODES, "time_limit": TIME_LIMIT, "mip_rel_gap": 1e-3},
    )
    if result.x is None:
        return None
    gears = [0] * len(costs)
    for (i, gear), x in zip(choices, result.x, strict=True):
        if x > 0.5:
            gears[i] = gear
    return tuple(gears)


def _costs(table: SiteTable, floors: Mapping[Role, int]) -> list[dict[int, float]]:
    """Per nested site the sensitivity of each gear from its role's floor on."""
    return [
        {g: s.sensitivity.get(g, 0.0) for g in s.gears if g >= min(floors.get(s.role, 0), s.gears[-1])}
        for s in table.nested
    ]


def _matrix(
    table: SiteTable, floors: tuple[tuple[Role, int], ...]
) -> tuple[lagrangian.Places, lagrangian.Numbers]:  # fmt: skip
    """All gears, and each site's sensitivities at them: infinite below its role's floor and where it lacks the gear."""
    gears, costs, kinds = _sensitivities(table)
    lowest = np.array([min(dict(floors).get(role, 0), own[-1]) for role, own in kinds])
    costs = costs.copy()
    costs[gears < lowest[:, None]] = math.inf
    return gears, costs


@lru_cache(maxsize=4)
def _sensitivities(
    table: SiteTable,
) -> tuple[lagrangian.Places, lagrangian.Numbers, tuple[tuple[Role, tuple[int, ...]], ...]]:
    gears = sorted({g for kind in {s.gears for s in table.nested} for g in kind})
    rows = [[s.sensitivity.get(g, math.inf) for g in gears] for s in table.nested]
    return np.array(gears), np.array(rows, np.float64).clip(0.0), tuple((s.role, s.gears) for s in table.nested)
