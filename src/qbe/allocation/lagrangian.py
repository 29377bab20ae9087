"""The same knapsack for thousands of sites, as a mixture of experts has them: a Lagrangian on each site's convex hull.

At a price of a bit every site takes the gear that is cheapest for it. As the price falls, sites go up along the lower
convex hulls of their costs, so that sorting all steps of all hulls by what they gain per bit gives every optimum that
some price has (Everett 1963). The sites whose steps lie next to the price that the budget leads to are the core
(Pisinger 1995): they are solved by dynamic programming over undominated sums (Nemhauser and Ullmann 1969), the others
stay where any good solution has them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

CORE = 96  # sites
GAP = 1e-4  # of the least cost, which a solution may be above
SUMS = 1024  # of bits and costs that are kept at a time


def solve(gears: Places, costs: Numbers, sizes: Numbers, most: float) -> tuple[int, ...] | None:
    """The gear of every site with next to the least total cost at an average of at most `most` bits; None if none has.

    Args:
        gears: int64 [gears], ascending.
        costs: float64 [sites, gears], not negative; infinite where a site cannot have the gear.
        sizes: float64 [sites], the site's weight in the average.
    """
    weights = sizes[:, None] / sizes.sum() * gears
    sites, lowest = np.arange(len(costs)), np.isfinite(costs).argmax(1)
    above = weights - weights[sites, lowest][:, None]
    room = most + 1e-9 - float(weights[sites, lowest].sum())
    if room < 0:
        return None
    gain, more, site, to = _steps(costs, weights, lowest)
    order = np.argsort(-gain, kind="stable")  # a site's own steps stay in order: they gain less and less
    taken = int(np.searchsorted(np.cumsum(more[order]), room, side="right"))
    at = lowest.copy()
    for i in order[:taken]:
        at[site[i]] = to[i]
    nearest = np.argsort(np.abs(np.arange(len(order)) - taken + 0.5), kind="stable")
    core = np.array(list(dict.fromkeys(site[order[nearest[: 4 * CORE]]].tolist()))[:CORE], np.int64)
    if len(core):
        left = room - float(above[sites, at].sum() - above[core, at[core]].sum())
        at[core] = _best(costs[core], above[core], left, at[core])
    return tuple(gears[at].tolist())


def _steps(costs: Numbers, weights: Numbers, lowest: Places) -> tuple[Numbers, Numbers, Places, Places]:
    """Every step of each site's lower convex hull from its lowest gear on: gain per bit, bits, site, where it leads."""
    found: list[tuple[Numbers, Numbers, Places, Places]] = [(np.empty(0), np.empty(0), *np.empty((2, 0), np.int64))]
    here, sites = lowest.copy(), np.arange(len(lowest))
    while len(sites):
        own, cost, weight = np.arange(len(sites)), costs[sites], weights[sites]
        more = weight - weight[own, here[sites]][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.where(more > 0, (cost[own, here[sites]][:, None] - cost) / more, -np.inf)
        best = gain.shape[1] - 1 - gain[:, ::-1].argmax(1)  # of equal ones the farthest
        some = gain[own, best] >= 0
        sites, best, own = sites[some], best[some], own[some]
        found.append((gain[own, best], more[own, best], sites, best))
        here[sites] = best
    gains, bits, owners, places = zip(*found, strict=True)
    return np.concatenate(gains), np.concatenate(bits), np.concatenate(owners), np.concatenate(places)


def _best(costs: Numbers, above: Numbers, room: float, at: Places) -> Places:
    """The place of each site's gear with next to the least total cost within `room`; `at` where none is better.

    Site by site all sums of bits and costs are kept that no other sum is below in both, and that the continuous optimum
    of the later sites could still bring below what `at` costs.
    """
    lowest, sites = np.isfinite(costs).argmax(1), np.arange(len(costs))
    gain, more, site, _ = _steps(costs, above, lowest)
    order = np.argsort(-gain, kind="stable")
    limit = costs[sites, at].sum() * (1 - GAP)
    bits, cost, kept = np.zeros(1), np.zeros(1), []
    for i in sites:
        later = order[site[order] > i]
        rooms, saved = (np.append(0.0, np.cumsum(v)) for v in (more[later], (more * gain)[later]))
        all_bits, all_costs = (bits[:, None] + above[i]).ravel(), (cost[:, None] + costs[i]).ravel()
        least = all_costs + costs[sites, lowest][i + 1 :].sum() - np.interp(room - all_bits, rooms, saved)
        some = np.flatnonzero((all_bits <= room) & (least < limit))
        some = some[np.argsort(least[some], kind="stable")[:SUMS]]
        some = some[np.lexsort((all_costs[some], all_bits[some]))]
        some = some[all_costs[some] < np.append(np.inf, np.minimum.accumulate(all_costs[some])[:-1])]
        if not len(some):
            return at
        kept.append(some)
        bits, cost = all_bits[some], all_costs[some]
    found, last = at.copy(), int(cost.argmin())
    for i in reversed(sites):
        last, found[i] = divmod(int(kept[i][last]), costs.shape[1])
    return found
