"""Bits per site under a budget of average bits: a multiple-choice knapsack, solved exactly by SciPy's HiGHS.

Minimise the summed sensitivity (KL of the logits when a site alone is lowered) subject to the average over weights.
That the damage of single sites adds up is the linearity theorem of HIGGS (Malinovskii et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from qbe.errors import QBEError
from qbe.sites import Role, SiteTable

TOLERANCE = 0.05  # average bits a solution may stay below its budget
NODES = 500  # of the search; the incumbent is used after that, the same one on a busy machine as on an idle one
TIME_LIMIT = 20.0  # seconds, for what never ends: a search takes a tenth of one, and mostly one node


def allocate(table: SiteTable, average_bits: float, floors: Mapping[Role, int]) -> tuple[int, ...]:
    """The gear of every nested site with the least total sensitivity at an average of at most `average_bits`.

    Args:
        table: with measured sensitivities.
        floors: role -> lowest gear. They give way, all together, when the budget cannot be met with them.

    Raises:
        QBEError: the sensitivities were not measured, or even the lowest gears exceed the budget.
    """
    if not table.measured:
        raise QBEError(
            "this model has no sensitivity table: run 'qbe quantize' on it, or use --policy uniform", field="policy"
        )
    lowest = _average(table, [s.gears[0] for s in table.nested])
    if average_bits < lowest - 1e-9:
        raise QBEError(
            f"a budget of {average_bits:g} bits cannot be met: this store's lowest average is {lowest:.2f}; "
            "raise --bits or quantise the model with narrower slices"
        )
    sizes = [s.parameters for s in table.nested]
    for rules in (floors, {}):
        for least in (average_bits - TOLERANCE, 0.0):  # a model with few sites may have no assignment that close
            gears = solve(_costs(table, rules), sizes, average_bits, least)
            if gears is not None:
                return gears
    raise QBEError(f"no assignment was found for a budget of {average_bits:g} bits; try a higher one")


def _average(table: SiteTable, gears: list[int]) -> float:
    return sum(s.parameters * g for s, g in zip(table.nested, gears, strict=True)) / table.nested_parameters


def solve(
    costs: Sequence[Mapping[int, float]], sizes: Sequence[int], most: float, least: float = 0.0
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
