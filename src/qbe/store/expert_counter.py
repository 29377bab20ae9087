"""Counts which experts the tokens of an engine's steps choose, on the device and without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from qbe.store.expert_use import ExpertUse
from qbe.store.experts import expert_layers


class LayerCounter:
    """What one layer's tokens choose; the layer's first matrices have it (`NestedExperts.counter`).

    Attributes:
        counts: int64 [experts + 1], a view of `ExpertCounter`'s; the last one is of choices that are none.
        kept: int64 [rows, choices], of the last step that kept them; None until `ExpertCounter.begin`.
        choices: of a token; 0 until one was seen.
        keeps: whether the step that runs keeps its choices, to be counted when it is over.
    """

    def __init__(self, counts: torch.Tensor) -> None:
        self.counts, self.choices, self.keeps = counts, 0, False
        self.kept: torch.Tensor | None = None
        self._one = torch.ones(1, dtype=torch.long, device=counts.device)

    def see(self, ids: torch.Tensor) -> None:
        """A step's tokens choose these experts, int64 [tokens, choices]."""
        if self.kept is None:
            self.choices = ids.shape[1]
        if self.keeps and self.kept is not None:
            self.kept[: ids.shape[0], : ids.shape[1]].copy_(ids)
        else:
            self.counts.index_add_(0, ids.flatten().long(), self._one.expand(ids.numel()))


class ExpertCounter:
    """The counts of a model whose experts are nested.

    Args:
        model: on its device.

    Attributes:
        tokens: that were counted.
        rows: of a forward that can keep its choices, at most.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        nested = [(layer, layer.nested(layer.parameters[0])) for layer in expert_layers(model)]
        self._sizes = {layer.name: len(matrices) for layer, matrices in nested if matrices is not None}
        self._stride = 1 + max(self._sizes.values(), default=0)
        self._counts = torch.zeros(len(self._sizes), self._stride, dtype=torch.long, device=device)
        self._begins = torch.arange(len(self._sizes), device=device)[:, None, None] * self._stride
        self._one = torch.ones(1, dtype=torch.long, device=device)
        self._kept: torch.Tensor | None = None
        self._keeps = False
        self.tokens = self.rows = 0
        self._layers = []
        for counts, (_, matrices) in zip(self._counts, ((n, m) for n, m in nested if m is not None), strict=True):
            matrices.counter = LayerCounter(counts[: len(matrices) + 1])
            self._layers.append(matrices.counter)

    def begin(self, rows: int) -> None:
        """Count from here on; forwards of up to so many rows can keep their choices. The model has run before."""
        width = max((layer.choices for layer in self._layers), default=0)
        self.restart()
        if width:
            self.rows = rows
            self._kept = torch.full((len(self._layers), rows, width), self._stride - 1, device=self._counts.device)
            for layer, kept in zip(self._layers, self._kept, strict=True):
                layer.kept = kept

    def restart(self) -> None:
        """Forget what was counted."""
        self._counts.zero_()
        self.tokens = 0

    def keep(self, keeps: bool) -> None:
        """Whether the forward that comes next keeps its choices until `count`, a copy for each layer, which is cheaper
        and says in a step at fixed shapes which rows are somebody's; or adds them as it goes, however many there are.
        """
        if keeps is not self._keeps:
            self._keeps = keeps
            for layer in self._layers:
                layer.keeps = keeps

    def count(self, tokens: int) -> None:
        """A forward with so many tokens has run, or of one that keeps its choices so many of the first rows count."""
        if self._keeps and self._kept is not None:
            chosen = (self._kept[:, :tokens] + self._begins).flatten()
            self._counts.view(-1).index_add_(0, chosen, self._one.expand(len(chosen)))
        self.tokens += tokens

    def kept(self, rows: int) -> torch.Tensor:
        """int64 [layers, rows, choices], what the first rows of the last forward that kept its choices chose; numbers
        from the last expert's on are no choice."""
        assert self._kept is not None
        return self._kept[:, :rows]

    def read(self) -> ExpertUse:
        """What was counted since `begin`. It waits for the device."""
        counts = self._counts.cpu().numpy().astype(np.float64)
        of = {name: row[:size] for (name, size), row in zip(self._sizes.items(), counts, strict=True)}
        return ExpertUse(self.tokens, of)
