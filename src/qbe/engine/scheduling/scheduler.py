"""Which tokens run in the next step: continuous batching (Orca, Yu et al. 2022) with chunked prefill. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from qbe.blueprint import Blueprint
from qbe.engine.context_limit import check_length
from qbe.engine.scheduling.paging import Paging, average_bits
from qbe.engine.scheduling.sequence import Sequence, Status
from qbe.errors import QBEError
from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kvcache.allocator import PageAllocator, PageFormat
from qbe.kvcache.state_slots import StateSlots


@dataclass(frozen=True)
class ScheduledTokens:
    """Tokens `[start, start + count)` of a sequence, to run in one step.

    Those of a sequence that speculates may be draft tokens (`qbe.engine.speculation.speculator`), one row each.

    draft: what a row that makes the next draft token runs at; None: what its sequence does.
    """

    sequence: Sequence
    start: int
    count: int
    draft: Blueprint | None = None

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the sequence's last or a draft token, so that its logits give a new
        token."""
        return self.start + self.count >= len(self.sequence.token_ids)

    @property
    def certain(self) -> bool:
        """Whether these tokens are computed for good by this step."""
        return self.draft is None and self.start < len(self.sequence.token_ids)

    @property
    def token(self) -> int:
        """The token of a row: the sequence's, or a draft token."""
        token_ids, speculation = self.sequence.token_ids, self.sequence.speculation
        if self.start < len(token_ids) or speculation is None:
            return token_ids[self.start]
        return speculation.draft_tokens[self.start - len(token_ids)]

    @property
    def blueprint(self) -> Blueprint:
        """What a row runs at."""
        return self.draft or self.sequence.blueprint_at(self.start)

    @property
    def kept(self) -> range:
        """The positions whose logits are wanted."""
        end, scoring = self.start + self.count, self.sequence.sampling.scoring
        first = end - self.samples
        return range(first if scoring is None else min(first, max(self.start, scoring.start)), end)


