"""What a step did for a sequence, and why it may have given it nothing."""

from __future__ import annotations

from dataclasses import dataclass

from qbe.engine.scheduling.sequence import Sequence
from qbe.kvcache.pages import PagePool


@dataclass(frozen=True)
class StepOutput:
    """What a step did for one sequence: a new token, an end, or both.

    `finish_reason` is "stop", "length", "cancelled" or "error" when `finished`, else None.
    """

    sequence: Sequence
    new_token: int | None
    finished: bool
    finish_reason: str | None


def why_no_token(sequence: Sequence, pool: PagePool) -> str:
    """One line about logits that no token can be chosen from."""
    if sequence.sampling.constraint is not None and sequence.sampling.constraint.error:
        return sequence.sampling.constraint.error
    where = pool.not_numbers(sequence.pages, sequence.computed) or "the model's logits"
    return (
        f"{where} were not numbers (NaN or infinity, or too large for the KV bits) after "
        f"{len(sequence.token_ids)} tokens: use a wider dtype (bfloat16 or float32) or more KV bits"
    )
