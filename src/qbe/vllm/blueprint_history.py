"""Which blueprint each token of a request has: a refresh changes that of the tokens to come, never of those before.

Scheduler and workers keep it alike. What a preemption made vLLM forget is computed again as it was, so that an answer
does not depend on who else was there, and a block of the KV cache keeps its name.
"""

from __future__ import annotations

from qbe.blueprint import Blueprint


class BlueprintHistory:
    """The blueprints of one request, by position.

    Attributes:
        first: that of its prompt.
    """

    def __init__(self, first: Blueprint) -> None:
        self.first = first
        self._parts: list[tuple[int, Blueprint]] = [(0, first)]  # first position; ascending

    @property
    def last(self) -> Blueprint:
        """That of the tokens to come."""
        return self._parts[-1][1]

    def change(self, start: int, blueprint: Blueprint) -> None:
        """Tokens from position `start` on, which is after all changes before, have this blueprint."""
        self._parts.append((start, blueprint))

    def runs(self, start: int, count: int) -> list[tuple[Blueprint, int]]:
        """The blueprints of the tokens `[start, start + count)` in order, and how many tokens each has."""
        ends = [at for at, _ in self._parts[1:]] + [start + count]
        found = []
        for (at, blueprint), end in zip(self._parts, ends, strict=True):
            tokens = min(end, start + count) - max(at, start)
            if tokens > 0:
                found.append((blueprint, tokens))
        return found
