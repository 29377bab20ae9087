"""What the tokens of a step ask for and what they read: of dense sites by their blueprints, of experts as routed.

An expert is read by the tokens that choose it, which is known within the forward pass only. Hooks on the model's
modules of experts note the choices; a captured step, which runs no hooks, keeps them (`qbe.store.expert_counter`). What
follows of them is computed on their device, and nothing there is waited for until somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from qbe.residency.planner import Counts, Numbers
from qbe.sites import SiteTable
from qbe.store.experts import ExpertLayer, expert_layers, watched

_KEPT = 16  # tables of blueprints that stay on the device


@dataclass(eq=False)
class Pass:
    """One forward pass.

    Attributes:
        asked: int64 [blueprints, nested sites], how many slices each of its blueprints asks for.
        wanted: the same of what its rows would read if everything were resident: more where they share it.
        rows: int64 [tokens], the blueprint of each.
        kept: gives what its tokens chose, int64 [layers, tokens, k], once it has run; None: hooks see it.
    """

    asked: Counts
    wanted: Counts
    rows: Counts
    kept: Callable[[], torch.Tensor] | None = None
    chosen: list[torch.Tensor] = field(default_factory=list)  # int64 [tokens, k] of each layer that ran
    layers: list[int] = field(default_factory=list)  # and its number
    there: list[torch.Tensor] = field(default_factory=list)  # int64 [2, tokens, k], where it may change during a step


@dataclass(frozen=True)
class Reads:
    """Of each token of a pass, on the experts' device.

    Attributes:
        misses: int64 [tokens], sites of which it asked for more than was there.
        bits: float64 [tokens], bits of weights that were wanted and not read; 0 where they were waited for.
    """

    misses: torch.Tensor
    bits: torch.Tensor

    def on_host(self) -> tuple[Counts, Numbers]:
        """Waits for them."""
        both = torch.stack([self.misses.double(), self.bits]).cpu().numpy()
        return both[0].astype(np.int64), both[1]


class RoutedReads:
    """Follows the passes of a step.

    Args:
        model: whose experts, if it has any, are nested.
        precisions: int64 [slices], bits of the first so many slices.
        floors: int64 [nested sites], how many slices of each are always there: dense sites that are whole are not
            followed.
        device: where experts run.
        before: told, before a layer's experts run, their sites and how many slices of each are wanted.
    """

    def __init__(
        self, model: nn.Module, table: SiteTable, precisions: Counts, floors: Counts, device: torch.device,
        before: Callable[[Counts, Counts], None] | None = None,
    ) -> None:  # fmt: skip
        self._before, self._device = before, device
        self._precisions = torch.from_numpy(precisions).to(device)
        self._weights = torch.tensor([s.parameters for s in table.nested], dtype=torch.float64, device=device)
        dense = [i for i, s in enumerate(table.nested) if s.expert is None and floors[i] < len(precisions)]
        self._dense: Counts = np.array(dense, np.int64)
        first = {s.name.rpartition(".")[0]: i for i, s in enumerate(table.nested) if s.expert == 0}
        layers = [e for e in expert_layers(model) if all(f"{e.name}.{p}" in first for p in e.parameters)]
        self._numbers = {e.name: i for i, e in enumerate(layers)}
        # [2, layers], of both matrices of each layer the site of the first expert; [layers]
        firsts = [[first[f"{e.name}.{e.parameters[m]}"] for e in layers] for m in (0, 1)]
        self._firsts = torch.tensor(firsts, dtype=torch.int64, device=device)
        self._experts = torch.tensor([e.count for e in layers], dtype=torch.int64, device=device)
        self._passes: list[Pass] = []
        self._at, self._last = 0, -1  # the pass that is under way, and its layer
        shape = len(table.nested), len(precisions)
        self._counts = torch.zeros(shape, dtype=torch.float64, device=device)  # of reads, by slices asked for
        self._levels: Counts = np.ones(shape[0], np.int64)
        self._there = torch.ones(shape[0], dtype=torch.int64, device=device)
        self._found: Counts = self._levels[self._dense]
        self._tables: dict[int, tuple[Counts, torch.Tensor]] = {}  # of the last blueprints, and on the device
        self._hooks = ExitStack()
        self._hooks.enter_context(watched(layers, self._see))

    @property
    def dense(self) -> Counts:
        """int64 [n], the nested sites that every token reads and of which slices may be missing."""
        return self._dense

    @property
    def layers(self) -> list[Counts]:
        """The sites of each layer's experts."""
        return [
            np.concatenate([np.arange(f, f + n) for f in firsts])
            for firsts, n in zip(self._firsts.T.tolist(), self._experts.tolist(), strict=True)
        ]

    def publish(self, levels: Counts) -> None:
        """From now on tokens find so many slices of each site; the lowest one is always within reach."""
        levels = np.maximum(levels, 1)
        if not np.array_equal(levels, self._levels):
            self._levels = levels
            self._there = self._moved(levels)

    def begin(self, passes: list[Pass]) -> None:
        """These passes come next."""
        self._passes, self._at, self._last = passes, 0, -1
        self._found = self._levels[self._dense]

    def finish(self) -> list[Reads]:
        """What the tokens of each pass read."""
        found = []
        for one in self._passes:
            rows = self._moved(one.rows)
            reads = self._of_dense(one, rows)
            if one.chosen or one.kept is not None:
                routed = self._routed(one, rows)
                reads = Reads(reads.misses + routed.misses, reads.bits + routed.bits)
            found.append(reads)
        self._passes = []
        return found

    def counts(self) -> torch.Tensor:
        """float64 [nested sites, slices], how often so many slices of each were asked for since the last call; on the
        device."""
        found, self._counts = self._counts, torch.zeros_like(self._counts)
        return found

    def close(self) -> None:
        """Takes the hooks away."""
        self._hooks.close()

    def _of_dense(self, one: Pass, rows: torch.Tensor) -> Reads:
        """Of dense sites."""
        nothing = torch.zeros(len(rows), dtype=torch.float64, device=self._device)
        if not len(self._dense):
            return Reads(nothing.long(), nothing)
        tokens = np.bincount(one.rows, minlength=len(one.asked)).astype(np.float64)
        sites, found, asked = map(self._moved, (self._dense, self._found, one.asked[:, self._dense]))
        for row, n in zip(asked, tokens.tolist(), strict=True):
            self._note(sites, row, n)
        misses = (asked > found).sum(dim=1)[rows]
        if self._before is not None:
            return Reads(misses, nothing)
        wanted = self._moved(one.wanted[:, self._dense])
        return Reads(misses, (self._lack(wanted, found) @ self._weights[sites])[rows])

    def _routed(self, one: Pass, rows: torch.Tensor) -> Reads:
        """Of experts."""
        if one.kept is not None:
            ids = one.kept()
            layers = torch.arange(len(ids), device=self._device)
        else:
            width = max(ids.shape[1] for ids in one.chosen)
            ids = torch.stack([nn.functional.pad(c, (0, width - c.shape[1]), value=-1) for c in one.chosen])
            layers = self._moved(np.array(one.layers, np.int64))
        sites, some = self._sites(layers, ids)
        asked = self._table(one.asked)[rows[:, None], sites]
        wanted = asked if one.wanted is one.asked else self._table(one.wanted)[rows[:, None], sites]
        there = torch.stack(one.there, dim=1) if one.there else self._there[sites]
        self._note(sites, asked, some.double())
        misses = ((asked > there) & some).sum(dim=(0, 1, 3))
        if self._before is not None:
            return Reads(misses, torch.zeros(len(rows), dtype=torch.float64, device=self._device))
        bits = (self._lack(wanted, there) * some * self._weights[sites]).sum(dim=(0, 1, 3))
        return Reads(misses, bits)

    def _note(self, sites: torch.Tensor, asked: torch.Tensor, times: float | torch.Tensor) -> None:
        """So many tokens ask for so many slices of each of these sites."""
        at = (sites * self._counts.shape[1] + asked - 1).to(self._device).flatten()
        ones = torch.as_tensor(times, dtype=torch.float64, device=self._device).expand(asked.shape)
        self._counts.view(-1).index_add_(0, at, ones.flatten())

    def _table(self, levels: Counts) -> torch.Tensor:
        """A pass's levels on the device; those of the last passes are there already."""
        known = self._tables.get(id(levels))
        if known is None:
            if len(self._tables) == _KEPT:
                self._tables.clear()
            known = self._tables[id(levels)] = levels, self._moved(levels)
        return known[1]

    def _moved(self, numbers: Counts) -> torch.Tensor:
        """On the device, whose steps are not waited for."""
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)

    def _lack(self, wanted: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Bits of each weight that are not read where `there` slices are resident."""
        return (self._precisions[wanted - 1] - self._precisions[there - 1]).clamp_min(0).double()

    def _see(self, layer: ExpertLayer, ids: torch.Tensor) -> None:
        """A layer's experts are about to run for tokens that chose these, [tokens, k]."""
        if not self._passes or self._passes[self._at].kept is not None:
            return  # nobody's request (the engine looks at its model), or one whose step keeps them
        number = self._numbers[layer.name]
        if number <= self._last:
            self._at += 1
        self._last = number
        one = self._passes[self._at]
        ids = ids[: len(one.rows)].long()
        if self._before is not None:
            sites, some = self._sites(self._moved(np.array([number], np.int64)), ids[None])
            at, chosen = sites[:, 0].cpu().numpy(), some[0].cpu().numpy()
            one.there.append(self._moved(self._levels[at]))
            needed = np.zeros(len(self._weights), np.int64)
            np.maximum.at(needed, at[:, chosen], one.wanted[one.rows[:, None], at][:, chosen])
            which = np.flatnonzero(needed)
            self._before(which, needed[which])
        one.chosen.append(ids)
        one.layers.append(number)

    def _sites(self, layers: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sites [2, layers, tokens, k] of both matrices of what was chosen, ids [layers, tokens, k], and which of
        these are any."""
        some = (ids >= 0) & (ids < self._experts[layers][:, None, None])
        return self._firsts[:, layers][:, :, None, None] + torch.where(some, ids, 0), some
