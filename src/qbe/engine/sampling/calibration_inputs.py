"""How large the inputs of every site are on the built-in calibration text, seen as those of a scored answer are."""

from __future__ import annotations

import uuid
from collections.abc import Sequence as Tokens

from qbe.engine.adaptive.activation_statistics import ActivationStats, largest_inputs
from qbe.engine.core import Core
from qbe.engine.sampling.answer_scoring import LAST, widest
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.errors import QBEError


class CalibrationInputs:
    """Runs passages one after the other, in steps between which it can be left.

    Args:
        core: serves nobody else while it steps.
        passages: token ids of each, all of one length.

    Attributes:
        tokens: of a passage.
    """

    def __init__(self, core: Core, passages: Tokens[Tokens[int]]) -> None:
        self._core, self._left, self.tokens = core, [list(p) for p in passages], len(passages[0])
        self._largest: list[float | None] = [None] * len(core.table.nested)
        self._running: Sequence | None = None

    def step(self) -> tuple[float | None, ...] | None:
        """Runs one step; as `AnswerScore.inputs`, of the passage that has most, once that was the last.

        Raises:
            QBEError: the model cannot read it.
        """
        if self._running is None:
            sequence = Sequence(uuid.uuid4().hex, self._left[0], SamplingParams(max_tokens=1), widest(self._core.table))
            sequence.priority, sequence.activation_stats = LAST, ActivationStats.of(self._core.table)
            sequence.paging.cache_salt = b"calibration"  # nobody asks for what it leaves
            self._core.add(sequence)
            self._running = sequence
        running = self._running
        self._core.step()
        self._core.scheduler.last = []
        if running.finish_reason is None:
            return None
        if running.finish_reason == "error":
            raise QBEError(running.error or "the model failed")
        self._running = None
        self._left.pop(0)
        self._count(running.activation_stats)
        return None if self._left else tuple(self._largest)

    def leave(self) -> None:
        """Give up what it holds of the engine; `step` begins the passage anew."""
        if self._running is not None:
            self._core.cancel(self._running.request_id)
            self._core.scheduler.last, self._running = [], None

    def _count(self, stats: ActivationStats | None) -> None:
        for i, now in enumerate(largest_inputs(stats)):
            if now is not None:
                self._largest[i] = max(now, self._largest[i] or 0.0)
