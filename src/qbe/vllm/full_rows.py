"""Which rows of a step read the 16-bit weights, known on the host: the CPU hands those to vLLM's own product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qbe.blueprint import Blueprint
from qbe.sites import FULL_BITS

Runs = Sequence[tuple[Blueprint, int]]  # a blueprint and how many rows in a row have it


class FullRows:
    """Of the step that runs. `note` is called where the plan is written; layers ask while the step runs.

    A hundred layers ask in each step, mostly of the blueprints that the last step had: what depends on these alone is
    kept.
    """

    def __init__(self) -> None:
        self._distinct: tuple[Blueprint, ...] = ()
        self._layers: dict[tuple[int, ...], bool | None] = {}
        self.note([])

    def note(self, runs: Runs) -> None:
        """What the rows of the next forward have."""
        self._runs = runs
        distinct = tuple({b.linear_key: b for b, _ in runs}.values())
        if [b.linear_key for b in distinct] != [b.linear_key for b in self._distinct]:
            self._distinct, self._layers = distinct, {}
        self._masks: dict[tuple[bool, ...], torch.Tensor] = {}

    def every(self, sites: tuple[int, ...]) -> bool | None:
        """Whether all rows of these sites read the 16-bit weights, and 16-bit activations, or none reads such weights.

        None: something else; `of` tells more.
        """
        if sites not in self._layers:
            self._layers[sites] = self._every(sites)
        return self._layers[sites]

    def of(self, site: int) -> torch.Tensor | bool:
        """Rows at 16 bits of the weight: False for none, True for all, else bool [rows]."""
        pattern = tuple(b.weight_bits[site] == FULL_BITS for b in self._distinct)
        if all(pattern) or not any(pattern):
            return any(pattern)
        if pattern not in self._masks:
            full = torch.tensor([b.weight_bits[site] == FULL_BITS for b, _ in self._runs])
            self._masks[pattern] = full.repeat_interleave(torch.tensor([n for _, n in self._runs]))
        return self._masks[pattern]

    def _every(self, sites: tuple[int, ...]) -> bool | None:
        weights = {b.weight_bits[s] == FULL_BITS for b in self._distinct for s in sites}
        if True not in weights:
            return False
        plain = all(b.activation_bits[s] == FULL_BITS for b in self._distinct for s in sites)
        return True if plain and False not in weights else None
