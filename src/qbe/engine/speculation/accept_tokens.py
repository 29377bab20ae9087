"""The tokens that a step gives to its sequences: one each, or several where draft tokens are checked."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable

from qbe.engine.sampling.sampler import Scores, is_likeliest, sample
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.engine.scheduling.sequence import Sequence
from qbe.engine.speculation.speculator import draft_token_of


def accept_tokens(
    rows: collections.abc.Sequence[ScheduledTokens], scores: Scores, advance: Callable[[Sequence, int | None], None]
) -> None:
    """Samples every row's token.

    Of a sequence that checks draft tokens the rows are taken one after the other, as if each had been a step, until one
    gives another token than was drafted.

    Args:
        rows: those of the step that sample, in order.
        scores: theirs, as from `Runner.step`.
        advance: called with each token in its turn; gives it to its sequence and ends that when it was the last. The
            first one has been sampled for all sequences before it is called.
    """
    chains: dict[Sequence, list[int]] = {}
    for i, w in enumerate(rows):
        chains.setdefault(w.sequence, []).append(i)
    known = scores.best.tolist() if len(chains) < len(rows) and all(map(is_likeliest, chains)) else None
    depth = 0
    while chains:
        indices, sequences = [chain[depth] for chain in chains.values()], list(chains)
        if known is not None:
            tokens: list[int | None] = [known[i] if known[i] >= 0 else None for i in indices]
        else:
            part = scores if len(indices) == len(rows) else scores.rows(indices)
            tokens = sample(part, sequences, [draft_token_of(s, depth) for s in sequences])
        for s, token in zip(sequences, tokens, strict=True):
            advance(s, token)
            speculation = s.speculation
            right = speculation is not None and speculation.right(depth, token)
            if right and s.finish_reason is None:
                s.computed += 1  # the row of the draft token has computed it
                continue
            del chains[s]
            if speculation is not None and speculation.draft_tokens:
                speculation.checked(depth + right, refused=not right and depth < len(speculation.draft_tokens))
        depth += 1
