"""How the answers in kept places stay fast: steps that they have to themselves, in turn with those that all share.

A row of a batch waits for all others. An answer in a kept place may take `FACTOR` times what it takes alone: steps of
its own earn time, shared steps, where they are slower than that, spend it. So others get the rest of the time, and as
many of the steps as cost nothing.
"""

from __future__ import annotations

FACTOR = 1.3
_FADE = 0.8  # of the seconds of steps
_SAVED = 4  # shared steps, that time is earned for
_AGAIN = 32  # shared steps after which the time alone is measured anew


class Turns:
    """Decides for each step; asked in the engine's thread."""

    def __init__(self) -> None:
        self._kind = ""  # of the step that runs: "alone", "shared", "idle" without others, "" without kept ones
        self._reading = False
        self._alone: float | None = None  # seconds of a step in which kept answers write, without others
        self._shared: float | None = None  # and with them
        self._credit, self._since, self._timed = 0.0, 0, False

    def begin(self, kept: bool, others: bool, reading: bool) -> bool:
        """A step begins: whether it is for the kept answers alone.

        Args:
            kept: whether anybody is in a kept place, or about to be.
            others: whether anybody else does or waits.
            reading: whether a prompt of the kept ones is not through.
        """
        if not kept:
            self._kind, self._credit = "", 0.0
            return False
        alone = others and self._timed and self._pays(reading)
        self._kind = "alone" if alone else "shared" if others else "idle"
        self._reading = reading
        return alone

    def _pays(self, reading: bool) -> bool:
        if self._alone is None or self._since >= _AGAIN:
            return not reading or self._credit <= 0
        if self._shared is None:
            return False
        allowed = 0.0 if reading else FACTOR * self._alone
        return self._credit < self._shared - allowed

    def stepped(self, seconds: float, kept: bool) -> None:
        """It took so long; `kept`: with any of the kept ones in it."""
        self._timed = kept or self._kind != "alone"  # if those it was for could not run, the next one is for all
        if not kept:
            return
        if self._kind in ("alone", "idle"):
            if self._kind == "alone":
                most = _SAVED * (self._shared or seconds)
                self._credit = min(most, self._credit + (FACTOR - 1) * seconds)
            if not self._reading:
                self._alone, self._since = _mean(self._alone, seconds), 0
        elif self._kind == "shared":
            self._since += 1
            self._credit -= max(0.0, seconds - FACTOR * (self._alone or seconds))
            self._shared = _mean(self._shared, seconds)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else _FADE * before + (1 - _FADE) * now
