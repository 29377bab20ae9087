"""Brings what an engine's steps count of experts to the host, for metrics, and to the records."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from qbe.records import ServedUse
from qbe.records.expert_use import today
from qbe.store.expert_counter import ExpertCounter
from qbe.store.expert_use import ExpertUse

READ_S = 1.0  # between two reads of the device's counts, 50 KB of Qwen3-30B-A3B
WRITE_S = 10.0  # between two writes


class Sink(Protocol):
    """A record store or its writer."""

    def try_add_use(self, more: ServedUse) -> bool: ...


class UseRecords:
    """Of one engine.

    Args:
        counter: of its model; None: it has no nested experts, and nothing happens.
        store: digest of its store; None: it lies in no folder that could take counts over, and none are recorded.
        records: where they go.

    Attributes:
        counted: since the engine's start, as it was last read; None before that.
    """

    def __init__(self, counter: ExpertCounter | None, store: str | None, records: Sink | None) -> None:
        self.counted: ExpertUse | None = None
        self._counter, self._store, self._records = counter, store, records
        self._read = self._written = -float("inf")  # when, by `time.monotonic`
        self._told = ExpertUse()  # what of it is in the records

    def look(self, closing: bool = False) -> None:
        """A request has ended, whose last token was waited for: so the counts are there; or the engine closes."""
        now = time.monotonic()
        if self._counter is None or not self._counter.tokens or not (closing or now - self._read >= READ_S):
            return
        self._read, self.counted = now, self._counter.read()
        if self._records is None or self._store is None or not (closing or now - self._written >= WRITE_S):
            return
        more = self.counted.tokens - self._told.tokens
        if more:
            chosen = {
                layer: [int(n) for n in counts - self._told.chosen.get(layer, np.zeros(len(counts)))]
                for layer, counts in self.counted.chosen.items()
            }
            if self._records.try_add_use(ServedUse(self._store, more, chosen, today())):
                self._told = self.counted
        self._written = now
