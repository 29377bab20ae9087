"""Records, written by a thread of their own: a step of a server does not wait for a disk, or for who locks the file."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import warnings

from qbe.records.expert_use import ServedUse
from qbe.records.record import Quality, Record
from qbe.records.store import RecordStore

MOST = 4096  # records that wait; more are dropped
CLOSE_S = 10.0  # of waiting for what is left, at the end: twice what a locked file costs


class RecordWriter:
    """Stands in for a store that records are written to. What waits at the process's end is written then, unless that
    is killed.

    Args:
        store: of the records; as `RecordStore.try_append`, it warns once and drops what it cannot write.
    """

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._queue: queue.Queue[Record | Quality | ServedUse | None] = queue.Queue(MOST)
        self._thread: threading.Thread | None = None
        self._full = False

    def try_append(self, record: Record) -> bool:
        """Write it soon; whether it waits for that now. Never waits itself."""
        return self._put(record)

    def try_set_quality(self, quality: Quality) -> bool:
        """The same of how an answer was scored, whose record it was given before."""
        return self._put(quality)

    def try_add_use(self, more: ServedUse) -> bool:
        """The same of what was counted of experts."""
        return self._put(more)

    def _put(self, record: Record | Quality | ServedUse) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="qbe-records", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if not self._full:
                self._full = True
                warnings.warn(
                    f"{MOST} records wait to be written; serving goes on without more", RuntimeWarning, stacklevel=2
                )
            return False
        return True

    def close(self) -> None:
        """Write what waits, for `CLOSE_S` at most, and close the file. Records may come again after it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self.close)
        end = time.monotonic() + CLOSE_S
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        thread.join(max(0.0, end - time.monotonic()))
        if not thread.is_alive():
            self._store.close()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            if isinstance(record, Record):
                self._store.try_append(record)
            elif isinstance(record, Quality):
                self._store.try_set_quality(record)
            else:
                self._store.try_add_use(record)
