"""The longest way down a tree of known pages (`qbe.kvcache.prefix`) on which a sequence may begin. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qbe.format.kv_blocks import PAGE_SIZE, quantised_pages
from qbe.kvcache.allocator import Page, PageAllocator
from qbe.kvcache.prefix import PagePrecision, tokens_key

WAYS = 4  # followed side by side: more precisions of one text are seldom known, and every one costs time


@dataclass(frozen=True)
class _Way:
    """A page and those before it."""

    page: Page
    before: _Way | None
    excess: int

    def pages(self) -> list[Page]:
        way: _Way | None = self
        found = []
        while way is not None:
            found.append(way.page)
            way = way.before
        return found[::-1]


def longest_prefix(
    allocator: PageAllocator, salt: bytes, tokens: Sequence[int], most: int,
    excess: Callable[[int, PagePrecision], int | None], pictures: Callable[[int], bytes] = lambda _: b"",
) -> list[Page]:  # fmt: skip
    """The pages of the longest known prefix that ends where a sequence can go on.

    A sequence's first token of its own must not look back on a page at 16 bits, which nobody keeps: it goes on after a
    whole stretch of pages, or where the last page has 16 bits for good.

    Args:
        salt: whose pages.
        tokens: of the sequence; the last one is always left to compute.
        most: tokens that may be taken, at most.
        excess: how far a page of this number and precision is above what is asked for; None where it will not do. Of
            several ways the one with the least sum is taken.
        pictures: the digests of those with rows in a page of this number.
    """
    found: _Way | None = None
    ways: list[_Way | None] = [None]
    number = 0
    while (end := (number + 1) * PAGE_SIZE) < len(tokens) and end <= most:
        own = tokens[number * PAGE_SIZE : end]
        seen = pictures(number)
        further: list[_Way] = []
        for way in ways:
            before = salt if way is None else way.page.key
            assert before is not None
            for page in allocator.alike(tokens_key(before, own, seen)):
                assert page.written is not None
                if (more := excess(number, page.written)) is not None:
                    further.append(_Way(page, way, more + (0 if way is None else way.excess)))
        if not further:
            break
        number += 1
        ways = [*sorted(further, key=lambda way: way.excess)[:WAYS]]
        usable = (w for w in ways if w is not None and (quantised_pages(number) == number or w.page.format.full))
        found = next(usable, found)
    return [] if found is None else found.pages()
