"""What the prefill says of a prompt beside its logits: the channels of every nested site's inputs, and their size.

A policy that `reads_prompt` gets these once the prompt has run (`qbe.analysis.profile.PromptSignals`) and chooses anew
for what is to come. Such a prompt begins on nobody's pages: the answer's bits do not depend on what others left.
Hooks are there while it runs, and at no other time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qbe.analysis.profile import PromptSignals
from qbe.sites import Role, SiteTable


@dataclass
class ActivationStats:
    """Sums over the tokens of one prompt.

    Attributes:
        squares: of the inputs of each nested site, float32 [inputs] on the model's device; None for an output
            head, which sees one row of a prompt.
        sums: likewise, of the inputs themselves.
        tokens: how many.
        entropy: of the distribution that the prompt ended in, nats, float32 [] on the device.
    """

    squares: list[torch.Tensor | None]
    sums: list[torch.Tensor | None]
    tokens: int = 0
    entropy: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    @classmethod
    def of(cls, table: SiteTable) -> ActivationStats:
        """Of no token yet."""
        return cls([None] * len(table.nested), [None] * len(table.nested))

    def restart(self) -> None:
        """Forget what was added: the prompt begins again."""
        self.squares, self.sums = [None] * len(self.squares), [None] * len(self.sums)
        self.tokens = 0

    def signals(self) -> PromptSignals:
        """The same as means, in numpy."""
        squares, means = (
            tuple(None if s is None else (s / self.tokens).cpu().numpy() for s in kind)
            for kind in (self.squares, self.sums)
        )
        return PromptSignals(squares, float(self.entropy), means)


def largest_inputs(stats: ActivationStats | None) -> tuple[float | None, ...]:
    """For each nested site the root mean square of its input's largest channel; None where that was not seen."""
    if stats is None or not stats.tokens:
        return ()
    return tuple(None if s is None else math.sqrt(float(s.max()) / stats.tokens) for s in stats.squares)


@contextmanager
def collecting(
    model: nn.Module, table: SiteTable, parts: Sequence[tuple[range, ActivationStats]], tokens: int,
    running: Callable[[], Sequence[int] | None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Inside, a forward of so many tokens adds its rows to the statistics that they belong to.

    Args:
        running: which of its rows run where a module may get some of them only, as those in recurrent layers do; None:
            all of them.
    """
    last: list[Any] = [None, []]  # sites that read the same input read it one after the other

    def hook(number: int) -> Callable[..., None]:
        def add(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0]
            if last[0] is not x:
                now = None if running is None else running()
                rows = x.reshape(tokens if now is None else len(now), -1)
                inputs = [rows[_among(rows_of, now)].float() for rows_of, _ in parts]
                last[:] = x, [(o.square().sum(0), o.sum(0)) for o in inputs]
            for (_, activation_stats), sums in zip(parts, last[1], strict=True):
                for kind, new in zip((activation_stats.squares, activation_stats.sums), sums, strict=True):
                    before = kind[number]
                    kind[number] = new if before is None else before + new

        return add

    hooks = [
        model.get_submodule(site.name).register_forward_pre_hook(hook(at))
        for at, site in enumerate(table.nested)
        if site.expert is None and site.role is not Role.OUTPUT_HEAD  # it sees one row of a prompt
    ]
    try:
        yield
    finally:
        for h in hooks:
            h.remove()
    for rows_of, activation_stats in parts:
        activation_stats.tokens += len(rows_of)


def _among(rows: range, running: Sequence[int] | None) -> slice | list[int]:
    """Where these rows of a step are among the running ones."""
    if running is None:
        return slice(rows.start, rows.stop)
    return [at for at, row in enumerate(running) if row in rows]
