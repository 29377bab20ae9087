"""Correcting sensitivities by what whole assignments were measured to do.

Sensitivities say what one site does alone. Together sites do more or less than the sum: errors meet (the off-diagonal
terms of the quadratic forms of HAWQ-V3, Yao et al. 2021, and CLADO, Deng et al. 2023), large ones leave the range of a
second-order expansion, and estimates from a short text have noise. Policies read one number for each site and gear, so
corrections have to be that, too:

1. A blend with uniform damage: every site's part, by its size, of what the same gear everywhere was measured to do. It
   mends a wrong ranking of sites. As uniform damage is convex in the bits, the least sum of it at a gear's average is
   that gear everywhere.
2. A factor for each gear and each group of sites (kind and depth), fitted to the logarithms of measured divergences by
   least squares and drawn to 1 where measurements say nothing (ridge regression). What is left of the quadratic form is
   its effect on a group near the assignments that are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from qbe.sites import ATTENTION_ROLES, FFN_ROLES, FULL_BITS, Role, Site, SiteTable
from qbe.store.sensitivity import Measured

THIRDS = 3  # of the layers: depths whose sites are a group
NOISE = 0.05  # of the logarithm of a measured divergence
GEAR_PRIOR = 1.5  # standard deviation of the logarithm of a gear's factor
LEAST = 1e-12  # nats per token, which no divergence is told below

Numbers = npt.NDArray[np.float64]
Assignment = Sequence[int]


def group_of(site: Site, layers: int) -> tuple[str, int]:
    """Kind and depth of a site."""
    if site.layer is None:
        return str(site.role), 0
    if site.role in ATTENTION_ROLES:
        kind = "attention"
    elif site.role in FFN_ROLES:
        kind = "ffn"
    else:
        kind = "experts" if site.role is Role.MOE_EXPERT else "ssm"
    return kind, site.layer * THIRDS // max(1, layers)


def unchanged(
    table: SiteTable, uniform: Mapping[int, float], assignments: Sequence[Assignment], measured: Numbers
) -> Fit:  # fmt: skip
    """One factor for all, so that nothing but the level of predictions changes."""
    start = Fit(table, uniform, (0.0,) * len(uniform))
    own = np.array([[s.sensitivity.get(g, 0.0) for g in start.gears] for s in table.nested]).clip(0.0).sum(0)
    back = own / np.maximum(start.blended.sum(0), LEAST)
    plain = Fit(table, uniform, start.blend, np.tile(back, (int(start.groups.max()) + 1, 1)))
    told = np.maximum([plain.predicted(a) for a in assignments], LEAST)
    assert plain.factors is not None
    level = np.exp(np.median(np.log(np.maximum(measured, LEAST) / told)))
    return replace(plain, factors=plain.factors * level)


@dataclass(frozen=True)
class Fit:
    """Factors to a table's sensitivities, and a blend with uniform damage.

    Attributes:
        table: with the sensitivities as they were.
        uniform: gear below 16 -> divergence of that gear everywhere.
        blend: for each gear below 16 the share of uniform damage, 0 to 1.
        factors: float64 [groups, gears]; None: ones.
    """

    table: SiteTable
    uniform: Mapping[int, float]
    blend: tuple[float, ...]
    factors: Numbers | None = None

    @cached_property
    def gears(self) -> tuple[int, ...]:
        return tuple(sorted(self.uniform))

    @cached_property
    def groups(self) -> npt.NDArray[np.int64]:
        """int64 [sites], each site's group."""
        named = [group_of(s, self.table.layers) for s in self.table.nested]
        places = {group: i for i, group in enumerate(dict.fromkeys(named))}
        return np.array([places[group] for group in named])

    @cached_property
    def blended(self) -> Numbers:
        """float64 [sites, gears]: sensitivities, in sum as the same gear everywhere, and uniform damage."""
        damage = convex(self.gears, [self.uniform[g] for g in self.gears])
        shared = self.table.reads.sizes[:, None] / self.table.reads.sizes.sum() * damage
        rows = [[s.sensitivity.get(g, 0.0) for g in self.gears] for s in self.table.nested]
        own = np.array(rows, np.float64).clip(0.0)
        blend = np.array(self.blend)
        return (1 - blend) * own * damage / np.maximum(own.sum(0), LEAST) + blend * shared

    @cached_property
    def sensitivities(self) -> Numbers:
        """float64 [sites, gears], corrected; never less at fewer bits."""
        own = self.blended if self.factors is None else self.blended * self.factors[self.groups]
        return np.maximum.accumulate(own[:, ::-1], axis=1)[:, ::-1]

    def measured(self) -> Measured:
        """The corrected table, as `qbe.store.sensitivity.Sensitivity.weights`."""
        return {
            site.name: {FULL_BITS: 0.0, **dict(zip(self.gears, row, strict=True))}
            for site, row in zip(self.table.nested, self.sensitivities.tolist(), strict=True)
        }

    def corrected(self) -> SiteTable:
        return self.table.with_sensitivity(self.measured())

    def predicted(self, gears: Assignment) -> float:
        """Divergence of an assignment: the sum of its sensitivities."""
        at = np.searchsorted(self.gears, gears)
        own = np.append(self.sensitivities, np.zeros((len(at), 1)), axis=1)
        return float(own[np.arange(len(at)), at].sum())


