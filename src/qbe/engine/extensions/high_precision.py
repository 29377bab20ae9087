"""Tokens that were hard to predict go through the model with 16-bit activations."""

from __future__ import annotations

from qbe.engine.extensions.extension import Extension
from qbe.engine.scheduling.sequence import Sequence


class HighPrecisionTokens(Extension):
    """The sampler leaves how hard a token was to predict; its row's precision follows from that.

    Args:
        packed: whether a row has a precision of its own. A plan of one row, as recurrent models have it, could not
            compute such a sequence again after a preemption.
    """

    def __init__(self, packed: bool) -> None:
        self._packed = packed

    def admit(self, sequence: Sequence) -> None:
        if not self._packed or sequence.blueprint.full_activations is sequence.blueprint:
            sequence.difficulty.threshold = None

    def advance(self, sequence: Sequence, token: int | None) -> None:
        difficulty = sequence.difficulty
        if token is None or difficulty.threshold is None or not difficulty.entropies:
            return
        if difficulty.entropies[-1] > difficulty.threshold:
            difficulty.high_precision_positions.add(len(sequence.token_ids))
