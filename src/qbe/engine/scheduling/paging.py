"""The pages of each sequence: which it begins with, which it writes, when they are quantised and found by others."""

from __future__ import annotations

from collections.abc import Callable

from qbe.engine.scheduling.sequence import Sequence, Status
from qbe.format.kv_blocks import FULL_BITS, PAGE_SIZE, quantised_pages
from qbe.kvcache.allocator import Page, PageAllocator, PageFormat
from qbe.kvcache.lookup import longest_prefix
from qbe.kvcache.prefix import PagePrecision, page_key, tokens_key


class Paging:
    """Gives pages to sequences and takes them back.

    Args:
        allocator: the pages.
        chunked: whether a prompt may be spread over steps.
        reusable: whether a page's contents depend on the tokens before it alone, so that sequences may share it.
        format_of: the format of a sequence's page of this number.

    Attributes:
        copies: staging pages of pages that were shared and are written to next, each with that of its copy; to be
            copied before the step.
    """

    def __init__(
        self, allocator: PageAllocator, chunked: bool, reusable: bool, format_of: Callable[[Sequence, int], PageFormat]
    ) -> None:
        self.allocator, self.chunked, self.reusable, self.format_of = allocator, chunked, reusable, format_of
        self.copies: list[tuple[int, int]] = []

    def capacity(self, sequence: Sequence) -> int:
        """Tokens that the whole cache holds at the bits that a sequence has now."""
        format, page = self._next_format(sequence), self.allocator.page_bytes
        total = self.allocator.num_pages * page
        if format.full:
            return self.allocator.num_pages * PAGE_SIZE
        if not self.chunked:
            rest = total - self._first(sequence)
            return (1 + rest // (format.nbytes + page)) * PAGE_SIZE if rest >= 0 else 0
        # Pages whose bits do not change any more, and the first one.
        known = max(1, len(sequence.paging.quantised_bits))
        used = sum(self.format_of(sequence, i).nbytes for i in range(known))
        rest = total - used - 2 * page
        if rest >= 0:
            return (known + rest // format.nbytes) * PAGE_SIZE
        return PAGE_SIZE if known == 1 and used + page <= total else 0

    def needs(self, sequence: Sequence) -> int:
        """Bytes for its tokens when they are computed alone: quantised pages, and the staging pages of a step."""
        format, pages = self._next_format(sequence), -(-len(sequence.token_ids) // PAGE_SIZE)
        staging_page = 0 if format.full else self.allocator.page_bytes
        if self.chunked:
            return self._first(sequence) + (pages - 1) * format.nbytes + min(2, pages) * staging_page
        return self._first(sequence) + (pages - 1) * (format.nbytes + staging_page)

    def _first(self, sequence: Sequence) -> int:
        """Bytes of its first page; with its staging page, where all pages have one at once."""
        format = self.format_of(sequence, 0)
        return format.nbytes + (0 if format.full or self.chunked else self.allocator.page_bytes)

    def begin(self, sequence: Sequence) -> None:
        """Give it the pages that are known already; its last token is always computed.

        Where its fork parent still writes the page in which the prompt ends, it begins with all of its pages. The first
        of the two that writes to that page copies it.
        """
        paging, tokens = sequence.paging, len(sequence.token_ids)
        paging.keyed_by = sequence.first_key
        fork_parent, paging.fork_parent = paging.fork_parent, None
        alike = self._may_fork(sequence, fork_parent)
        if alike and fork_parent is not None:
            prefix = sequence.blueprint_history.prefix = list(fork_parent.blueprint_history.prefix)
            paging.quantised_bits = fork_parent.paging.quantised_bits[: prefix[-1][0] // PAGE_SIZE if prefix else 0]
        again = alike or sequence.preemptions > 0
        sequence.pages = self._known(sequence, more=not again and (paging.more or paging.more_kv))
        known = paging.quantised = len(sequence.pages)
        sequence.computed, last = known * PAGE_SIZE, (tokens - 1) // PAGE_SIZE
        if (
            alike
            and fork_parent is not None
            and last == (fork_parent.computed + 1) // PAGE_SIZE  # not full after this step either
            and sequence.computed < tokens - 1 <= min(fork_parent.computed, fork_parent.alike, sequence.alike)
            and all(self.format_of(sequence, i) is fork_parent.pages[i].format for i in range(known, last))
        ):
            sequence.pages += fork_parent.pages[known : last + 1]
            paging.quantised = max(known, quantised_pages(last))
            self.allocator.share(sequence.pages[known:], paging.quantised - known)
            sequence.computed = tokens - 1
        for i in range(len(paging.quantised_bits), sequence.computed // PAGE_SIZE):
            paging.quantised_bits.append(sequence.kv_bits_of(i))
        if not sequence.preemptions:
            paging.cached = sequence.computed

    def _may_fork(self, sequence: Sequence, fork_parent: Sequence | None) -> bool:
        """Whether the pages of `fork_parent` may be those of a sequence of the same prompt."""
        return (
            self.reusable
            and fork_parent is not None
            and fork_parent.status is Status.RUNNING
            and fork_parent.paging.keyed_by == sequence.paging.keyed_by
            and fork_parent.token_ids[: len(sequence.token_ids)] == sequence.token_ids
            and [p.picture.digest for p in fork_parent.pictures] == [p.picture.digest for p in sequence.pictures]
        )

    def _known(self, sequence: Sequence, more: bool) -> list[Page]:
        """The known pages that it begins on, of which it is an owner then.

        Args:
            more: whether pages with more bits than its own will do. What their tokens were computed at becomes part of
                its history, so that they are computed again as they were, should it have to give them up.
        """
        if not self.reusable or sequence.activation_stats is not None:
            return []
        paging, scoring = sequence.paging, sequence.sampling.scoring
        # Whoever wants logits of its tokens computes them. Pages with tokens of a precision of their own are nobody's.
        most = sequence.alike if scoring is None else min(sequence.alike, scoring.start)

        def excess(page: int, written: PagePrecision) -> int | None:
            return written.excess(sequence.precision_of(page), more and paging.more, more and paging.more_kv)

        pages = longest_prefix(
            self.allocator, paging.cache_salt, sequence.token_ids, most, excess, sequence.pictures_of
        )
        written = [page.written for page in pages if page.written is not None]
        if any(excess(i, w) for i, w in enumerate(written)):
            before = paging.quantised_bits
            paging.quantised_bits = [w.kv_bits for w in written]
            if self.capacity(sequence) < sequence.max_length:  # pages with more bits take more room
                paging.quantised_bits = before
                return self._known(sequence, more=False)
            sequence.blueprint_history.prefix = [
                ((i + 1) * PAGE_SIZE, w.blueprint)
                for i, (w, after) in enumerate(zip(written, [*written[1:], None], strict=True))
                if after is None or after.blueprint.computed_key != w.blueprint.computed_key
            ]
        self.allocator.take(pages)
        paging.page_keys = [page.key for page in pages if page.key is not None]
        return pages

    def write(self, sequence: Sequence, end: int) -> bool:
        """Whether `[computed, end)` can be written: there are pages, of the right formats and nobody else's."""
        for i in range(sequence.computed // PAGE_SIZE, -(-end // PAGE_SIZE)):
            format = self.format_of(sequence, i)
            if i == len(sequence.pages):
                new = self.allocator.allocate(1, format)
                if new is None:
                    return False
                sequence.pages += new
            elif (page := sequence.pages[i]).owners > 1:
                new = self.allocator.allocate(1, format)
                if new is None:
                    return False
                self.copies.append(
                    (page.block_id, new[0].block_id)
                )  # the page may lose its staging page before the step
                self.allocator.release([page])
                sequence.pages[i] = new[0]
            elif page.format != format:
                if not self.allocator.reformat(page, format):
                    return False
            else:
                continue
            sequence.paging.version += 1
        return True

    def complete(self, sequence: Sequence, start: int) -> None:
        """Its tokens from `start` on have run: pages that are quantised now may be found by others."""
        if sequence.paging.keyed_by != sequence.first_key:
            sequence.paging.keyed_by = None
        full = min(sequence.computed // PAGE_SIZE, len(sequence.pages))
        for i in range(len(sequence.paging.quantised_bits), full):
            sequence.paging.quantised_bits.append(sequence.kv_bits_of(i))
        for i in range(sequence.paging.quantised, quantised_pages(full)):
            self.allocator.quantise(sequence.pages[i])
            sequence.paging.quantised = i + 1
            sequence.paging.version += 1
        for i in range(len(sequence.paging.page_keys), full):
            whole = (i + 1) * PAGE_SIZE <= sequence.alike
            if not self.reusable or not whole or sequence.paging.keyed_by is None:
                break
            if i >= sequence.paging.quantised and not sequence.pages[i].format.full:
                break
            before = sequence.paging.page_keys[i - 1] if i else sequence.paging.cache_salt
            own = sequence.token_ids[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
            alike = tokens_key(before, own, sequence.pictures_of(i))
            written = sequence.precision_of(i)
            key = page_key(alike, written)
            sequence.paging.page_keys.append(key)
            self.allocator.publish(sequence.pages[i], key, alike, written)

    def release(self, sequence: Sequence) -> None:
        """Take all of its pages back."""
        self.allocator.release(sequence.pages, sequence.paging.quantised)
        sequence.pages = []
        sequence.paging.page_keys, sequence.paging.quantised = [], 0
        sequence.paging.version += 1

    def _next_format(self, sequence: Sequence) -> PageFormat:
        """Of the pages that it has not yet filled, the first one left out."""
        return self.format_of(sequence, max(1, len(sequence.paging.quantised_bits)))


def average_bits(sequence: Sequence) -> float:
    """Bits of a number in its pages: those of a quantised page, 16 in the others."""
    bits = total = 0.0
    for i, page in enumerate(sequence.pages):
        tokens = min(PAGE_SIZE, sequence.computed - i * PAGE_SIZE)
        if tokens > 0:
            bits += tokens * (page.format.average if i < sequence.paging.quantised else FULL_BITS)
            total += tokens
    return bits / total if total else float(FULL_BITS)
