"""Which rows of a step read the 16-bit weights, known on the host: the CPU hands those to vLLM's own product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.blueprint import Blueprint
from qbe.sites import FULL_BITS

Runs = Sequence[tuple[Blueprint, int]]  # a blueprint and how many rows in a row have it


class FullRows:
    """Of the step that runs. `note` is called where the plan is written; layers ask while the step runs."""

    def __init__(self) -> None:
        self.note([])

    def note(self, runs: Runs) -> None:
        """What the rows of the next forward have."""
        self._runs = runs
        self._distinct = list({b.linear_key: b for b, _ in runs}.values())
        self._any = any(FULL_BITS in b.weight_bits for b in self._distinct)
        self._known: dict[tuple[bool, ...], torch.Tensor | bool] = {}

    def of(self, site: int) -> torch.Tensor | bool:
        """Rows at 16 bits of the weight: False for none, True for all, else bool [rows]."""
        if not self._any:
            return False
        pattern = tuple(b.weight_bits[site] == FULL_BITS for b in self._distinct)
        if pattern not in self._known:
            self._known[pattern] = self._rows(site) if any(pattern) and not all(pattern) else any(pattern)
        return self._known[pattern]

    def _rows(self, site: int) -> torch.Tensor:
        full = torch.tensor([b.weight_bits[site] == FULL_BITS for b, _ in self._runs])
        return full.repeat_interleave(torch.tensor([n for _, n in self._runs]))
