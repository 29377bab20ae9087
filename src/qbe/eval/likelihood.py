"""How likely texts are after others, at the blueprint that a policy chooses for what comes before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.sampling.scoring import Scored, score


@dataclass(frozen=True)
class Continuation:
    """Token ids before and of a text, both with one at least, and what they run at."""

    before: Sequence[int]
    ids: Sequence[int]
    blueprint: Blueprint


def likelihoods(core: Core, items: Sequence[Continuation]) -> list[tuple[float, bool]]:
    """For each its log likelihood, nats, and whether greedy decoding would have written it.

    What does not fit the model's context is cut off at the beginning, as far as something is left before the text.

    Args:
        core: serves nobody else meanwhile; as many items as its limits allow run at once.

    Raises:
        QBEError: a continuation that alone exceeds the context.
    """
    scores = [torch.zeros(2, len(item.ids), dtype=torch.float64) for item in items]
    score(core, [_scored(core, item, rows) for item, rows in zip(items, scores, strict=True)])
    return [(float(rows[0].sum()), bool(rows[1].all())) for rows in scores]


def _scored(core: Core, item: Continuation, scores: torch.Tensor) -> Scored:
    """Runs the item; `scores` float64 [2, tokens] gets log likelihood and greediness of each token."""
    # The last token itself need not run; the engine keeps a place for the one after a prompt.
    context_limit = len(item.before) if core.context is None else max(1, core.context - len(item.ids))
    before = list(item.before)[-context_limit:]
    labels, start = torch.tensor(list(item.ids), device=core.device), len(before) - 1

    def take(position: int, logits: torch.Tensor) -> None:
        positions = slice(position - start, position - start + len(logits))
        targets = labels[positions]
        scores[0, positions] = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].double().cpu()
        scores[1, positions] = (logits.argmax(-1) == targets).double().cpu()

    return Scored([*before, *item.ids][:-1], item.blueprint, start, take)
