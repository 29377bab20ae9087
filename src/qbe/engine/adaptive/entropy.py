"""The entropy of a running request's attention, read where a page becomes full: one token in 64."""

from __future__ import annotations

import collections.abc
import math

import torch

from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kvcache.cache import PagedCache


def note(
    work: collections.abc.Sequence[ScheduledTokens],
    entropy: collections.abc.Sequence[torch.Tensor | None],
    cache: PagedCache,
) -> None:
    """Append to `entropies` of the sequences that watch theirs and have just filled a page with a token of the answer.

    Which token is read depends on its position alone: not on how a prompt was cut, on company or on preemption.

    Args:
        work: of one token each; its order is that of the rows of `entropy`.
        entropy: per layer float32 `[rows, heads]` in nats (`qbe.kvcache.attention.DecodeLayout`), or None.
    """
    rows = [i for i, w in enumerate(work) if _fills(w)]
    layers = [(e, i) for i, e in enumerate(entropy) if e is not None]
    if not rows or not layers:
        return
    numbers = torch.cat([e[: len(work)] for e, _ in layers], 1)[rows].tolist()
    for row, line in zip(rows, numbers, strict=True):
        of_heads, head = [], 0
        for e, layer in layers:
            shape, window = cache.pool.shapes[layer], cache.windows[layer]
            assert shape is not None
            seen = work[row].start + 1
            most = math.log(seen if window is None else max(2, min(seen, window)))
            repeat = e.shape[1] // shape.kv_heads
            for _ in range(shape.kv_heads):
                of_heads.append(sum(line[head : head + repeat]) / repeat / most)
                head += repeat
        work[row].sequence.attention.entropies.append(of_heads)


def _fills(w: ScheduledTokens) -> bool:
    """Whether a token of the answer fills a page for the first time."""
    s = w.sequence
    fills = w.start % PAGE_SIZE == PAGE_SIZE - 1 and w.start // PAGE_SIZE == len(s.paging.quantised_bits)
    return s.attention.watched and fills and w.start >= len(s.prompt_ids)
