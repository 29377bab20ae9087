"""Answers whose attention gives later layers their bits (`qbe.engine.adaptive.cascade`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from qbe.engine.adaptive.cascade import Cascade, is_cascaded
from qbe.engine.extensions.extension import Extension
from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence


class CascadeExtension(Extension):
    """Begins the cascade for answers that ask for it, and keeps what each of their tokens got.

    Args:
        cascade: None: such requests run at their blueprint as it is.
    """

    def __init__(self, cascade: Cascade | None) -> None:
        self._cascade = cascade
        self._keep: Callable[[Sequence], None] | None = None  # of the step that has just run

    def admit(self, sequence: Sequence) -> None:
        if not is_cascaded(sequence.blueprint):
            return
        if self._cascade is None:
            sequence.blueprint = replace(sequence.blueprint, dynamic_precision=None)
        else:
            self._cascade.begin(sequence)

    def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
        self._keep = None if self._cascade is None else self._cascade.fetch(work)

    def advance(self, sequence: Sequence, token: int | None) -> None:
        if self._keep is not None:
            self._keep(sequence)
