"""Joules of steps, and of the answers in them.

A step costs the power of the moment times its seconds; idle time is nobody's. Its rows share that by their tokens times
the bytes that a token of theirs reads. Without a counter the power is an assumption, and the source is called `model`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from qbe.server.energy.meter import Meter

MODEL = "model"
_WINDOW_S = 0.5  # of busy time, over which power is measured; counters are coarser than steps
_GAP_S = 0.1  # without a step, after which a window begins anew
_CORE_W, _GPU_W = 5.0, 300.0  # assumed: of a busy core with its part of the memory, and of a busy GPU


def assumed_watts(device: torch.device) -> float:
    """Power of a busy device that nobody measures: an assumption."""
    return _GPU_W if device.type == "cuda" else _CORE_W * torch.get_num_threads()


class Spending:
    """Counts joules.

    Args:
        meter: the machine's counter; None: there is none.
        watts: what is assumed as long as nothing was measured.
        clock: seconds.

    Attributes:
        source: of `watts` now: the meter's, or `model`.
        total: joules of all steps.
    """

    def __init__(
        self, meter: Meter | None, watts: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._meter, self._assumed, self._clock = meter, watts, clock
        self._measured: float | None = None
        self._mark: tuple[float, float] | None = None  # begin of the window: time, joules
        self._ended = 0.0  # of the last step
        self.total = 0.0

    @property
    def source(self) -> str:
        """`nvml`, `rapl` or `model`."""
        return MODEL if self._meter is None or self._measured is None else self._meter.source

    @property
    def watts(self) -> float:
        """While steps run."""
        return self._assumed() if self._measured is None else self._measured

    def step(self, seconds: float, shares: Sequence[tuple[str, int]]) -> dict[str, float]:
        """A step has just ended: joules of each of its rows.

        Args:
            seconds: it took.
            shares: names of the rows and their parts, in any unit.
        """
        now = self._clock()
        if self._meter is not None:
            self._look(self._meter, now, now - seconds)
        self._ended = now
        joules = self.watts * seconds
        self.total += joules
        whole = sum(share for _, share in shares) or 1.0
        return {name: joules * share / whole for name, share in shares}

    def counter(self) -> float:
        """Joules that only rise, for an average power: the machine's, idle time included, or of the steps alone."""
        joules = None if self._meter is None else self._meter.joules()
        return self.total if joules is None else joules

    def _look(self, meter: Meter, now: float, began: float) -> None:
        if self._mark is not None and began - self._ended <= _GAP_S and now - self._mark[0] < _WINDOW_S:
            return
        joules = meter.joules()
        if joules is None:
            self._mark = self._measured = None
            return
        if self._mark is not None and began - self._ended <= _GAP_S and joules > self._mark[1]:
            self._measured = (joules - self._mark[1]) / (now - self._mark[0])
        self._mark = now, joules
