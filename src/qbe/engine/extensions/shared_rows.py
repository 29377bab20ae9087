"""Counts what the rows of shared steps read beyond what was asked for (`qbe.store.shared_rows`)."""

from __future__ import annotations

from qbe.engine.extensions.extension import Extension
from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.scheduler import ScheduledTokens
from qbe.store.shared_rows import SharedRows


class SharedReads(Extension):
    """Of every request.

    Args:
        shared: what raises the rows of the plan.
    """

    def __init__(self, shared: SharedRows) -> None:
        self._shared = shared

    def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
        runs = [[(w.draft, 1)] if w.draft is not None else w.sequence.rows(w.start, w.count) for w in work]
        read = self._shared.of([blueprint for of_work in runs for blueprint, _ in of_work])
        passes = set[str]()
        for w, of_work in zip(work, runs, strict=True):
            rows = [(read[blueprint.linear_key], tokens) for blueprint, tokens in of_work]
            reads, request = w.sequence.shared_reads, w.sequence.request_id
            if w.draft is None:
                reads.tokens += w.count
                reads.bits += sum(row.bits * tokens for row, tokens in rows)
            if w.samples and request not in passes:  # its rows of a step read a weight once
                passes.add(request)
                reads.nbytes += rows[-1][0].nbytes
