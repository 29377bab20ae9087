"""The same knapsack for thousands of sites, as a mixture of experts has them: a Lagrangian on each site's convex hull.

At a price of a bit every site takes the gear that is cheapest for it. As the price falls, sites go up along the lower
convex hulls of their costs, so that sorting all steps of all hulls by what they gain per bit gives every optimum that
some price has (Everett 1963). The sites whose steps lie next to the price that the budget leads to are the core
(Pisinger 1995): they are solved by dynamic programming, the others stay where any good solution has them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

CORE = 96  # sites
UNITS = 1 << 14  # into which what the core may have is divided; a site's bits are rounded to whole ones
MARGIN = 16  # units by which roundings may add up


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
        better = _exact(costs[core], above[core], left)
        if costs[core, better].sum() < costs[core, at[core]].sum():
            at[core] = better
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


def _exact(costs: Numbers, above: Numbers, room: float) -> Places:
    """The place of each site's gear with the least total cost, where all `above` the lowest fits into `room`."""
    with np.errstate(over="ignore"):
        units = np.rint(above / max(room, 1e-300) * UNITS).clip(0, UNITS + MARGIN + 1)
    best, choices = np.zeros(UNITS + MARGIN + 1), np.zeros((len(costs), UNITS + MARGIN + 1), np.int8)
    for i, (cost, needs) in enumerate(zip(costs, units.astype(int).tolist(), strict=True)):
        options = np.full((len(cost), len(best)), np.inf)
        for g, need in enumerate(needs):
            if need < len(best) and np.isfinite(cost[g]):
                options[g, need:] = best[: len(best) - need] + cost[g]
        choices[i] = options.argmin(0)
        best = options.min(0)
    sites = np.arange(len(costs))
    for left in range(UNITS + MARGIN, -1, -1):  # of a sum of rounded numbers the last units are not certain
        at = np.empty(len(costs), np.int64)
        for i in reversed(range(len(costs))):
            at[i] = choices[i, left]
            left -= int(units[i, at[i]])
        if above[sites, at].sum() <= room:
            return at
    return np.isfinite(costs).argmax(1)
