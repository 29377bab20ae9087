"""Requests with a bound on the error of attention: 16-bit originals of their quantised pages are kept on the host.

Where the host's memory ends, bounds cannot be kept any more: answers that have one end with an error, those that asked
for best effort go on and say so, and later requests are refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qbe.compatibility import Situation, check_request
from qbe.engine.extensions.extension import Extension
from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.scheduler import ScheduledTokens, Scheduler
from qbe.engine.scheduling.sequence import Sequence
from qbe.kvcache.originals import Originals
from qbe.kvcache.pages import PAGE_SIZE


class BoundedKV(Extension):
    """Keeps originals as pages fill.

    Args:
        originals: of the pool that the scheduler's pages are in.
    """

    def __init__(self, originals: Originals, scheduler: Scheduler) -> None:
        self._originals = originals
        self._scheduler = scheduler

    def admit(self, sequence: Sequence) -> None:
        if self._originals.refused and sequence.kv_limit < math.inf:
            check_request(["kv_error"], Situation(originals_full=True), sequence.bounded.best_effort)
            self._drop(sequence)

    def observe(self, work: list[ScheduledTokens], scores: Scores) -> None:
        for w in work:
            if w.sequence.kv_limit == math.inf:
                continue
            for page in w.sequence.pages[w.start // PAGE_SIZE : w.sequence.computed // PAGE_SIZE]:
                while page.staging_page is not None and page.original is None:
                    page.original = self._originals.keep(page.staging_page)
                    if page.original is None and not self._scheduler.allocator.evict():
                        self._refuse()
                        return

    def _refuse(self) -> None:
        """The host has no memory: no request has a bound from here on."""
        self._originals.refuse()
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            if sequence.kv_limit < math.inf:
                if not sequence.bounded.best_effort:
                    sequence.error = (
                        "the bound on kv_error cannot be kept any more: the host has no memory left for 16-bit "
                        "originals of pages; ask for 16 KV bits, or let it be dropped with best_effort"
                    )
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        sequence.blueprint = replace(sequence.blueprint, kv_error=None)
        sequence.bounded.dropped = True
