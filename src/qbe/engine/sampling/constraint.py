"""What an answer may be, token by token: a grammar, for example."""

from __future__ import annotations

from typing import Protocol

import torch


class Constraint(Protocol):
    """Belongs to one answer. The sampler asks it before each token, the core tells it every token.

    Attributes:
        error: one line that says why no token can follow; None while one can.
    """

    error: str | None

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next: bool `[vocabulary]` on the CPU."""
        ...

    def accept(self, token: int) -> bool:
        """Take the next token; whether the answer is complete with it."""
        ...
