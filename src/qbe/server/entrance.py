"""How many requests begin in one turn of the event loop, so that a flood of them does not hold up what runs.

A request costs the loop about a millisecond before anybody knows who sends it, and asyncio would begin all that have
come at once. Here a few begin in each turn and the others wait in line: those that `qbe.server.door` takes for welcome
in one, the rest, who will hear a refusal, in another. After a turn its line pauses for as long as what it began took of
the processor, the rest nine times as long. So the welcome leave half of the loop to the answers that are being written,
and all others nine tenths of it: the engine's thread waits for Python's lock while the loop has it. In a line the keys,
or the addresses, take turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

STARTS = 16  # requests of a line in a turn
_WELCOME, _REST = 1.0, 9.0  # seconds of pause for each that a turn took
_MOST_S = 0.05  # of a turn, that count: what took longer was not its requests


class Line:
    """Requests that begin a few at a time.

    Args:
        pause: seconds until the next turn for each of a turn.
        clock: seconds of CPU time of the calling thread.
    """

    def __init__(self, pause: float, clock: Callable[[], float] = time.thread_time) -> None:
        self._factor, self._clock = pause, clock
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # of each sender, whose turn it is next first
        self._left = STARTS
        self._turning = self._measuring = False
        self._mark = self._owed = 0.0  # seconds of CPU time that are still to be paused for

    def enter(self, begin: Callable[[], None], sender: str) -> bool:
        """Whether a request may begin now; else `begin` is called when its turn has come."""
        if self._left and not self._waiting:
            self._left -= 1
            self._measure()
            return True
        self._waiting.setdefault(sender, deque()).append(begin)
        return False

    def _measure(self) -> None:
        if not self._measuring:
            self._measuring, self._mark = True, self._clock()
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._measured)  # behind the tasks of the requests that begin now

    def _measured(self) -> None:
        self._measuring = False
        self._owed += min(_MOST_S, self._clock() - self._mark)
        if not self._turning:
            self._turning = True
            self._pause()

    def _pause(self) -> None:
        seconds, self._owed = self._factor * self._owed, 0.0
        loop = asyncio.get_running_loop()
        # In an iteration of its own: where the loop was held, the timer is due in the one that reads what has come.
        loop.call_later(seconds, loop.call_soon, self._turn)

    def _turn(self) -> None:
        if self._owed:
            self._pause()
            return
        self._left, self._turning = STARTS, False
        if self._waiting:
            self._measure()
        while self._left and self._waiting:
            self._left -= 1
            self._next()()

    def _next(self) -> Callable[[], None]:
        sender = next(iter(self._waiting))
        requests = self._waiting.pop(sender)
        begin = requests.popleft()
        if requests:
            self._waiting[sender] = requests  # behind the others
        return begin


class Entrance:
    """Two lines for one event loop; used in its thread."""

    def __init__(self) -> None:
        self._welcome, self._rest = Line(_WELCOME), Line(_REST)

    def enter(self, begin: Callable[[], None], key: str | None, address: str) -> bool:
        """Whether a request may begin now; else `begin` is called when its turn has come.

        Args:
            key: the name of its key, if it is welcome.
            address: it comes from.
        """
        return self._rest.enter(begin, address) if key is None else self._welcome.enter(begin, key)
