"""What the tokens of a step ask for and what they read: of dense sites by their blueprints, of experts as routed.

An expert is read by the tokens that choose it, which is known within the forward pass only: hooks on the model's
modules of experts note the choices, and the numbers are made of them when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from qbe.residency.planner import Counts, Numbers
from qbe.sites import SiteTable
from qbe.store.experts import ExpertLayer, expert_layers, watched


@dataclass(eq=False)
class Pass:
    """One forward pass.

    Attributes:
        asked: int64 [blueprints, nested sites], how many slices each of its blueprints asks for.
        wanted: the same of what its rows would read if everything were resident: more where they share it.
        rows: int64 [tokens], the blueprint of each.
    """

    asked: Counts
    wanted: Counts
    rows: Counts
    chosen: list[_Chosen] = field(default_factory=list)


class _Chosen(NamedTuple):
    """By the tokens of a pass in one layer: sites [tokens, n], which of them are any, and how many slices of each were
    there."""

    sites: Counts
    some: npt.NDArray[np.bool_]
    there: Counts


class Reads(NamedTuple):
    """Of each token of a pass.

    Attributes:
        misses: int64 [tokens], sites of which it asked for more than was there.
        bits: float64 [tokens], bits of weights that were wanted and not read; 0 where they were waited for.
    """

    misses: Counts
    bits: Numbers


class RoutedReads:
    """Follows the passes of a step.

    Args:
        model: whose experts, if it has any, are nested.
        precisions: int64 [slices], bits of the first so many slices.
        levels: how many slices of each site are resident, int64 [nested sites], when asked.
        before: told, before a layer's experts run, their sites and how many slices of each are wanted.
    """

    def __init__(
        self, model: nn.Module, table: SiteTable, precisions: Counts, levels: Callable[[], Counts],
        before: Callable[[Counts, Counts], None] | None = None,
    ) -> None:  # fmt: skip
        self._precisions, self._levels, self._before = precisions, levels, before
        self._weights: Numbers = np.array([s.parameters for s in table.nested], np.float64)
        self._dense: Counts = np.array([i for i, s in enumerate(table.nested) if s.expert is None], np.int64)
        first = {s.name.rpartition(".")[0]: i for i, s in enumerate(table.nested) if s.expert == 0}
        layers = [e for e in expert_layers(model) if all(f"{e.name}.{p}" in first for p in e.parameters)]
        self._layers = {e.name: (i, [first[f"{e.name}.{p}"] for p in e.parameters]) for i, e in enumerate(layers)}
        self._passes: list[Pass] = []
        self._at, self._last = 0, -1  # the pass that is under way, and its layer
        self._there: Counts = np.zeros(0, np.int64)
        self._hooks = ExitStack()
        self._hooks.enter_context(watched(layers, self._see))

    @property
    def dense(self) -> Counts:
        """int64 [n], the nested sites that every token reads."""
        return self._dense

    @property
    def layers(self) -> list[Counts]:
        """The sites of each layer's experts."""
        return [np.concatenate([np.arange(f, f + n) for f in firsts]) for firsts, n in self._stacks()]

    def _stacks(self) -> list[tuple[list[int], int]]:
        return [(firsts, firsts[1] - firsts[0]) for _, firsts in self._layers.values()]

    def begin(self, passes: list[Pass]) -> None:
        """These passes come next."""
        self._passes, self._at, self._last = passes, 0, -1
        self._there = self._levels()[self._dense].copy()

    def finish(self, count: Callable[[Counts, Counts, Numbers], None]) -> list[Reads]:
        """What the tokens of each pass read. `count` is told what was asked for: sites, slices of each, tokens."""
        found = []
        for one in self._passes:
            tokens = np.bincount(one.rows, minlength=len(one.asked)).astype(np.float64)
            for asked, n in zip(one.asked[:, self._dense], tokens.tolist(), strict=True):
                count(self._dense, asked, np.full(len(asked), n))
            misses = (one.asked[:, self._dense] > self._there).sum(axis=1)[one.rows]
            lack = self._lack(one.wanted[:, self._dense], self._there)
            bits = (lack @ self._weights[self._dense])[one.rows]
            if one.chosen:
                sites = np.concatenate([c.sites for c in one.chosen], axis=1)
                some = np.concatenate([c.some for c in one.chosen], axis=1)
                there = np.concatenate([c.there for c in one.chosen], axis=1)
                asked = one.asked[one.rows[:, None], sites]
                count(sites[some], asked[some], np.ones(int(some.sum())))
                misses = misses + ((asked > there) & some).sum(axis=1)
                lack = self._lack(one.wanted[one.rows[:, None], sites], there) * some
                bits = bits + (lack * self._weights[sites]).sum(axis=1)
            found.append(Reads(misses, bits))
        self._passes = []
        return found

    def close(self) -> None:
        """Takes the hooks away."""
        self._hooks.close()

    def _lack(self, wanted: Counts, there: Counts) -> Numbers:
        """Bits of each weight that are not read where `there` slices are resident."""
        if self._before is not None:
            return np.zeros(wanted.shape)
        return np.maximum(0, self._precisions[wanted - 1] - self._precisions[there - 1]).astype(np.float64)

    def _see(self, layer: ExpertLayer, ids: torch.Tensor) -> None:
        """A layer's experts are about to run for tokens that chose these, [tokens, k]."""
        if not self._passes:
            return  # nobody's request: the engine looks at its model
        number, firsts = self._layers[layer.name]
        if number <= self._last:
            self._at += 1
        self._last = number
        one, experts = self._passes[self._at], firsts[1] - firsts[0]
        chosen = ids.numpy()[: len(one.rows)]
        some = (chosen >= 0) & (chosen < experts)
        sites = np.concatenate([first + np.where(some, chosen, 0) for first in firsts], axis=1)
        some = np.concatenate([some] * len(firsts), axis=1)
        one.chosen.append(_Chosen(sites, some, self._levels()[sites]))
        if self._before is not None and some.any():
            needed = np.zeros(len(self._weights), np.int64)
            np.maximum.at(needed, sites[some], one.wanted[one.rows[:, None], sites][some])
            which = np.flatnonzero(needed)
            self._before(which, needed[which])
