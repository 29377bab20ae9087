"""Who owns which bytes of the KV cache: pages of any precision in one memory. Pure Python, no torch.

A page that is being filled lies in a staging page, which has room for 16 bits everywhere. Some time after it is full it
is quantised: its numbers go to bytes of their own, as many as its precision needs, and the staging page is free again
once none of its owners reads it any more. Both are taken when the page is begun, so that quantising never fails.
Staging pages are taken from the top of the memory and quantised pages from the bottom, each as far out as possible,
which keeps what is free in one piece most of the time.

Quantised pages whose contents are known by a key stay after their last owner has gone, until their bytes are needed:
the least recently used go first.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from qbe.format.kv_blocks import ALIGN, FULL_BITS
from qbe.kvcache.prefix import PagePrecision


@dataclass(frozen=True)
class PageFormat:
    """Precisions of a page.

    Attributes:
        number: what entries call it; 0 has 16 bits everywhere.
        nbytes: of a quantised page, a multiple of `ALIGN`.
        bits: per layer the bits of each key head, empty for a layer without attention.
        average: bits of a number, scales not counted.
    """

    number: int
    nbytes: int
    bits: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    average: float = float(FULL_BITS)

    @property
    def full(self) -> bool:
        """Whether it has 16 bits everywhere, so that a page of it stays in its staging page."""
        return self.number == 0

    def lowered(self, layer: int) -> bool:
        """Whether any head of this layer has less than 16 bits."""
        return any(b != FULL_BITS for b in self.bits[layer]) if self.bits else False


@dataclass(eq=False)
class Page:
    """A page in use or known by its key.

    Attributes:
        format: its precisions.
        address: of its bytes once it is quantised; of its staging page when its format is full.
        staging_page: address of the 16 bits it is written at; None when nobody reads these any more.
        owners: sequences that have it. readers: those of them that read its staging page.
        key: what its contents are known by, or None; with it `tokens_key`, which those share that differ in nothing but
            precision, and `written`, at what they were.
        original: entry of its 16 bits in host memory (`qbe.kvcache.originals`), or None.
    """

    format: PageFormat
    address: int
    staging_page: int | None
    owners: int = 1
    readers: int = 1
    key: bytes | None = None
    tokens_key: bytes = b""
    written: PagePrecision | None = None
    original: int | None = None

    @property
    def block_id(self) -> int:
        """What a block table says of it (`qbe.format.kv_blocks`): the address of its staging_page while it has one."""
        return self.address | self.format.number if self.staging_page is None else self.staging_page

    @property
    def quantised_block_id(self) -> int:
        """What a block table says of it as it is quantised, or will be."""
        return self.address | self.format.number


class PageAllocator:
    """The memory of `num_pages` pages of 16 bits, handed out as pages of any precision.

    Args:
        num_pages: staging_pages.
        full: the format of 16 bits everywhere; a staging_page has its size.
        drop: called with the original of a page that is gone.
    """

    def __init__(
        self, num_pages: int, full: PageFormat = PageFormat(0, ALIGN), drop: Callable[[int], None] | None = None
    ) -> None:
        self._drop = drop
        self.num_pages, self.full, self.page_bytes = num_pages, full, full.nbytes
        self._holes = [(0, num_pages * self.page_bytes)] if num_pages else []  # [begin, end), ascending, never touching
        self._known: dict[bytes, Page] = {}
        self._alike: dict[bytes, list[Page]] = {}  # those of a tokens key, the one published last at the end
        self.uses: Counter[int] = Counter()  # number of a format -> pages of it
        self._evictable: OrderedDict[Page, None] = (
            OrderedDict()
        )  # known pages without an owner, least recently used first

    @property
    def free_bytes(self) -> int:
        """Bytes that no sequence owns; those of idle pages count, because they are given up on demand."""
        return sum(end - begin for begin, end in self._holes) + sum(p.format.nbytes for p in self._evictable)

    @property
    def free(self) -> int:
        """Pages of 16 bits that `free_bytes` would make."""
        return self.free_bytes // max(1, self.page_bytes)

    @property
    def evictable(self) -> int:
        """Known pages without an owner."""
        return len(self._evictable)

    def allocate(self, count: int, format: PageFormat | None = None) -> list[Page] | None:
        """Take `count` pages to be written and then quantised to `format` (16 bits by default); None if they do not
        fit.

        Idle pages are given up as far as it takes, and only then.
        """
        format = format or self.full
        pages: list[Page] = []
        for _ in range(count):
            staging_page = self._take_staging_page()
            address = staging_page if format.full or staging_page is None else self._take(format.nbytes)
            if staging_page is None or address is None:
                if staging_page is not None:
                    self._give(staging_page, self.page_bytes)
                for page in pages:
                    self._free(page)
                return None
            self.uses[format.number] += 1
            pages.append(Page(format, address, None if format.full else staging_page))
        return pages

    def reformat(self, page: Page, format: PageFormat) -> bool:
        """Let a page that is not quantised become one of `format`; False, and nothing done, if that does not fit.

        Raises:
            ValueError: the page is quantised, or others own or know it.
        """
        if page.owners != 1 or page.key is not None or page.format is format:
            raise ValueError(f"page {page.address} cannot become another")
        staging_page = page.address if page.format.full else page.staging_page
        if staging_page is None:
            raise ValueError(f"page {page.address} is quantised")
        address = staging_page if format.full else self._take(format.nbytes)
        if address is None:
            return False
        if not page.format.full:
            self._give(page.address, page.format.nbytes)
        self.uses.subtract([page.format.number])
        self.uses[format.number] += 1
        page.format, page.address, page.staging_page = format, address, None if format.full else staging_page
        page.readers = 1
        return True

    def quantise(self, page: Page) -> None:
        """One of its owners does not read its staging page any more, and its numbers are in its own bytes or will be
        before anything else is written."""
        page.readers -= 1
        if page.staging_page is not None and not page.readers:
            self._give(page.staging_page, self.page_bytes)
            page.staging_page = None

    def share(self, pages: Sequence[Page], quantised: int = 0) -> None:
        """Add an owner to each of these pages, who reads the staging pages of all but the first `quantised`.

        Raises:
            ValueError: a page that nobody owns.
        """
        for i, page in enumerate(pages):
            if not page.owners:
                raise ValueError(f"page {page.address} is free and cannot be shared")
            page.owners += 1
            page.readers += i >= quantised

    def release(self, pages: Sequence[Page], quantised: int = 0) -> None:
        """Take away one owner from each of these pages; a page without owners becomes idle if it is known, else free.

        The last page becomes idle first, because a page is of use only with those before it.

        Args:
            quantised: the first so many are those whose staging pages this owner does not read.

        Raises:
            ValueError: a page that is already free.
        """
        for i in reversed(range(len(pages))):
            page = pages[i]
            if not page.owners:
                raise ValueError(f"page {page.address} is freed twice")
            page.owners -= 1
            if i >= quantised:
                self.quantise(page)
            if page.owners:
                continue
            if page.key is not None:
                self._evictable[page] = None
            else:
                self._free(page)

    def publish(self, page: Page, key: bytes, tokens_key: bytes, written: PagePrecision) -> None:
        """Let a page be found, by those who do not read its staging page; nothing happens when another page is known by
        its key."""
        if key not in self._known and page.key is None:
            self._known[key] = page
            self._alike.setdefault(tokens_key, []).append(page)
            page.key, page.tokens_key, page.written = key, tokens_key, written

    def alike(self, tokens_key: bytes) -> Sequence[Page]:
        """The known pages of these tokens after the same pages, at any precision."""
        return self._alike.get(tokens_key, ())

    def take(self, pages: Sequence[Page]) -> None:
        """Add an owner to each of these known pages, who does not read their staging pages."""
        for page in pages:
            self._evictable.pop(page, None)
            page.owners += 1

    def forget(self, pages: Iterable[Page]) -> None:
        """Let these pages not be found any more; the idle ones among them are free then."""
        for page in pages:
            if page.key is not None:
                del self._known[page.key]
                alike = self._alike[page.tokens_key]
                alike.remove(page)
                if not alike:
                    del self._alike[page.tokens_key]
                page.key = page.written = None
                if page in self._evictable:
                    del self._evictable[page]
                    self._free(page)

    def evict(self) -> bool:
        """Free the idle page that has not been used for the longest time; False when there is none."""
        if not self._evictable:
            return False
        self.forget([next(iter(self._evictable))])
        return True

    def _free(self, page: Page) -> None:
        self.uses.subtract([page.format.number])
        if page.staging_page is not None:
            self._give(page.staging_page, self.page_bytes)
        self._give(page.address, page.format.nbytes)
        if page.original is not None and self._drop is not None:
            self._drop(page.original)

    def _take_staging_page(self) -> int | None:
        """The highest free staging page."""
        while True:
            for begin, end in reversed(self._holes):
                staging_page = (end - self.page_bytes) // self.page_bytes * self.page_bytes
                if staging_page >= begin:
                    self._cut(begin, end, staging_page, self.page_bytes)
                    return staging_page
            if not self.evict():
                return None

    def _take(self, size: int) -> int | None:
        """The lowest `size` free bytes."""
        while True:
            for begin, end in self._holes:
                if end - begin >= size:
                    self._cut(begin, end, begin, size)
                    return begin
            if not self.evict():
                return None

    def _cut(self, begin: int, end: int, address: int, size: int) -> None:
        self._holes.remove((begin, end))
        for hole in ((begin, address), (address + size, end)):
            if hole[0] < hole[1]:
                insort(self._holes, hole)

    def _give(self, address: int, size: int) -> None:
        """Make bytes free, joined with the holes beside them."""
        i = bisect(self._holes, (address, address))
        begin, end = address, address + size
        if i < len(self._holes) and self._holes[i][0] == end:
            end = self._holes.pop(i)[1]
        if i and self._holes[i - 1][1] == begin:
            begin = self._holes.pop(i - 1)[0]
            i -= 1
        self._holes.insert(i, (begin, end))
