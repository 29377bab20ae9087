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
    """What the tokens of a pass chose in one layer.

    Attributes:
        layer: its number among those with experts.
        ids: int64 [tokens, k], of experts; what is no expert's number chooses nobody.
        there: int64 [2, tokens, k], where it may change during a step: how many slices of both matrices were there.
    """

    layer: int
    ids: Counts
    there: Counts | None = None


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
        self._numbers = {e.name: i for i, e in enumerate(layers)}
        # [2, layers], of both matrices of each layer the site of the first expert; [layers]
        self._firsts: Counts = np.array([[first[f"{e.name}.{e.parameters[m]}"] for e in layers] for m in (0, 1)])
        self._experts: Counts = np.array([e.count for e in layers])
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
        return [
            np.concatenate([np.arange(f, f + n) for f in firsts])
            for firsts, n in zip(self._firsts.T.tolist(), self._experts.tolist(), strict=True)
        ]

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
                sites, some = self._sites(one.chosen)
                known = [c.there for c in one.chosen if c.there is not None]
                there = np.concatenate(known, axis=2) if known else self._levels()[sites]
                asked = one.asked[one.rows[:, None], sites]
                count(sites[:, some], asked[:, some], np.ones((2, int(some.sum()))))
                misses = misses + ((asked > there) & some).sum(axis=(0, 2))
                lack = self._lack(one.wanted[one.rows[:, None], sites], there) * some
                bits = bits + (lack * self._weights[sites]).sum(axis=(0, 2))
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
        number = self._numbers[layer.name]
        if number <= self._last:
            self._at += 1
        self._last = number
        one = self._passes[self._at]
        chosen = _Chosen(number, ids.numpy()[: len(one.rows)])
        if self._before is not None:
            sites, some = self._sites([chosen])
            chosen = chosen._replace(there=self._levels()[sites])
            needed = np.zeros(len(self._weights), np.int64)
            np.maximum.at(needed, sites[:, some], one.wanted[one.rows[:, None], sites][:, some])
            which = np.flatnonzero(needed)
            self._before(which, needed[which])
        one.chosen.append(chosen)

    def _sites(self, chosen: list[_Chosen]) -> tuple[Counts, npt.NDArray[np.bool_]]:
        """The sites [2, tokens, n] of both matrices of what was chosen, and which [tokens, n] of them are any."""
        ids = np.concatenate([c.ids for c in chosen], axis=1)
        layers = np.repeat([c.layer for c in chosen], [c.ids.shape[1] for c in chosen])
        some = (ids >= 0) & (ids < self._experts[layers])
        return self._firsts[:, layers][:, None] + np.where(some, ids, 0), some
