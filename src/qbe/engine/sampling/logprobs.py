"""How likely the model found tokens: those it wrote, those of a prompt, and the likeliest beside them."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass

import torch

from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.scheduling.sequence_state import Scoring


@dataclass(frozen=True)
class Logprob:
    """One token, by the model's own distribution: before penalties, bias, constraint and temperature.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability; -inf for a probability of 0.
        top: the likeliest tokens and their logarithms, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(
    logits: torch.Tensor, tokens: collections.abc.Sequence[int], top: collections.abc.Sequence[int]
) -> list[Logprob]:
    """What each row says of its token.

    Args:
        logits: float32 `[n, vocabulary]`.
        tokens: n ids.
        top: how many of the likeliest tokens to name, for each row.
    """
    if not tokens:
        return []
    total = logits.logsumexp(dim=-1, keepdim=True)
    of_tokens = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]) - total
    best = logits.topk(min(max(top), logits.shape[-1]), dim=-1)
    of_best = (best.values - total).tolist()
    names = best.indices.tolist()
    return [
        Logprob(token, value, tuple(zip(ids[:k], values[:k], strict=True)))
        for token, (value,), ids, values, k in zip(tokens, of_tokens.tolist(), names, of_best, top, strict=True)
    ]


def prompt_scoring(sequence: Sequence) -> Scoring:
    """Adds to the sequence's `prompt_logprobs` while the prompt is computed; then it is like any other."""

    def take(start: int, logits: torch.Tensor) -> None:
        known, top = len(sequence.sampling.prompt_logprobs), sequence.params.prompt_logprobs or 0
        tokens = sequence.prompt_ids[known + 1 : start + len(logits) + 1]  # a row speaks of the token after its own
        rows = logits[known - start :][: len(tokens)]
        sequence.sampling.prompt_logprobs += logprobs(rows, tokens, [top] * len(tokens))
        if start + len(logits) >= len(sequence.prompt_ids):
            sequence.sampling.scoring = None

    return Scoring(0, take)
