"""A model with random weights at the speed that speculation would have with the answers of a real one."""

from __future__ import annotations

import random
from collections.abc import Mapping

from qbe.blueprint import Blueprint
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence as Running
from qbe.engine.speculation.acceptance_statistics import NGRAM_DRAFTER, Speculation


class Recorded(Running):
    """Writes an answer that another model has given, whatever its own gives.

    Args:
        script: the answer's tokens; empty: it writes its own.
    """

    def __init__(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, blueprint: Blueprint, script: list[int]
    ) -> None:
        super().__init__(request_id, prompt_ids, params, blueprint)
        self.script = script

    def append(self, token: int) -> None:
        super().append(self.script[len(self.output_ids)] if self.script else token)


class Replayed(Speculation):
    """Draft tokens are made and checked as always, and all the work of real steps is done for them. Whether a draft is
    right is drawn, as often as was measured elsewhere; what was read is compared with the recorded answer.

    After a draft token that counts as right the cache holds the draft token, whose row has run.

    Args:
        rates: bits of a draft -> part of its draft tokens that are right.
        draws: what decides.
        sequence: whose draft tokens they are.
    """

    def __init__(self, rates: Mapping[int, float], draws: random.Random, sequence: Running) -> None:
        super().__init__()
        self._rates, self._draws, self._sequence = rates, draws, sequence

    def right(self, position: int, token: int | None) -> bool:
        if self.source == NGRAM_DRAFTER:
            return super().right(position, self._sequence.token_ids[-1])
        return position < len(self.draft_tokens) and self._draws.random() < self._rates[self.source]
