"""Tells residency (`qbe.residency`) what steps read, and requests what they lacked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from qbe.blueprint import Blueprint
from qbe.engine.execution.runner import Runner
from qbe.engine.extensions.extension import Extension
from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError
from qbe.residency.planner import Counts
from qbe.residency.residency import Residency
from qbe.residency.routed_reads import Pass
from qbe.store.plan import Plan

_KEPT = 64  # steps' blueprints that are remembered

Run = tuple[Blueprint, int]  # and how many tokens in a row have it


class ResidentReads(Extension):
    """Of every request. It looks last at a step's work, when all of its rows are there."""

    def __init__(self, residency: Residency, plan: Plan, runner: Runner) -> None:
        self._residency, self._plan, self._runner = residency, plan, runner
        self._packed = runner.packed  # else each sequence of a step has a forward pass of its own
        self._tables: dict[tuple[str, ...], Counts] = {}

    def admit(self, sequence: Sequence) -> None:
        if sequence.blueprint.dynamic_precision is not None:
            raise QBEError(
                "device_memory bounds what rows may read, which bits that move within a forward pass do not heed: "
                "choose a policy without routers, or leave device_memory out"
            )
        self._residency.expect(sequence.blueprint, len(sequence.prompt_ids))

    def extend(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        self._residency.settle()
        runs = [self._runs(w) for w in work]
        together = [[run for of_work in runs for run in of_work]] if self._packed else runs
        self._residency.begin([self._pass(one, self._kept(work)) for one in together])
        return work

    def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
        found, first, passes = self._residency.finish(), 0, set[str]()
        for i, w in enumerate(work):
            misses, bits = found[0 if self._packed else i]
            own = slice(first, first + w.count) if self._packed else slice(0, w.count)
            first += w.count
            missed, request = w.sequence.missed_reads, w.sequence.request_id
            if w.draft is None:
                missed.tokens += w.count
                missed.misses += int(misses[own].sum())
                missed.bits += float(bits[own].sum()) / max(1.0, self._plan.table.reads.weights)
            if w.samples and request not in passes:  # its rows of a step read a weight once
                passes.add(request)
                missed.nbytes += int(bits[own][-1]) // 8

    def _runs(self, w: ScheduledTokens) -> list[Run]:
        return [(w.draft, 1)] if w.draft is not None else w.sequence.rows(w.start, w.count)

    def _kept(self, work: list[ScheduledTokens]) -> Callable[[], torch.Tensor] | None:
        """Gives what the rows of a step chose that a GPU runs at fixed shapes, from a graph."""
        counter = self._plan.use
        if self._plan.device.type != "cuda" or counter is None or not self._runner.has_fixed_shape(work):
            return None
        return lambda: counter.kept(len(work))

    def _pass(self, runs: list[Run], kept: Callable[[], torch.Tensor] | None) -> Pass:
        distinct = {b.linear_key: b for b, _ in runs}
        numbers = {key: i for i, key in enumerate(distinct)}
        rows = np.repeat([numbers[b.linear_key] for b, _ in runs], [n for _, n in runs])
        asked, wanted = list(distinct.values()), self._plan.wanted(list(distinct.values()))
        return Pass(self._levels(asked), self._levels(wanted), rows, kept)

    def _levels(self, blueprints: list[Blueprint]) -> Counts:
        """int64 [blueprints, nested sites], how many slices each asks for; the same array for the same blueprints."""
        key = tuple(b.linear_key for b in blueprints)
        if key not in self._tables:
            if len(self._tables) == _KEPT:
                self._tables.clear()
            self._tables[key] = np.stack([self._residency.levels_of(b) for b in blueprints])
        return self._tables[key]
