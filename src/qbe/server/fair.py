"""Shares of keys within a tier: virtual token counters (Sheng et al. 2024, "Fairness in Serving LLMs").

Each key has a counter of the tokens that it was served, over its weight; of the keys that have answers waiting the one
with the lowest counter is next. A key that comes back begins no lower than those that were there, so that nobody saves
up. An answer counts with its prompt and with what answers are long on average when it begins, and with what it was when
it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from qbe.engine.scheduling.sequence import Sequence, Status

_WRITTEN = 2  # what a written token counts beside one that is read: the paper's weights
_FADE = 0.9  # of the average length of answers

Flow = tuple[str, str]  # tier and key


class Shares:
    """Counts for one scheduler; asked in its thread."""

    def __init__(self) -> None:
        self.served: dict[Flow, float] = {}
        self._open: dict[Sequence, float] = {}  # what each answer that goes on was counted with
        self._present: set[Flow] = set()
        self._chosen: Sequence | None = None
        self._length = 0.0  # tokens of an answer, on average

    def look(self, waiting: Collection[Sequence], running: Iterable[Sequence]) -> None:
        """Count what has happened since the last look."""
        if self._chosen is not None and self._chosen.status is not Status.WAITING:
            self._open.setdefault(self._chosen, 0.0)
        for sequence in running:
            self._open.setdefault(sequence, 0.0)
        present = {flow_of(s) for s in (*waiting, *self._open)}
        served = [self.served[f] for f in present & self._present]
        for flow in present - self._present:  # who was away gets nothing for it
            beside = [self.served[f] for f in present & self._present if f[0] == flow[0]]
            self.served[flow] = max(self.served.get(flow, 0.0), min(beside, default=0.0))
        if not served:  # all are new: what was counted before is of no use
            self.served = dict.fromkeys(present, 0.0)
        self._present = present
        for sequence in list(self._open):
            self._count(sequence)

    def first(self, waiting: Collection[Sequence]) -> Sequence:
        """Whose turn it is, of these: of the tier whose answer has the lowest rank, of its key with the least."""
        tier = min(waiting, key=_rank).priority.tier
        of_tier = [s for s in waiting if s.priority.tier == tier]
        least = min({flow_of(s) for s in of_tier}, key=lambda flow: (self.served.get(flow, 0.0), flow[1]))
        self._chosen = min((s for s in of_tier if flow_of(s) == least), key=_rank)
        return self._chosen

    def _count(self, sequence: Sequence) -> None:
        written, over = len(sequence.output_ids), sequence.status is Status.FINISHED
        foreseen = written if over else max(written, min(sequence.params.max_tokens, self._length))
        cost = (len(sequence.prompt_ids) - sequence.paging.cached + _WRITTEN * foreseen) / sequence.priority.weight
        flow = flow_of(sequence)
        self.served[flow] = self.served.get(flow, 0.0) + cost - self._open[sequence]
        self._open[sequence] = cost
        if over:
            del self._open[sequence]
            self._length = _FADE * self._length + (1 - _FADE) * written if self._length else written


def flow_of(sequence: Sequence) -> Flow:
    """Whose it is."""
    return sequence.priority.tier, sequence.priority.key


def _rank(sequence: Sequence) -> float:
    return sequence.priority.rank
