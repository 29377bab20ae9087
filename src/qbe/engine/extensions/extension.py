"""The five points of a request's life at which something special may act; `qbe.engine.core.Core.step` calls them."""

from __future__ import annotations

from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence


class Extension:
    """Something that only some requests need. By default it does nothing."""

    def admit(self, sequence: Sequence) -> None:
        """A request comes: give it what it needs, or take from it what this engine cannot do.

        Raises:
            QBEError: it cannot be served.
        """

    def extend(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        """The work of the step that runs next, with rows of one's own or as it is."""
        return work

    def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
        """The model has run this work; nobody has waited for the device yet.

        Pages that it filled still have their staging pages.
        """

    def advance(self, sequence: Sequence, token: int | None) -> None:
        """A sequence is about to get this token, None where its logits were no numbers."""

    def finish(self, work: list[ScheduledTokens]) -> None:
        """The step is over: every sequence has its tokens."""
