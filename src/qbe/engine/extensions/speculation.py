"""Answers whose next tokens are drafted and checked in one step (`qbe.engine.speculation.speculator`)."""

from __future__ import annotations

import time

from qbe.engine.execution.runner import Runner
from qbe.engine.extensions.extension import Extension
from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.speculation.acceptance_statistics import Speculation
from qbe.engine.speculation.speculator import Speculator


class SpeculationExtension(Extension):
    """Adds draft rows, or rows that check draft tokens, to decode steps.

    Args:
        runner: of the steps; only those at fixed shapes can have such rows.
    """

    def __init__(self, speculator: Speculator, runner: Runner) -> None:
        self._speculator = speculator
        self._runner = runner
        self._decodes = False  # whether the present step is one
        self._began = 0.0  # when it did, seconds of `time.perf_counter`

    def admit(self, sequence: Sequence) -> None:
        # Bounds and high-precision tokens say of each token by itself how it is read, which a draft token cannot know.
        free = sequence.blueprint.kv_error is None and sequence.difficulty.threshold is None
        sequence.speculation = Speculation() if sequence.params.speculate and free else None

    def extend(self, work: list[ScheduledTokens]) -> list[ScheduledTokens]:
        self._began = time.perf_counter()
        decode = self._runner.decode
        self._decodes = decode is not None and decode.serves(work)
        return self._speculator.extend(work) if self._decodes else self._speculator.pause(work)

    def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
        drafts = [w.sequence for w in work if w.draft is not None]
        if drafts:  # all rows of a draft step make draft tokens
            self._speculator.draft(drafts, scores.logits, scores.best)

    def finish(self, work: list[ScheduledTokens]) -> None:
        if self._decodes:
            self._speculator.measured(work, time.perf_counter() - self._began)
