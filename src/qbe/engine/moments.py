"""What the prefill says of a prompt beside its logits: how large the channels of every nested site's inputs were.

A policy that `reads_prompt` gets these once the prompt has run (`qbe.analysis.profile.PromptSignals`) and chooses anew
for what is to come. Hooks are there while such a prompt runs, and at no other time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qbe.analysis.profile import PromptSignals
from qbe.sites import Role, SiteTable


@dataclass
class Moments:
    """Sums over the tokens of one prompt.

    Attributes:
        squares: of the inputs of each nested site, float32 [inputs] on the model's device; None for an output
            head, which sees one row of a prompt.
        tokens: how many.
        entropy: of the distribution that the prompt ended in, nats, float32 [] on the device.
    """

    squares: list[torch.Tensor | None]
    tokens: int = 0
    entropy: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def signals(self) -> PromptSignals:
        """The same as means, in numpy."""
        means = [None if s is None else (s / self.tokens).cpu().numpy() for s in self.squares]
        return PromptSignals(tuple(means), float(self.entropy))


@contextmanager
def gathering(
    model: nn.Module, table: SiteTable, parts: Sequence[tuple[slice, Moments]], tokens: int
) -> Iterator[None]:
    """Inside, a forward of so many tokens adds its rows to the moments that they belong to."""
    last: list[Any] = [None, []]  # sites that read the same input read it one after the other

    def hook(at: int) -> Callable[..., None]:
        def add(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0]
            if last[0] is not x:
                rows = x.reshape(tokens, -1)
                last[:] = x, [rows[rows_of].float().square().sum(0) for rows_of, _ in parts]
            for (_, moments), found in zip(parts, last[1], strict=True):
                before = moments.squares[at]
                moments.squares[at] = found if before is None else before + found

        return add

    hooks = [
        model.get_submodule(site.name).register_forward_pre_hook(hook(at))
        for at, site in enumerate(table.nested)
        if site.role is not Role.OUTPUT_HEAD  # it sees one row of a prompt
    ]
    try:
        yield
    finally:
        for h in hooks:
            h.remove()
    for rows_of, moments in parts:
        moments.tokens += len(range(tokens)[rows_of])
