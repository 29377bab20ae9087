"""Who owns which bytes: random traffic, quantising, sharing, known pages and their eviction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe.blueprint import Blueprint
from qbe.kvcache.allocator import Page, PageAllocator, PageFormat
from qbe.kvcache.prefix import PagePrecision, page_key, tokens_key
from qbe.sites import KVBits

PAGES = 13
WRITTEN = PagePrecision(Blueprint("x", (6,), (16,), (16,)), (16,))
FORMATS = [PageFormat(0, 16 * 256), PageFormat(1, 9 * 256), PageFormat(2, 5 * 256), PageFormat(3, 3 * 256)]


def ranges(page: Page) -> list[tuple[int, int]]:
    own = [(page.address, page.address + page.format.nbytes)]
    return own if page.staging_page is None else [*own, (page.staging_page, page.staging_page + FORMATS[0].nbytes)]


def check(allocator: PageAllocator, owned: list[Page], known: dict[bytes, Page]) -> None:
    """No byte has two pages and none is lost."""
    evictable = [p for p in known.values() if not p.owners and p.key is not None]
    live = list(dict.fromkeys(owned)) + evictable
    taken = sorted(r for page in live for r in ranges(page))
    everything = sorted([*taken, *allocator._holes])
    at = 0
    for begin, end in everything:
        assert begin == at, "a byte is lost or has two pages"
        assert end > begin
        at = end
    assert at == PAGES * FORMATS[0].nbytes
    for page in live:
        assert (page.address if page.format.full else page.staging_page or 0) % FORMATS[0].nbytes == 0
        assert page.owners == owned.count(page)
    assert allocator.free_bytes == PAGES * FORMATS[0].nbytes - sum(
        e - b for p in dict.fromkeys(owned) for b, e in ranges(p)
    )
    assert {n: c for n, c in allocator.uses.items() if c} == {
        f.number: n for f in FORMATS if (n := sum(p.format is f for p in live))
    }


@settings(deadline=None, max_examples=300)
@given(
    traffic=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(0, 30), st.integers(1, 4)), max_size=90
    )
)
def test_traffic_never_leaks_or_doubles_a_byte(traffic: list[tuple[int, int, int, int]]) -> None:
    allocator = PageAllocator(PAGES, FORMATS[0])
    owned: list[Page] = []  # one entry per owner
    reads: list[bool] = []  # whether that owner reads the staging page
    known: dict[bytes, Page] = {}
    for what, number, which, count in traffic:
        at = which % len(owned) if owned else 0
        page = owned[at] if owned else None
        if page is None or what < 3:
            new = allocator.allocate(count, FORMATS[number])
            if new is None:
                assert not allocator.evictable, "what nobody owns gives way first"
                holes = [e - b for b, e in allocator._holes]
                assert max(holes, default=0) < count * FORMATS[number].nbytes + (count + 1) * FORMATS[0].nbytes
            else:
                owned += new
                reads += [True] * len(new)
        elif what == 3 and reads[at]:
            allocator.quantise(page)
            reads[at] = False
        elif what == 4:
            also = page.format.full or (page.staging_page is not None and count > 2)
            allocator.share([page], 0 if also else 1)
            owned.append(page)
            reads.append(also)
        elif what == 5 and not reads[at]:
            key = bytes([which % 9])
            taken = key in known and known[key].key == key
            had = page.key
            allocator.publish(page, key, bytes([which % 3]), WRITTEN)
            assert page.key == (had or (None if taken else key))
            if page.key == key:
                known[key] = page
        elif what == 6 and page.key is None and page.owners == 1:
            staging_page = page.address if page.format.full else page.staging_page
            if staging_page is not None and page.format is not FORMATS[number]:
                changed = allocator.reformat(page, FORMATS[number])
                assert (page.format is FORMATS[number]) == changed
                assert staging_page in (page.address, page.staging_page)
                reads[at] |= changed
        elif what == 7:
            found = [*allocator.alike(bytes([which % 3]))]
            still = {key: p for key, p in known.items() if p.key == key}
            assert {p.key: p for p in found} == {k: p for k, p in still.items() if p.tokens_key == bytes([which % 3])}
            allocator.take(found)
            owned += found
            reads += [False] * len(found)
        else:
            allocator.release([owned.pop(at)], 0 if reads.pop(at) else 1)
        check(allocator, owned, known)
        for page in owned:
            reading = any(r for p, r in zip(owned, reads, strict=True) if p is page)
            assert page.format.full or (page.staging_page is not None) == reading
    for page, reading in zip(owned, reads, strict=True):
        allocator.release([page], 0 if reading else 1)
    assert allocator.free == PAGES
    everything = allocator.allocate(PAGES)
    assert everything is not None, "idle pages give way"
    assert sorted(p.address for p in everything) == [i * FORMATS[0].nbytes for i in range(PAGES)]
    assert allocator.evictable == allocator.free == 0


def test_low_bits_really_take_less() -> None:
    allocator = PageAllocator(10, FORMATS[0])
    pages: list[Page] = []
    while (new := allocator.allocate(1, FORMATS[2])) is not None:
        pages += new
        allocator.quantise(new[0])
    assert len(pages) == 9 * 16 // 5, "all of the memory but one staging page"


def test_double_free_and_sharing_a_free_page_are_errors() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages is not None
    assert allocator.allocate(3) is None
    assert allocator.free == 2
    allocator.release(pages)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.release(pages)
    with pytest.raises(ValueError, match="free and cannot be shared"):
        allocator.share(pages)


def test_a_sealed_page_stays_what_it_is() -> None:
    allocator = PageAllocator(4, FORMATS[0])
    (page,) = allocator.allocate(1, FORMATS[1])
    assert page.block_id == page.staging_page
    allocator.quantise(page)
    assert page.block_id == page.address | 1 == page.quantised_block_id
    with pytest.raises(ValueError, match="quantised"):
        allocator.reformat(page, FORMATS[2])


def test_known_pages_are_found_until_their_bytes_are_needed() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(3)
    for i, page in enumerate(pages):
        allocator.publish(page, bytes([i]), bytes([i // 2]), WRITTEN)
    allocator.release(pages)
    assert (allocator.free, allocator.evictable) == (3, 3)
    assert allocator.alike(b"\0") == pages[:2], "of one text at two precisions"
    allocator.take(pages[:1])
    assert allocator.free == 2
    allocator.release(pages[:1])
    allocator.allocate(1)
    assert allocator.alike(b"\1") == (), "the last page of a sequence goes first"
    allocator.forget([pages[0]])
    assert allocator.alike(b"\0") == [pages[1]]


def test_a_page_is_known_by_all_that_made_it() -> None:
    def key(before: bytes, weights: int, kv_bits: tuple[KVBits, ...], tokens: list[int]) -> bytes:
        blueprint = Blueprint("x", (weights,), (16,), kv_bits)
        return page_key(tokens_key(before, tokens), PagePrecision(blueprint, kv_bits))

    first = key(b"", 6, (4, (8, 2)), [1, 2, 3])
    assert key(b"", 6, (4, (8, 2)), [1, 2, 3]) == first
    others = [
        key(b"", 8, (4, (8, 2)), [1, 2, 3]),
        key(b"", 6, (4, (2, 8)), [1, 2, 3]),
        key(b"", 6, (4, (8, 2)), [1, 2, 4]),
        key(first, 6, (4, (8, 2)), [1, 2, 3]),
    ]
    assert len({first, *others}) == 5
