"""A scheduler with a runner that only counts."""

from __future__ import annotations

from typing import Any

from qbe.engine.scheduling.scheduler import ScheduledTokens, Scheduler
from qbe.kvcache.allocator import PageAllocator, PageFormat

FULL = PageFormat(0, 16 * 256)
LOW = PageFormat(1, 5 * 256)


def scheduler(pages: int = 64, tokens: int = 16, sequences: int = 4, context: int | None = 256, **kw: Any) -> Scheduler:
    allocator = PageAllocator(pages, FULL)
    return Scheduler(allocator, max_batch_tokens=tokens, max_sequences=sequences, context=context, **kw)


def advance(s: Scheduler) -> list[ScheduledTokens]:
    """One step of a model that always says 1."""
    work = s.schedule()
    for w in work:
        assert w.start == w.sequence.computed
        w.sequence.computed = w.start + w.count
    s.complete(work)
    for w in work:
        if w.samples:
            w.sequence.token_ids.append(1)
            if len(w.sequence.token_ids) == w.sequence.max_length:
                s.finish(w.sequence, "length")
    return work


def shape(work: list[ScheduledTokens]) -> list[tuple[str, int, int]]:
    return [(w.sequence.request_id, w.start, w.count) for w in work]
