"""A thread that brings slices to the device, one after the other, while steps run."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable

from qbe.residency.planner import Slice

_END_S = 10.0  # a disk that does not answer is not waited for longer


class Fetcher:
    """Fetches in the order in which it is asked.

    Args:
        load: brings one slice; raises OSError or MemoryError where it cannot.
    """

    def __init__(self, load: Callable[[Slice], None]) -> None:
        self._load = load
        self._asked: queue.SimpleQueue[Slice | None] = queue.SimpleQueue()
        self._done: deque[tuple[Slice, Exception | None]] = deque()
        self._thread = threading.Thread(target=self._run, name="qbe-residency", daemon=True)
        self._thread.start()

    def ask(self, slices: Iterable[Slice]) -> None:
        """Fetch these after what was asked before."""
        for one in slices:
            self._asked.put(one)

    def done(self) -> list[tuple[Slice, Exception | None]]:
        """What has come since the last call, or why it has not."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Ends the thread after what it is fetching."""
        while True:
            try:
                self._asked.get_nowait()
            except queue.Empty:
                break
        self._asked.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (one := self._asked.get()) is not None:
            error: Exception | None = None
            try:
                self._load(one)
            except (OSError, MemoryError) as failure:
                error = failure
            self._done.append((one, error))
