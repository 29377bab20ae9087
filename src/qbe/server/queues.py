"""Which waiting answer begins next: a queue for each tier, aged priorities, places kept free, batches apart or shared.
Of prompts, how much of a step they may take. Who rests in a step, and who gives its pages up.

An answer's rank is the time until which its tier has patience: when it came plus the tier's `patience_s`. The tier with
the lowest rank goes first, and of it the key that has had least (`qbe.server.fair`). So a tier with less patience
overtakes, but only those who came up to the difference of the two before it: a tier that waits long enough is overtaken
by none any more, whatever comes.

Answers of a tier that has places kept for it are as many as those, or one, `kept`: others rest in steps of their own
(`qbe.server.turns`), read prompts in short pieces meanwhile, and give their pages up to them.
"""

from __future__ import annotations

import collections.abc
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qbe.engine.request_selector import Choice
from qbe.engine.result import Request
from qbe.engine.scheduling.sequence import Priority, Sequence
from qbe.server.admission import Admission
from qbe.server.errors import APIError
from qbe.server.fair import Shares
from qbe.server.job import Job
from qbe.server.keys import Client
from qbe.server.settings import TIER_NAMES, Settings, TierName
from qbe.server.speed import Speed
from qbe.server.tier_order import Range
from qbe.server.turns import Turns

_PIECE_TOKENS = 64  # of others' prompts in a step beside a kept answer, and the least at any time
_PIECE_S = 0.25  # that prompts may hold up whoever comes to a kept place, as far as is known
_FADE = 0.8

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
        self._shares, self._turns = Shares(), Turns()
        self._kept: frozenset[Sequence] = frozenset()  # the answers that others rest for
        self._scheduler: Scheduler | None = None
        self._token_s: float | None = None  # of a prompt's token

    def guide(self, scheduler: Scheduler) -> None:
        """Decide for this scheduler from now on."""
        self._scheduler = scheduler
        scheduler.choose, scheduler.prompt_tokens = self.choose, self.prompt_tokens
        scheduler.rests, scheduler.yields, scheduler.last_to_yield = self.rests, self.yields, self.last_to_yield

    def prompt_tokens(self, sequence: Sequence) -> int:
        """Tokens of prompts that a step with this one's may have, so that higher tiers do not wait long for its end."""
        most = max(1, int(self._settings().tiers.prompts(sequence.priority.tier) * self._tokens))
        if sequence in self._kept or not self._above(sequence.priority.tier):
            return most
        if self._kept:
            return min(most, _PIECE_TOKENS)
        return most if not self._token_s else min(most, max(_PIECE_TOKENS, int(_PIECE_S / self._token_s)))

    def rests(self) -> Callable[[Sequence], bool]:
        """Who does not run in the step that begins."""
        assert self._scheduler is not None
        running, waiting = self._scheduler.running, self._scheduler.waiting
        self._kept = frozenset(self._first_kept(running, waiting))
        others = len(self._kept) < len(running) + len(waiting)
        if not self._turns.begin(bool(self._kept), others, any(s.remaining > 1 for s in self._kept)):
            return lambda _: False
        return lambda s: s not in self._kept and s.speculation is None  # whose draft tokens are checked in their turn

    def _first_kept(self, running: Collection[Sequence], waiting: Collection[Sequence]) -> list[Sequence]:
        kept: list[Sequence] = []
        for tier in TIER_NAMES[1:]:
            if self._settings().tiers.reserved(tier):
                line = sorted((s for s in waiting if s.priority.tier == tier), key=_rank)
                kept += [*(s for s in running if s.priority.tier == tier), *line][: max(1, self._places_of(tier))]
        return kept

    def stepped(self, seconds: float) -> None:
        """A step has taken so long."""
        if self._scheduler is not None:
            self._turns.stepped(seconds, any(w.sequence in self._kept for w in self._scheduler.last))
        read = 0 if self._scheduler is None else sum(w.count for w in self._scheduler.last if w.count > 1)
        if read >= _PIECE_TOKENS:
            each = seconds / read
            self._token_s = each if self._token_s is None else _FADE * self._token_s + (1 - _FADE) * each

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        """Whether the first gives its pages up so that the second can begin."""
        return waiting in self._kept and running not in self._kept and _level(running) < _level(waiting)

    def last_to_yield(self, sequence: Sequence) -> Any:
        """Who has the highest gives its pages up first."""
        return sequence not in self._kept, sequence.priority.rank

    def priority(self, tier: TierName, slack: float | None = None, client: Client | None = None) -> Priority:
        """Where an answer that comes now stands.

        Args:
            client: whose it is.
            slack: seconds that it may wait and still be done when its client wants it, where that is known. It counts
                as patience, but never as less than the next higher tier's: a wish buys no priority.
        """
        tiers, number = self._settings().tiers, TIER_NAMES.index(tier)
        patience = tiers.patience(tier)
        if slack is not None:
            above = tiers.patience(TIER_NAMES[number + 1]) if number + 1 < len(TIER_NAMES) else 0.0
            patience = min(patience, max(slack, above))
        if client is not None and client.line:  # behind whoever waits for an answer, until its window is over
            patience = max(patience, client.window_s)
        key, weight = ("", 1.0) if client is None else (client.queue, 1.0 if client.key is None else client.key.weight)
        return Priority(self._clock() + patience, tier, key, weight)

    def choose(self, waiting: Collection[Sequence], running: list[Sequence]) -> Sequence | None:
        """The one that begins next; None while nobody may."""
        assert self._scheduler is not None
        self._shares.look(self._scheduler.waiting, running)  # whoever may not begin now has not gone away
        count = Counter(s.priority.tier for s in running)
        may = [s for s in waiting if self._has_place(s, count)]
        if not may:
            return None
        queues = self._settings().queues
        first = self._shares.first(may)
        if not queues.apart or not running or count[first.priority.tier] < self._places_of(first.priority.tier):
            return first
        # Batches of one tier: it goes on while nobody else has lost patience, and else runs dry.
        together = set(count)
        if sum(s.priority.tier in together for s in waiting) < queues.thin:
            together |= {near for tier in count for near in _adjacent(tier)}
        if first.priority.tier not in together and first.priority.rank <= self._clock():
            return None
        may = [s for s in may if s.priority.tier in together]
        return self._shares.first(may) if may else None

    def _has_place(self, sequence: Sequence, running: Counter[str]) -> bool:
        """Whether a place is free that is not kept for a higher tier."""
        above = TIER_NAMES[_level(sequence) + 1 :]
        kept = sum(max(0, self._places_of(tier) - running[tier]) for tier in above)
        return running.total() + kept < self._places

    def _above(self, tier: str) -> bool:
        """Whether a higher tier has places kept for it."""
        return any(self._settings().tiers.reserved(t) for t in TIER_NAMES[TIER_NAMES.index(tier) + 1 :])

    def _places_of(self, tier: str) -> int:
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
        return queues.priority(tier, client=asked.client)
    tokens, chosen = choice
    bits = chosen.blueprint.average_weight_bits(chosen.table)
    takes = speed.foreseen(len(tokens), request.params.max_tokens, bits)
    priority = queues.priority(tier, None if takes is None else max(0.0, latency - takes) / 1e3, asked.client)
    ahead = 0 if line is None else 1 + sum(p.rank <= priority.rank for p in line)
    wait = admission.wait(ahead)
    if wait is not None and wait * 1e3 > latency:
        raise APIError(
            429, f"qbe.max_latency_ms is {latency:g}, but {ahead} answers are ahead and take about {wait:.1f} s: allow "
            "more time, or try again later", param="qbe.max_latency_ms", code="deadline",
            retry_after=wait - latency / 1e3,
        )  # fmt: skip
    return priority