def fit(
    table: SiteTable, uniform: Mapping[int, float], blend: tuple[float, ...], assignments: Sequence[Assignment],
    measured: Numbers, prior: float,
) -> Fit:  # fmt: skip
    """The factors under which sums of sensitivities are next to what was measured.

    Args:
        blend: as the result has it. Where all is uniform damage, factors are of groups alone, from a half to two:
            enough to choose between groups, and too little to leave uniform bits at a gear's average.
        measured: float64 [assignments], divergences.
        prior: standard deviation of the logarithm of a group's factor; 0: there are no factors at all. What is special
            to a group on the few passages that are measured is in part of these passages: on hybrid-moe-tiny a loose
            one made assignments better there and 16 % worse on other text.
    """
    start = Fit(table, uniform, blend)
    if not prior:
        return start
    groups, gears = int(start.groups.max()) + 1, len(start.gears)
    sums = np.zeros((len(assignments), groups, gears))
    for row, assignment in zip(sums, assignments, strict=True):
        at = np.searchsorted(start.gears, assignment)
        some = np.flatnonzero(at < gears)
        np.add.at(row, (start.groups[some], at[some]), start.blended[some, at[some]])
    wanted = np.log(np.maximum(measured, LEAST))
    priors = np.concatenate([np.full(gears, GEAR_PRIOR), np.full(groups, prior)])

    def residuals(logarithms: Numbers) -> Numbers:
        factors = np.exp(logarithms)
        totals = np.einsum("akg,k,g->a", sums, factors[gears:], factors[:gears])
        return np.concatenate([(np.log(np.maximum(totals, LEAST)) - wanted) / NOISE, logarithms / priors])

    found = np.exp(least_squares(residuals, np.zeros(gears + groups)).x)
    of_gears, of_groups = found[:gears], found[gears:]
    if min(blend) >= 1:
        of_gears, of_groups = np.ones(gears), np.clip(of_groups / np.exp(np.log(of_groups).mean()), 0.5, 2.0)
    return Fit(table, uniform, blend, of_groups[:, None] * of_gears)


def convex(gears: Sequence[int], damage: Sequence[float]) -> Numbers:
    """The largest function that is nowhere above `damage`, is 0 at 16 bits and convex in the bits; at `gears`."""
    x, y = np.array([*gears, FULL_BITS], np.float64), np.array([*damage, 0.0])
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1 and (y[hull[-1]] - y[hull[-2]]) * (x[i] - x[hull[-2]]) >= (y[i] - y[hull[-2]]) * (
            x[hull[-1]] - x[hull[-2]]
        ):
            hull.pop()
        hull.append(i)
    return np.interp(x[:-1], x[hull], y[hull])
