"""An engine as the kernel tuner sees it: whether a request runs, and graphs to renew."""

from __future__ import annotations

import threading

from qbe.engine.core import Core

LOCK_LIMIT_S = 0.05


class TunerHost:
    """See `qbe.kernels.tuning.tuner.Host`.

    Args:
        lock: the engine's; whoever submits a request or runs a step holds it.
        core: what it runs.
    """

    def __init__(self, lock: threading.RLock, core: Core) -> None:
        self._lock, self._core = lock, core

    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return self._core.has_work()

    def renew(self) -> bool:
        """Capture one decode step anew whose launches have better configurations now, unless a request runs.

        One that comes meanwhile waits for this one capture.

        Returns:
            whether there is still something to renew.
        """
        decode = self._core.runner.decode
        kind = None if decode is None else decode.outdated()
        if decode is None or kind is None:
            return False
        if self._lock.acquire(timeout=LOCK_LIMIT_S):
            try:
                if not self._core.has_work():
                    decode.recapture(kind)
            finally:
                self._lock.release()
        return decode.outdated() is not None
