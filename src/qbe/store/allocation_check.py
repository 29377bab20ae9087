"""Checking what the assignments of a store do together, and correcting its sensitivities until they can be trusted.

Measured are, on passages that sensitivities were not made on, each gear everywhere and the assignments by sensitivities
as they are, at several averages. Corrections (`qbe.store.correction`) are fitted to these, and the assignments by
corrected sensitivities are measured in turn; those of two averages no fit ever sees. Where the same gear everywhere
does better, sensitivities of the gears in question are blended with uniform damage, in the end to nothing else; where
it does much better, each group of sites is lowered by itself, too. What is kept are the sensitivities whose assignments
measured best, those as they were among them.

A measured assignment costs a pass over the passages, so the doubtful averages are measured first: a fit that does not
mend them is not measured at the others, and one that only predicts differently is not measured where it does not
predict what is known already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from qbe.allocation.knapsack import allocate
from qbe.progress import bar
from qbe.sites import FULL_BITS, SiteTable
from qbe.store.calibration_text import HELD_OUT, CalibrationText, built_in
from qbe.store.checked import AllocationCheck, CheckedAverage
from qbe.store.correction import LEAST, Assignment, Fit, fit, unchanged
from qbe.store.mixtures import Mixtures
from qbe.store.sensitivity import Sensitivity, decoder_layers

AGREE = 0.1  # relative difference of prediction and measurement that is accepted
NEAR = 0.01  # of the mean logarithm of ratios, that a prediction may cost
WRONG = 0.1  # more than uniform bits, from which on groups are looked at
EVEN = 1 + 1e-9  # times what uniform bits do
BLENDS = (0.0, 0.3, 0.6, 1.0)  # of uniform damage, that are tried in turn
ROUNDS = len(BLENDS) + 1
PRIORS = 0.05, 0.3  # of the factors of groups: at first, and once groups were measured
RESAMPLES = 2000
PASSAGES = 16  # at most, and at least:
FEWEST = 6
ASSIGNMENTS = 24  # that the work is reckoned with
LOGIT = 60  # operations for a logit, with its exponential, beside those of its product
WORK = {"cpu": 1.2e12, "cuda": 1e15}  # operations: some 15 s on two cores, a few seconds on a GPU
SHARE = 1200  # tokens whose passes through the model are 15 % of the work of estimating

Numbers = npt.NDArray[np.float64]


def checked(
    model: nn.Module, tokenizer: Any, table: SiteTable, found: Sensitivity, device: torch.device,
    text: CalibrationText | None = None, *, progress: bool,
) -> Sensitivity:  # fmt: skip
    """Sensitivities of a nested model's weights, corrected, and with the check of them.

    Args:
        table: with its expert use; sensitivities are taken from `found`.
        device: where layers are computed; a model that is no chain of them has to be there already.
        text: None: the built-in one. As it is where that has no passage that sensitivities were not made on.
    """
    table = table.with_sensitivity(found.weights)
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)  # type: ignore[union-attr, operator]
    tokens = (text or built_in()).held_out(tokenizer, passages(table, vocabulary, device), model)
    if len(tokens) < 2 or not any(s.sensitivity for s in table.nested):
        return found
    layers = len(decoder_layers(model, table)) + 1
    with bar("checking assignments", (3 + ROUNDS) * layers, progress) as step:
        trial = search(table, Mixtures(model, table, tokens, device, step).divergences)
    about = AllocationCheck(
        tokens.shape[0], tokens.shape[1], dict(zip(trial.fit.gears, trial.fit.blend, strict=True)), trial.averages,
    )  # fmt: skip
    return replace(found, weights=trial.fit.measured(), check=about)


def passages(table: SiteTable, vocabulary: int, device: torch.device) -> int:
    """How many are read, so that the check costs little beside what estimates do."""
    token = 2 * table.reads.weights + LOGIT * vocabulary
    tokens = max(WORK.get(device.type, WORK["cpu"]) / token, SHARE) / ASSIGNMENTS
    return int(np.clip(tokens / HELD_OUT, FEWEST, PASSAGES))


def averages_of(table: SiteTable) -> dict[float, bool]:
    """Averages that are checked, all weights counted -> whether fits see them.

    They do of half a bit above the lowest gear of nested sites, and of every whole number of their bits up to the
    widest gear below 16; not of those one and two bits above the first.
    """
    gears = [g for g in table.gears() if g < FULL_BITS]
    nested = {gears[0] + 0.5: True} | {float(bits): True for bits in range(gears[0] + 1, gears[-1] + 1)}
    nested |= {gears[0] + 0.5 + more: False for more in (1, 2) if gears[0] + more < gears[-1]}
    sizes, fixed = float(table.reads.sizes.sum()), FULL_BITS * table.reads.fixed
    return {(bits * sizes + fixed) / table.reads.weights: seen for bits, seen in sorted(nested.items())}


@dataclass(frozen=True)
class Trial:
    """Corrected sensitivities, and what their assignments were measured to do."""

    fit: Fit
    averages: tuple[CheckedAverage, ...]
    at_gears: tuple[bool, ...]  # whether uniform bits at the average are an assignment

    @property
    def beaten(self) -> bool:
        """Whether an assignment of uniform bits does better."""
        return any(row.ratio > EVEN for row, there in zip(self.averages, self.at_gears, strict=True) if there)

    @property
    def worst(self) -> float:
        """The highest ratio to uniform bits."""
        return max(row.ratio for row in self.averages)

    @property
    def error(self) -> float:
        """The largest relative difference of prediction and measurement."""
        return max(abs(row.predicted / max(row.measured, LEAST) - 1) for row in self.averages)

    @property
    def doubtful(self) -> list[int]:
        """Places of the averages at which uniform bits do better."""
        return [i for i, row in enumerate(self.averages) if row.ratio > EVEN]

    @property
    def mean(self) -> float:
        """The mean logarithm of the ratios to uniform bits."""
        return float(np.mean([np.log(max(row.ratio, LEAST)) for row in self.averages]))


def best(tried: Sequence[Trial]) -> Trial:
    """The one that uniform bits beat least; of those alike, one that predicts well among those that do best.

    A prediction is not worth what it costs: on hybrid-moe-tiny the fit with the least error gave up 9 % at 6 bits.
    """
    least = min((trial.beaten, max(EVEN, trial.worst)) for trial in tried)
    alike = [trial for trial in tried if (trial.beaten, max(EVEN, trial.worst)) == least]
    mean = min(trial.mean for trial in alike)
    alike = [trial for trial in alike if trial.mean <= mean + NEAR]
    return min(alike, key=lambda trial: (trial.error > AGREE, trial.mean))


class Measurements:
    """What assignments do on every passage, each measured once."""

    def __init__(self, table: SiteTable, measure: Callable[[Sequence[Assignment]], Numbers]) -> None:
        self._table, self._measure = table, measure
        self.gears = tuple(g for g in table.gears() if g < FULL_BITS)
        self.rows: dict[tuple[int, ...], Numbers] = {}
        self.unseen: set[tuple[int, ...]] = set()  # by fits

    def add(self, assignments: Sequence[tuple[int, ...]]) -> None:
        new = [a for a in dict.fromkeys(assignments) if a not in self.rows]
        if new:
            self.rows.update(zip(new, self._measure(new), strict=True))

    def everywhere(self, gear: int) -> tuple[int, ...]:
        return (gear,) * len(self._table.nested)

    def average(self, gear: int) -> float:
        """Bits of all weights that a token reads, with this gear everywhere."""
        return self._table.reads.average_bits(self.everywhere(gear))

    def uniform(self, bits: float) -> Numbers:
        """float64 [passages], what the same gear everywhere does at this average, with interpolation."""
        known = [self.rows[self.everywhere(g)] for g in self.gears]
        at = [self.average(g) for g in (*self.gears, FULL_BITS)]
        return np.array([np.interp(bits, at, [*of, 0.0]) for of in np.array(known).T])

    def ratio(self, assignment: tuple[int, ...]) -> float:
        """Divergence over that of uniform bits at the same average."""
        other = self.uniform(self._table.reads.average_bits(assignment))
        return max(float(self.rows[assignment].mean()), LEAST) / max(float(other.mean()), LEAST)

    def compared(self, bits: float, assignment: tuple[int, ...], predicted: float, before: float) -> CheckedAverage:
        own, other = self.rows[assignment], self.uniform(self._table.reads.average_bits(assignment))
        mean, uniform = float(own.mean()), float(other.mean())
        return CheckedAverage(
            bits, predicted, mean, uniform, self.ratio(assignment), *interval(own, other), uncorrected=before
        )


def search(table: SiteTable, measure: Callable[[Sequence[Assignment]], Numbers]) -> Trial:
    """Corrected sensitivities of a table, from what assignments are measured to do.

    Args:
        table: with sensitivities.
        measure: assignments -> float64 [assignments, passages], divergences.
    """
    known, trier = Measurements(table, measure), _Trier(table)
    first = trier.assignments(table)
    known.add([*map(known.everywhere, known.gears), *first])
    trier.start(known, first)
    tried = [trier.unchanged(known, first)]
    nearest = _mended(table, known, trier, tried)
    if nearest is not None:
        tried.append(trier.tried(known, nearest))
    found = best(tried)
    if found.worst <= EVEN and found.error > AGREE:
        fitted = trier.fitted(known, found.fit.blend, PRIORS[0])
        if trier.predicts(known, fitted, found):  # what is known; else it would not predict new assignments either
            tried.append(trier.tried(known, fitted))
    for prior in (PRIORS[1], 0.0):  # at last uniform bits at every gear's average
        if best(tried).worst > EVEN:
            known.add(probes(table, known.gears))
            tried.append(trier.tried(known, trier.fitted(known, (BLENDS[-1],) * len(known.gears), prior)))
    return best(tried)


def _mended(table: SiteTable, known: Measurements, trier: _Trier, tried: list[Trial]) -> Fit | None:
    """Fits until uniform bits do no better at any average, and adds what was measured at all of them to `tried`.

    Returns:
        where no fit brought that about, the one that came nearest, which was measured at the doubtful averages alone.
    """
    at = [0] * len(known.gears)  # place of each gear's blend
    doubtful, worst, prior = tried[0].doubtful, tried[0].worst, PRIORS[0]
    nearest: tuple[float, Fit] | None = None
    for _ in range(ROUNDS):
        if not doubtful:
            return None
        if worst - 1 > WRONG:
            known.add(probes(table, known.gears))
            prior = PRIORS[1]
        fitted = trier.fitted(known, tuple(BLENDS[i] for i in at), prior)
        ratios = trier.ratios(known, fitted, doubtful)
        worst = max(ratios.values())
        if worst <= EVEN:  # the other averages are worth measuring
            tried.append(trier.tried(known, fitted))
            doubtful, worst = tried[-1].doubtful, tried[-1].worst
        else:
            nearest = min(nearest or (worst, fitted), (worst, fitted), key=lambda one: one[0])
            doubtful = [i for i, ratio in ratios.items() if ratio > EVEN]
        for i in doubtful:
            for gear in _in_question(list(trier.averages)[i], known):
                at[gear] = min(len(BLENDS) - 1, BLENDS.index(fitted.blend[gear]) + 1)
    return None if nearest is None or not doubtful else nearest[1]


class _Trier:
    """Fits to what is known, and measures the assignments that come of it."""

    def __init__(self, table: SiteTable) -> None:
        self.table, self.averages = table, averages_of(table)
        self.uniform: dict[int, float] = {}
        self.before: list[float] = []

    def assignments(self, table: SiteTable) -> list[tuple[int, ...]]:
        """With the least summed sensitivity, at every average."""
        return [allocate(table, bits, {}) for bits in self.averages]

    def start(self, known: Measurements, first: Sequence[tuple[int, ...]]) -> None:
        """Notes what the uncorrected sensitivities' assignments do, and uniform damage."""
        self.uniform = {gear: float(known.rows[known.everywhere(gear)].mean()) for gear in known.gears}
        self.before = [known.ratio(a) for a in first]
        self._hide(known, first)

    def _hide(self, known: Measurements, assignments: Sequence[tuple[int, ...]]) -> None:
        hidden = {a for a, seen in zip(assignments, self.averages.values(), strict=True) if not seen}
        known.unseen |= hidden - {known.everywhere(gear) for gear in known.gears}

    def fitted(self, known: Measurements, blend: tuple[float, ...], prior: float) -> Fit:
        """To all that is known and may be seen."""
        seen = {a: float(row.mean()) for a, row in known.rows.items() if a not in known.unseen}
        return fit(self.table, self.uniform, blend, list(seen), np.array(list(seen.values())), prior)

    def ratios(self, known: Measurements, fitted: Fit, places: Sequence[int]) -> dict[int, float]:
        """To uniform bits, of a fit's assignments at the averages in some places."""
        assignments = self.assignments(fitted.corrected())
        self._hide(known, assignments)
        known.add([assignments[i] for i in places])
        return {i: known.ratio(assignments[i]) for i in places}

    def predicts(self, known: Measurements, fitted: Fit, trial: Trial) -> bool:
        """Whether a fit's predictions of another trial's assignments agree with what these were measured to do."""
        some = self.assignments(trial.fit.corrected())
        return all(
            abs(fitted.predicted(a) / max(float(known.rows[a].mean()), LEAST) - 1) <= AGREE for a in some
        )  # fmt: skip

    def tried(self, known: Measurements, fitted: Fit) -> Trial:
        """What a fit's assignments do."""
        assignments = self.assignments(fitted.corrected())
        self._hide(known, assignments)
        known.add(assignments)
        return self._compared(known, fitted, assignments)

    def unchanged(self, known: Measurements, first: Sequence[tuple[int, ...]]) -> Trial:
        """The sensitivities as they were, whose assignments are known."""
        means = np.array([known.rows[a].mean() for a in first])
        return self._compared(known, unchanged(self.table, self.uniform, first, means), first)

    def _compared(self, known: Measurements, fitted: Fit, assignments: Sequence[tuple[int, ...]]) -> Trial:
        rows = [
            known.compared(bits, a, fitted.predicted(a), ratio)
            for bits, a, ratio in zip(self.averages, assignments, self.before, strict=True)
        ]
        own = [known.average(gear) for gear in known.gears]
        there = tuple(min(abs(bits - average) for average in own) < 1e-6 for bits in self.averages)
        return Trial(fitted, tuple(rows), there)


def _in_question(bits: float, known: Measurements) -> list[int]:
    """Places of the gears whose sensitivities decide at an average: the widest one that is not above it, and at that
    gear's own average the next lower one."""
    own = [known.average(gear) for gear in known.gears]
    under = max(i for i, average in enumerate(own) if average <= bits + 1e-6)
    return [under - 1, under] if under and abs(own[under] - bits) < 1e-6 else [under]


def probes(table: SiteTable, gears: Sequence[int]) -> list[tuple[int, ...]]:
    """For each group of sites the assignment with that group at the lowest gear and all others at the next one."""
    groups = Fit(table, dict.fromkeys(gears, 0.0), (0.0,) * len(gears)).groups
    above = (*gears, FULL_BITS)[1]
    return [tuple(gears[0] if g == group else above for g in groups) for group in range(int(groups.max()) + 1)]


def interval(own: Numbers, other: Numbers) -> tuple[float, float]:
    """Where the ratio of two sums over the same passages lies with 95 % confidence (bootstrap, percentiles)."""
    drawn = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    ratios = np.maximum(own[drawn].sum(1), LEAST) / np.maximum(other[drawn].sum(1), LEAST)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