def in_order(asked: EngineRequest, admission: Admission, count: int) -> EngineRequest:
    """The same with bits that keep the order of the tiers, unless it bounds them itself."""
    terms = asked.terms
    if terms.bounded:
        return asked
    range_ = admission.order.within(terms.tier, terms.tier_range, terms.tier_settings.bits[1])
    admission.order.enter(terms.tier, range_, count)
    return replace(asked, terms=replace(terms, within=range_))


def keep_in_order(asked: EngineRequest, choice: Choice, admission: Admission) -> tuple[Choice, Range | None]:
    """The same, with what the query's own score gives where the bits that its conversation keeps would turn the order
    of the tiers around, unless the server's health asks for them; and the range that its answers have in that order, if
    they are in it.
    """
    (ids, chosen), found = choice, asked.terms.within
    if found is None or chosen.held or chosen.asked is None or chosen.asked.weight_bits == chosen.blueprint.weight_bits:
        return choice, found
    kept = admission.order.keep(asked.terms.tier, found, chosen.average_bits, asked.n)
    return ((ids, chosen.as_asked), found) if kept is None else (choice, kept)


def withdraw(asked: EngineRequest, jobs: collections.abc.Sequence[Job], admission: Admission, count: int) -> None:
    """All `count` answers of a request that does not begin leave, those of `jobs` with the ranges that they have."""
    tier = asked.terms.tier
    for job in jobs:
        admission.leave(len(job.requests), tier, 0, asked.client, job.within)
    rest = count - sum(len(job.requests) for job in jobs)
    if rest:
        admission.leave(rest, tier, 0, asked.client, asked.terms.within)


def _rank(sequence: Sequence) -> float:
    return sequence.priority.rank


def _level(sequence: Sequence) -> int:
    return TIER_NAMES.index(sequence.priority.tier)


def _adjacent(tier: str) -> tuple[TierName, ...]:
    number = TIER_NAMES.index(tier)
    return TIER_NAMES[max(0, number - 1) : number + 2]
