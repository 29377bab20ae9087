"""Whether a prompt fits into the model's context."""

from __future__ import annotations

from dataclasses import dataclass

from qbe.engine.token_length import TokenLengthBound
from qbe.errors import QBEError


def check_length(tokens: int, context: int) -> None:
    """Raises QBEError for a prompt that leaves no room for an answer."""
    if tokens >= context:
        raise QBEError(
            f"the prompt has {tokens} tokens, but the model's context is {context} with the answer: shorten it",
            field="prompt",
        )


@dataclass(frozen=True)
class ContextLimit:
    """What a prompt must fit into.

    Attributes:
        context: tokens of the prompt and at least one of the answer.
        longest: token; None where that is not known.
    """

    context: int
    longest: TokenLengthBound | None

    def check_text(self, text: str) -> None:
        """Raises QBEError for a text that cannot fit, however it is tokenized."""
        if self.longest is not None and self.longest.least_tokens(text) >= self.context:
            raise QBEError(
                f"the prompt has {len(text)} characters, more than fit into the model's context of {self.context} "
                "tokens with the answer: shorten it", field="prompt",
            )  # fmt: skip

    def check(self, tokens: int) -> None:
        """Raises QBEError for too many tokens."""
        check_length(tokens, self.context)
