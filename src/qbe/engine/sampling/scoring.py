"""Teacher forcing: the logits of given tokens under a blueprint, through the engine's own steps and pages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qbe.blueprint import Blueprint
from qbe.engine.adaptive.routing import Read
from qbe.engine.core import Core
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence as Running
from qbe.engine.scheduling.sequence import Status
from qbe.engine.scheduling.sequence_state import Scoring
from qbe.errors import QBEError
from qbe.sites import SiteTable


@dataclass(frozen=True)
class Scored:
    """Tokens to run, and who gets their logits.

    Attributes:
        ids: of the whole text, fewer than the model's context.
        blueprint: what they run at.
        start: the first position whose logits are wanted; what comes before may be taken from pages that are known.
        take: called with a position and the logits float32 [n, vocabulary] of the tokens from there on, in order and on
            the model's device; they are valid until it returns. Row i tells of the token after the one at position + i.
    """

    ids: Sequence[int]
    blueprint: Blueprint
    start: int
    take: Callable[[int, torch.Tensor], None]


def score(core: Core, items: Sequence[Scored], table: SiteTable | None = None) -> list[Read | None]:
    """Runs all items, as many at once as the core's limits allow, on a core that serves nobody else meanwhile.

    A sequence that has to give its pages up begins again, and its logits come again.

    Args:
        table: with the bytes to be counted; the core's if it is left out.

    Returns:
        For each item what the tokens whose logits were wanted read, where routers chose that, else None.

    Raises:
        QBEError: a text that is empty, too long, has unknown tokens or gives logits that are no numbers.
    """
    running: list[Running] = []
    try:
        for item in items:
            sequence = Running(uuid.uuid4().hex, list(item.ids), SamplingParams(max_tokens=1), item.blueprint)
            sequence.sampling.scoring = Scoring(item.start, item.take)
            core.add(sequence)
            running.append(sequence)
        while any(s.status is not Status.FINISHED for s in running):
            core.step()
    finally:
        for sequence in running:
            core.cancel(sequence.request_id)
    for sequence in running:
        if sequence.error is not None:
            raise QBEError(sequence.error)
    return [None if s.routed is None else Read.of(s.routed, s.blueprint, table or core.table) for s in running]