class Scheduler:
    """First come, first served, unless ranks say otherwise; sequences that are writing go before prompts, so they never
    wait for a long one.

    A sequence is admitted when its present tokens fit in the KV cache and takes pages as it grows. When there are none
    left, the youngest sequence of the highest rank is preempted: it gives its pages up and later computes them again.
    The oldest one of the lowest rank always goes on, because no request is taken that would not fit alone.

    The routers of one policy run at a time. A sequence that needs others than those of the running ones waits until
    these have ended. Only sequences without routers overtake it, and those of the running ones' routers that had
    come before its turn did: routers are seldom exchanged where both kinds wait, and nobody is overtaken for ever.

    Args:
        allocator: the pages.
        max_batch_tokens: tokens of one step.
        max_sequences: sequences that run at the same time, at most `max_batch_tokens`.
        context: the model's context in tokens; None when it has no limit.
        paged: whether the model has attention layers and so needs pages.
        chunked: whether a prompt may be spread over steps. A prompt that may not can exceed `max_batch_tokens`.
        reusable: whether a page's contents depend on the tokens before it alone, so that sequences may share it.
        slots: one for the states of each sequence that runs; None where the model has no recurrent layers.
        format_of: the format of a sequence's page of this number; by default 16 bits.

    Attributes:
        paging: gives the sequences their pages.
        choose: which of those that wait is admitted next, beside those that run; None: nobody now. Not called when
            nobody waits.
        prompt_tokens: of prompts that a step may have if this sequence's prompt is in it. A step cannot be interrupted,
            so this is how long whoever comes meanwhile may have to wait.
        rests: called before a step; says which of the running and waiting sequences are left out of it.
        last_to_yield: of those that run the one with the highest gives its pages up when there are none; its rank.
        yields: whether the first gives its pages up so that the second one can begin: never.
        oversized: sequences that ended because even alone they no longer fit.
        last: the work of the last step that has run, for whoever counts.
        preempted: how often a sequence was.

    Raises:
        QBEError: sizes that do not fit together.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        context: int | None,
        paged: bool = True,
        chunked: bool = True,
        reusable: bool = True,
        slots: StateSlots | None = None,
        format_of: Callable[[Sequence, int], PageFormat] | None = None,
    ) -> None:
        if not 1 <= max_sequences <= max_batch_tokens:
            raise QBEError(
                f"max_sequences is {max_sequences}: give 1 or more, at most max_batch_tokens ({max_batch_tokens})"
            )
        self.allocator = allocator
        self.max_batch_tokens, self.max_sequences, self.context = max_batch_tokens, max_sequences, context
        self.paged, self.chunked, self.slots = paged, chunked, slots
        self.paging = Paging(allocator, chunked, reusable and paged, format_of or (lambda *_: allocator.full))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of their arrival
        self.choose: Callable[[Collection[Sequence], list[Sequence]], Sequence | None]
        self.choose = lambda waiting, _: next(iter(waiting))
        self.prompt_tokens: Callable[[Sequence], int] = lambda _: max_batch_tokens
        self.rests: Callable[[], Callable[[Sequence], bool]] = lambda: _nobody
        self.last_to_yield: Callable[[Sequence], Any] = _rank
        self.yields: Callable[[Sequence, Sequence], bool] = lambda *_: False
        self.oversized: list[Sequence] = []
        self.last: list[ScheduledTokens] = []
        self.preempted = 0
        self._by_id: dict[str, Sequence] = {}
        self._preempted = False  # in the step that is being scheduled
        self._rests: Callable[[Sequence], bool] = _nobody

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            QBEError: a name in use, an empty prompt, a prompt longer than the context, or more tokens than the cache
                can ever hold.
        """
        prompt = len(sequence.prompt_ids)
        if sequence.request_id in self._by_id:
            raise QBEError(f"a request '{sequence.request_id}' is already running: give each request its own id")
        if not prompt:
            raise QBEError("the prompt is empty: give at least one token", field="prompt")
        if self.context is not None:
            check_length(prompt, self.context)
        length = self.length(sequence)
        if self.paged and (most := self.paging.capacity(sequence)) < length:
            raise QBEError(
                f"{prompt} prompt tokens and up to {length - prompt} new ones do not fit in the KV cache, which holds "
                f"{most} tokens at this request's KV bits: lower max_tokens or raise kv_tokens",
                field="max_tokens",
            )
        sequence.max_length = length
        sequence.status = Status.WAITING
        self._by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def length(self, sequence: Sequence) -> int:
        """Tokens that a sequence can come to have."""
        length = len(sequence.prompt_ids) + sequence.params.max_tokens
        return length if self.context is None else min(length, self.context)

    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._by_id)

    def get(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that name, if there is one."""
        return self._by_id.get(request_id)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Take a sequence out and free its pages at once."""
        del self._by_id[sequence.request_id]
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        if reason == "error":  # nobody else shall find what went wrong in it
            self.allocator.forget(sequence.pages)
        if sequence.pages:
            sequence.paging.average_kv_bits = average_bits(sequence)
        self.paging.release(sequence)
        sequence.sampling.seen = None
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def restart(self, sequence: Sequence) -> None:
        """Free a sequence's pages; its tokens must be computed again."""
        self.paging.release(sequence)
        sequence.computed = 0

    def schedule(self) -> list[ScheduledTokens]:
        """The next step's work; nobody rests where those who do not cannot run."""
        self._preempted, self._rests = False, self.rests()
        if work := _running(self._fill()):
            return work
        self._rests = _nobody
        return _running(self._fill())

    def _fill(self) -> list[ScheduledTokens]:
        """Sequences with a single token to run first, then chunks of prompts."""
        work: list[ScheduledTokens] = []
        for sequence in [s for s in self.running if s.remaining == 1 and not self._rests(s)]:
            if self._grow(sequence, sequence.computed + 1):
                work.append(ScheduledTokens(sequence, sequence.computed, 1))
        work = _running(work)
        budget, read = self.max_batch_tokens - len(work), 0
        prompts = sorted((s for s in self.running if s.remaining > 1 and not self._rests(s)), key=_rank)
        while True:
            if budget > 0:
                self._admit(prompts, read)
            if not prompts:
                return work
            sequence = prompts.pop(0)
            count = sequence.remaining - sequence.last_alone
            if self.chunked:
                count = min(count, budget, self.prompt_tokens(sequence) - read)
                if count <= 0 < budget:
                    continue  # whoever has less patience may still have room
            elif count > budget and any(w.count > 1 for w in work):
                return work  # a prompt too long for the step is the only prompt of its step
            if count <= 0:
                return work
            if count := self._grow(sequence, sequence.computed + count):
                work.append(ScheduledTokens(sequence, sequence.computed, count))
                budget, read = budget - count, read + count

    def complete(self, work: list[ScheduledTokens]) -> None:
        """The step has run: pages that it filled are quantised, and others may find them."""
        self.last = work
        for w in work:
            self.paging.complete(w.sequence, w.start)

    def _grow(self, sequence: Sequence, end: int) -> int:
        """Pages for the tokens `[computed, end)`; returns how many of them may run: 0 if the sequence was preempted."""
        if sequence.status is not Status.RUNNING:
            return 0
        if not self.paged:
            return end - sequence.computed
        if sequence.paging.alone_at and self.chunked:
            # The staging pages of several pages at once would lie scattered between what is quantised before they are.
            end = min(end, (sequence.computed // PAGE_SIZE + 1) * PAGE_SIZE)
        while True:
            if self.paging.write(sequence, end):
                return end - sequence.computed
            room = len(sequence.pages) * PAGE_SIZE
            if self.chunked and room > sequence.computed and self.paging.write(sequence, room):
                return room - sequence.computed
            if self.running == [sequence]:
                # Alone it fits, if its pages do not lie scattered between those that have gone, or if its bits were not
                # raised meanwhile: it begins again in a memory that is all free, once, and takes one page at a time.
                if sequence.paging.alone_at == len(sequence.token_ids):
                    sequence.error = (
                        f"{len(sequence.token_ids)} tokens do not fit in the KV cache at the bits that they have now: "
                        "lower the KV bits or raise kv_tokens"
                    )
                    self.oversized.append(sequence)
                    self.finish(sequence, "error")
                    return 0
                sequence.paging.alone_at = len(sequence.token_ids)
                self._preempt(sequence)
                while self.allocator.evict():
                    pass
                return 0
            victim = max(reversed(self.running), key=self.last_to_yield)
            self._preempt(victim)
            if victim is sequence:
                return 0

    def _stop(self, sequence: Sequence) -> None:
        """It runs no more: its states are given up."""
        self.running.remove(sequence)
        if self.slots is not None and sequence.state_slot is not None:
            self.slots.give(sequence.state_slot)
        sequence.state_slot = None

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether what it needs for its present tokens is free."""
        slots = self.slots is None or self.slots.fits(sequence.blueprint.state_bits)
        few = self.paged and bool(self.running) and self.paging.needs(sequence) > self.allocator.free_bytes
        return slots and not few

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self.restart(sequence)
        sequence.status, sequence.preemptions = Status.WAITING, sequence.preemptions + 1
        self.waiting.appendleft(sequence)
        self._preempted, self.preempted = True, self.preempted + 1

    def _admit(self, prompts: list[Sequence], read: int) -> None:
        """Move the next waiting sequence to the running ones and to the front of the prompts, if there is room for it,
        also beside the `read` tokens of prompts that the step has, and no prompt goes before it."""
        if not self.waiting or len(self.running) >= self.max_sequences or self._preempted:
            return
        waiting = [s for s in self.waiting if not self._rests(s)]
        sequence = self._next(waiting) if waiting else None
        if sequence is not None and self.chunked and self.prompt_tokens(sequence) <= read:
            # Its prompt has to wait for a step of its own; others may go before it, unless nobody may go at all.
            rest = [s for s in waiting if self.prompt_tokens(s) > read]
            sequence = self._next(rest) if rest else None
        if sequence is None or (prompts and _rank(prompts[0]) <= _rank(sequence)):
            return
        while not self._has_room(sequence):
            victim = max(reversed(self.running), key=self.last_to_yield)
            if not self.yields(victim, sequence):
                return
            self._preempt(victim)
            if victim in prompts:
                prompts.remove(victim)
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.state_slot = None if self.slots is None else self.slots.take(sequence.blueprint.state_bits)
        self.running.append(sequence)
        prompts.insert(0, sequence)
        self.paging.begin(sequence)

    def _next(self, waiting: Collection[Sequence]) -> Sequence | None:
        """Whose turn it is; while other routers run than it needs, who may go before it."""
        first, dynamic_precision = self.choose(waiting, self.running), {s.routers for s in self.running} - {""}
        if first is None or not dynamic_precision or first.routers in {"", *dynamic_precision}:
            return first
        if first.before is None:
            first.before = frozenset(self._by_id)
        before = first.before
        may = [s for s in waiting if not s.routers or (s.routers in dynamic_precision and s.request_id in before)]
        return self.choose(may, self.running) if may else None


def _nobody(_: Sequence) -> bool:
    return False


def _rank(sequence: Sequence) -> float:
    return sequence.priority.rank


def _running(work: list[ScheduledTokens]) -> list[ScheduledTokens]:
    """The work of those that were not preempted after they got it."""
    return [w for w in work if w.sequence.status is Status.RUNNING]
