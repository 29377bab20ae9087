"""Which blueprint each token of a request has: a refresh changes that of the tokens to come, never of those before.

Whoever runs a request keeps it: the engine, and vLLM's scheduler and workers alike. What a preemption made them forget
is computed again as it was, so that an answer does not depend on who else was there, and a block of the KV cache keeps
its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qbe.blueprint import Blueprint


@dataclass
class BlueprintHistory:
    """The blueprints of one request, by position.

    Attributes:
        last: that of the tokens to come.
        earlier: those before it, in order, each with the position up to which tokens have it.
        prefix: likewise of its first tokens, where those were computed by requests with more bits, on whose pages it
            began. Its own blueprints begin after them.
    """

    last: Blueprint
    earlier: list[tuple[int, Blueprint]] = field(default_factory=list)
    prefix: list[tuple[int, Blueprint]] = field(default_factory=list)

    @property
    def first(self) -> Blueprint:
        """That of the prompt, as far as it is its own."""
        return self.earlier[0][1] if self.earlier else self.last

    def change(self, start: int, blueprint: Blueprint) -> None:
        """Tokens from position `start` on, which is not before any change so far, have this blueprint."""
        self.earlier.append((start, self.last))
        self.last = blueprint

    def at(self, position: int) -> Blueprint:
        """That of the token at this position."""
        if self.prefix and position < self.prefix[-1][0]:
            return next(blueprint for end, blueprint in self.prefix if position < end)
        if not self.earlier:
            return self.last
        return next((blueprint for end, blueprint in self.earlier if position < end), self.last)

    def spans(self, start: int, end: int) -> list[tuple[Blueprint, int]]:
        """Its own blueprints in order, and how many of the tokens `[start, end)` have each; 0 where none has. Those of
        the prefix count as its own, which they do for whoever asks what it was owed.
        """
        ends = [min(max(start, position), end) for position, _ in self.earlier] + [max(start, end)]
        blueprints = [*(blueprint for _, blueprint in self.earlier), self.last]
        return [(b, stop - begin) for b, begin, stop in zip(blueprints, [start, *ends], ends, strict=False)]

    def written(self, end: int) -> list[tuple[Blueprint, int]]:
        """At what the first `end` tokens were computed, whoever did it, in order, and how many tokens each."""
        found, start = [], 0
        for stop, blueprint in [*self.prefix, (end, self.first)]:
            if (tokens := min(stop, end) - start) > 0:
                found.append((blueprint, tokens))
                start += tokens
        return found

    def runs(self, start: int, count: int) -> list[tuple[Blueprint, int]]:
        """The blueprints of the tokens `[start, start + count)` in order, and how many tokens each has."""
        return [(blueprint, tokens) for blueprint, tokens in self.spans(start, start + count) if tokens]
