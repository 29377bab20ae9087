"""Which tokens run in the next step: continuous batching (Orca, Yu et al. 2022) with chunked prefill. No torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from qbe.engine.sequence import Sequence, Status
from qbe.errors import QBEError
from qbe.kvcache.pages import PAGE_SIZE, PageAllocator, pages_for


@dataclass(frozen=True)
class Work:
    """Tokens `[start, start + count)` of a sequence, to run in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the sequence's last, so that its logits give a new token."""
        return self.start + self.count == len(self.sequence.token_ids)


class Scheduler:
    """First come, first served; sequences that are writing go before prompts, so they never wait for a long one.

    A sequence is admitted when pages for the longest it can become are free, so a running one never runs out.

    Args:
        allocator: the pages.
        max_batch_tokens: tokens of one step.
        max_sequences: sequences that run at the same time, at most `max_batch_tokens`.
        context: the model's context in tokens; None when it has no limit.
        paged: whether the model has attention layers and so needs pages.
        chunked: whether a prompt may be spread over steps. A prompt that may not can exceed `max_batch_tokens`.

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
    ) -> None:
        if not 1 <= max_sequences <= max_batch_tokens:
            raise QBEError(
                f"max_sequences is {max_sequences}: give 1 or more, at most max_batch_tokens ({max_batch_tokens})"
            )
        self.allocator = allocator
        self.max_batch_tokens, self.max_sequences, self.context = max_batch_tokens, max_sequences, context
        self.paged, self.chunked = paged, chunked
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a request.

        Raises:
            QBEError: a name in use, an empty prompt, a prompt longer than the context, or more tokens than the cache
                can ever hold.
        """
        prompt, wanted = len(sequence.prompt_ids), sequence.params.max_tokens
        if sequence.request_id in self._by_id:
            raise QBEError(f"a request '{sequence.request_id}' is already running: give each request its own id")
        if not prompt:
            raise QBEError("the prompt is empty: give at least one token")
        if self.context is not None and prompt >= self.context:
            raise QBEError(
                f"the prompt has {prompt} tokens, but the model's context is {self.context} with the answer: shorten it"
            )
        length = prompt + wanted if self.context is None else min(prompt + wanted, self.context)
        if self.paged and pages_for(length) > self.allocator.num_pages:
            raise QBEError(
                f"{prompt} prompt tokens and up to {length - prompt} new ones do not fit in the KV cache of "
                f"{self.allocator.num_pages * PAGE_SIZE} tokens: lower max_tokens or raise kv_tokens"
            )
        sequence.max_length = length
        sequence.status = Status.WAITING
        self._by_id[sequence.request_id] = sequence
        self.waiting.append(sequence)

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
            self.running.remove(sequence)
            self.allocator.release(sequence.pages)
        else:
            self.waiting.remove(sequence)
        sequence.pages, sequence.block_table, sequence.recurrent, sequence.seen = [], None, None, None
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def schedule(self) -> list[Work]:
        """The next step's work: sequences with a single token to run first, then chunks of prompts."""
        work = [Work(s, s.computed, 1) for s in self.running if s.remaining == 1]
        budget = self.max_batch_tokens - len(work)
        prompts = [s for s in self.running if s.remaining > 1]
        while True:
            if not prompts and (budget <= 0 or not self._admit(prompts)):
                return work
            sequence = prompts.pop(0)
            count = sequence.remaining
            if self.chunked:
                count = min(count, budget)
            elif count > budget and any(w.count > 1 for w in work):
                return work  # a prompt too long for the step is the only prompt of its step
            if count <= 0:
                return work
            work.append(Work(sequence, sequence.computed, count))
            budget -= count

    def _admit(self, prompts: list[Sequence]) -> bool:
        """Move the first waiting sequence to the running ones, if there is room for it."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return False
        sequence = self.waiting[0]
        pages = self.allocator.allocate(pages_for(sequence.max_length) if self.paged else 0)
        if pages is None:
            return False
        self.waiting.popleft()
        sequence.pages, sequence.status = pages, Status.RUNNING
        self.running.append(sequence)
        prompts.append(sequence)
        return True
