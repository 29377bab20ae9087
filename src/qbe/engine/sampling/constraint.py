"""What an answer may be, token by token: a grammar, for example."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Closing(Constraint, Protocol):
    """A constraint that sees to it that its answer comes to an end."""

    @property
    def cut(self) -> str | None:
        """Why it has put in tokens that the model had not chosen, so that the answer ends; None where it has not."""
        ...

    def settle(self, token: int, left: int) -> int:
        """The token to take where this allowed one was chosen and so many may still come, it included."""
        ...


def settled(constraint: Constraint | None, token: int, left: int) -> int:
    """The token to take of an answer with this constraint (`Closing.settle`)."""
    return constraint.settle(token, left) if isinstance(constraint, Closing) else token


def was_cut(constraint: Constraint | None) -> bool:
    """Whether an answer ends where the model would not have ended it."""
    return isinstance(constraint, Closing) and constraint.cut is not None
