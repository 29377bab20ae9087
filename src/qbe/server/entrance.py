"""How many requests begin in one turn of the event loop, so that a flood of them does not hold up what runs.

A request costs the loop about a millisecond before anybody knows who sends it, and asyncio would begin all that have
come at once. Here a few begin in each turn and the others wait in line: connections whose last request had a key in
one, the rest in another. Between turns as much time passes as the last one took of the processor, which leaves half of
the loop to the answers that are being written, whatever comes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

STARTS = 16  # requests of each line in a turn
_PAUSE_S = 0.05  # between turns, at most


class Entrance:
    """Two lines for one event loop; used in its thread.

    Args:
        clock: seconds of CPU time of the calling thread.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._lines: tuple[deque[Callable[[], None]], ...] = (deque(), deque())
        self._left = [STARTS, STARTS]
        self._turning = False
        self._mark = 0.0

    def enter(self, begin: Callable[[], None], known: bool) -> bool:
        """Whether a request may begin now; else `begin` is called when its turn has come.

        Args:
            known: whether its connection's last request had a key.
        """
        if not self._turning:
            self._turning, self._mark = True, self._clock()
            asyncio.get_running_loop().call_soon(self._pause)
        number = 0 if known else 1
        if self._left[number] and not self._lines[number]:
            self._left[number] -= 1
            return True
        self._lines[number].append(begin)
        return False

    def _pause(self) -> None:
        now = self._clock()
        spent, self._mark = now - self._mark, now
        loop = asyncio.get_running_loop()
        # In an iteration of its own: where the loop was held, the timer is due in the one that reads what has come.
        loop.call_later(min(_PAUSE_S, spent), loop.call_soon, self._turn)

    def _turn(self) -> None:
        if not any(self._lines) and self._left == [STARTS, STARTS]:
            self._turning = False
            return
        for number, line in enumerate(self._lines):
            count = min(STARTS, len(line))
            self._left[number] = STARTS - count
            for _ in range(count):
                line.popleft()()
        self._pause()
