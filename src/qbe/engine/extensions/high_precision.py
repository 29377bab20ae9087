"""Tokens that were hard to predict go through the model with 16-bit activations."""

from __future__ import annotations

from collections.abc import Callable

from qbe.compatibility import Situation, check_request
from qbe.engine.extensions.extension import Extension
from qbe.engine.scheduling.sequence import Sequence


class HighPrecisionTokens(Extension):
    """The sampler leaves how hard a token was to predict; its row's precision follows from that.

    Args:
        situation: of the engine. A plan of one row, as recurrent models have it, could not compute such a sequence
            again after a preemption.
    """

    def __init__(self, situation: Callable[[], Situation]) -> None:
        self._situation = situation

    def admit(self, sequence: Sequence) -> None:
        if sequence.difficulty.threshold is not None:
            check_request(["high_precision_tokens"], self._situation())
        if sequence.blueprint.full_activations is sequence.blueprint:  # they have 16 bits already
            sequence.difficulty.threshold = None

    def advance(self, sequence: Sequence, token: int | None) -> None:
        difficulty = sequence.difficulty
        if token is None or difficulty.threshold is None or not difficulty.entropies:
            return
        if difficulty.entropies[-1] > difficulty.threshold:
            difficulty.high_precision_positions.add(len(sequence.token_ids))
