"""Which waiting answer begins next: a queue for each tier, aged priorities, places kept free, batches apart or shared.
Of prompts, how much of a step they may take.

An answer's rank is the time until which its tier has patience: when it came plus the tier's `patience_s`. The lowest
rank goes first. So a tier with less patience overtakes, but only those who came up to the difference of the two before
it: whoever waits long enough is overtaken by nobody any more, whatever comes.
"""

from __future__ import annotations

import collections.abc
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from qbe.engine.chooser import Choice
from qbe.engine.result import Request
from qbe.engine.scheduling.sequence import Priority, Sequence
from qbe.server.admission import Admission
from qbe.server.errors import APIError
from qbe.server.settings import TIER_NAMES, Settings, TierName
from qbe.server.speed import Speed

if TYPE_CHECKING:
    from qbe.engine.scheduling.scheduler import Scheduler
    from qbe.server.exchange import EngineRequest


class TierQueues:
    """The order of a server's answers, as `qbe.engine.scheduling.scheduler.Scheduler.choose` and `prompt_tokens`.

    Args:
        settings: those in use now.
        places: answers that are written at once.
        tokens: of a step.
        clock: seconds, as in the ranks.
    """

    def __init__(
        self, settings: Callable[[], Settings], places: int, tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._places, self._tokens, self._clock = settings, places, tokens, clock

    def guide(self, scheduler: Scheduler) -> None:
        """Decide for this scheduler from now on."""
        scheduler.choose, scheduler.prompt_tokens = self.choose, self.prompt_tokens

    def prompt_tokens(self, sequence: Sequence) -> int:
        """Tokens of prompts that a step with this one's may have, so that higher tiers do not wait long for its end."""
        return max(1, int(self._settings().tiers.prompts(sequence.priority.tier) * self._tokens))

    def priority(self, tier: TierName, slack: float | None = None) -> Priority:
        """Where an answer that comes now stands.

        Args:
            slack: seconds that it may wait and still be done when its client wants it, where that is known. It counts
                as patience, but never as less than the next higher tier's: a wish buys no priority.
        """
        tiers, number = self._settings().tiers, TIER_NAMES.index(tier)
        patience = tiers.patience(tier)
        if slack is not None:
            above = tiers.patience(TIER_NAMES[number + 1]) if number + 1 < len(TIER_NAMES) else 0.0
            patience = min(patience, max(slack, above))
        return Priority(self._clock() + patience, tier)

    def choose(self, waiting: Collection[Sequence], running: list[Sequence]) -> Sequence | None:
        """The one that begins next; None while nobody may."""
        count = Counter(s.priority.tier for s in running)
        may = [s for s in waiting if self._has_place(s, count)]
        if not may:
            return None
        queues = self._settings().queues
        first = min(may, key=_rank)
        if not queues.apart or not running or count[first.priority.tier] < self._kept(first.priority.tier):
            return first
        # Batches of one tier: it goes on while nobody else has lost patience, and else runs dry.
        together = set(count)
        if sum(s.priority.tier in together for s in waiting) < queues.thin:
            together |= {near for tier in count for near in _adjacent(tier)}
        if first.priority.tier not in together and first.priority.rank <= self._clock():
            return None
        return min((s for s in may if s.priority.tier in together), key=_rank, default=None)

    def _has_place(self, sequence: Sequence, running: Counter[str]) -> bool:
        """Whether a place is free that is not kept for a higher tier."""
        above = TIER_NAMES[TIER_NAMES.index(sequence.priority.tier) + 1 :]
        kept = sum(max(0, self._kept(tier) - running[tier]) for tier in above)
        return running.total() + kept < self._places

    def _kept(self, tier: str) -> int:
        return math.floor(self._settings().tiers.reserved(tier) * self._places)


def stand(
    asked: EngineRequest, request: Request, choice: Choice, queues: TierQueues, admission: Admission, speed: Speed,
    line: collections.abc.Sequence[Priority] | None,
) -> Priority:  # fmt: skip
    """Where the answers to a prompt stand in line.

    Args:
        line: places of the answers that wait; None while nobody has to.

    Raises:
        APIError: its time will be over before it begins.
    """
    latency, tier = asked.terms.contract.max_latency_ms, asked.terms.tier
    if latency is None:
        return queues.priority(tier)
    tokens, chosen = choice
    bits = chosen.blueprint.average_weight_bits(chosen.table)
    takes = speed.foreseen(len(tokens), request.params.max_tokens, bits)
    priority = queues.priority(tier, None if takes is None else max(0.0, latency - takes) / 1e3)
    ahead = 0 if line is None else 1 + sum(p.rank <= priority.rank for p in line)
    wait = admission.wait(ahead)
    if wait is not None and wait * 1e3 > latency:
        raise APIError(
            429, f"qbe.max_latency_ms is {latency:g}, but {ahead} answers are ahead and take about {wait:.1f} s: allow "
            "more time, or try again later", param="qbe.max_latency_ms", code="deadline",
            retry_after=wait - latency / 1e3,
        )  # fmt: skip
    return priority


def _rank(sequence: Sequence) -> float:
    return sequence.priority.rank


def _adjacent(tier: str) -> tuple[TierName, ...]:
    number = TIER_NAMES.index(tier)
    return TIER_NAMES[max(0, number - 1) : number + 2]
