"""The same random keys and values in pages of several precisions, in one pool, as an engine would hold them.

A case is a way to store them: one precision for all, or a mixture with the average of a uniform one, so that the two
can be compared. Mixtures have all four precisions where their places allow it; those of pages come in random order, so
that runs of one precision are short.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qbe.bench.machine import free_bytes
from qbe.format.kv_blocks import FULL_BITS, KV_BITS
from qbe.kvcache.allocator import Page, PageAllocator
from qbe.kvcache.pages import KVBits, KVShape, PagePool, in_runs, page_bytes, pages_for

AT_ONCE = 64  # pages that have staging pages at the same time while a case is made
FULL = str(FULL_BITS)


def mixture(average: int, places: int) -> list[int] | None:
    """That many precisions with this mean, as evenly used as can be; None if only equal ones have it."""
    best: tuple[tuple[int, int], list[int]] | None = None
    for sixteens in range(places + 1):
        for eights in range(places + 1 - sixteens):
            rest = places - sixteens - eights
            fours, odd = divmod(average * places - 16 * sixteens - 8 * eights - 2 * rest, 2)
            counts = (rest - fours, fours, eights, sixteens)
            if odd or min(counts) < 0 or max(counts) == places:
                continue
            score = sum(c > 0 for c in counts), -max(counts)
            if best is None or score > best[0]:
                best = score, [b for b, c in zip(KV_BITS, counts, strict=True) for _ in range(c)]
    return None if best is None else best[1]


def choices(batch: int, kv_heads: int, pages: int, averages: Sequence[int]) -> dict[str, list[list[KVBits]]]:
    """Name of a case -> bits of each sequence's pages: the uniform ones, `16` first, and `pages, 8` and its like."""
    by_name: dict[str, list[list[KVBits]]] = {str(b): [[b] * pages] * batch for b in sorted(KV_BITS, reverse=True)}
    order = random.Random(0)
    for average in averages:
        if mixed := mixture(average, pages):
            by_name[f"pages, {average}"] = [order.sample(mixed, pages) for _ in range(batch)]
        if head_bits := mixture(average, kv_heads):
            by_name[f"heads, {average}"] = [[tuple(head_bits)] * pages] * batch
        if each := mixture(average, batch):
            by_name[f"sequences, {average}"] = [[b] * pages for b in each]
    return by_name


@dataclass(frozen=True)
class KVCase:
    """One way to store the sequences.

    Attributes:
        bits: the precisions in it, ascending.
        block_tables: entries int64 `[batch, pages]` in the order of decode steps; the last page of each row is open and
            at 16 bits.
        pages: of the first sequence but the last one.
        nbytes: of all pages at all layers.
    """

    bits: tuple[int, ...]
    block_tables: torch.Tensor
    pages: list[Page]
    nbytes: int


class Cases:
    """Sequences of `context` tokens at several layers, stored in every way.

    Args:
        layers: more than one make a pass over them larger than the caches.
        context: tokens, more than a page's.
        averages: bits for which there are mixtures.

    Attributes:
        pool: has all pages of all cases.
        full: entries int64 `[batch, pages]` of the pages at 16 bits.
        found: name -> case.

    Raises:
        MemoryError: the pages do not fit into the device's free memory.
        RuntimeError: nor did torch find room for them.
    """

    def __init__(
        self, layers: int, shape: KVShape, batch: int, context: int, averages: Sequence[int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.layers, self.shape, self.batch, self.context = layers, shape, batch, context
        pages = pages_for(context)
        wanted = choices(batch, shape.kv_heads, pages - 1, averages)
        room = min(AT_ONCE, pages) + sum(_staging_pages(layers, shape, dtype, rows) for rows in wanted.values()) + batch
        needed = room * page_bytes([shape] * layers, dtype)
        if needed > 0.9 * free_bytes(device):
            raise MemoryError(f"{needed / 2**20:,.0f} MiB of pages")
        self.pool = PagePool([shape] * layers, room, dtype, device)
        self._allocator = PageAllocator(room, self.pool.full)
        rows = [self._allocator.allocate(pages) or [] for _ in range(batch)]
        self.full = torch.tensor([[p.block_id for p in row] for row in rows], device=device)
        self._fill(rows)
        self.found: dict[str, KVCase] = {}
        for name, bits in wanted.items():
            page_rows = rows if name == FULL else [
                in_runs([*self._quantised(b, r), r[-1]], pages - 1, False) for b, r in zip(bits, rows, strict=True)
            ]  # fmt: skip
            block_tables = torch.tensor([[p.block_id for p in row] for row in page_rows], device=device)
            used = {b for row in bits for page in row for b in ([page] if isinstance(page, int) else page)}
            nbytes = sum(p.format.nbytes for row in page_rows for p in row)
            self.found[name] = KVCase(tuple(sorted(used)), block_tables, page_rows[0][:-1], nbytes)

    def _fill(self, rows: list[list[Page]]) -> None:
        """Random numbers, standard normal, into pages of 16 bits."""
        staging_pages, size = self.pool.memory.view(self.pool.dtype), self.pool.dtype.itemsize
        torch.manual_seed(0)
        for page in (p for row in rows for p in row):
            staging_pages[page.address // size : (page.address + page.format.nbytes) // size].normal_()

    def _quantised(self, bits: list[KVBits], row: list[Page]) -> list[Page]:
        """The full pages of a sequence at these bits."""
        pages: list[Page] = []
        for i in range(0, len(bits), AT_ONCE):
            now: list[Page] = []
            for b in bits[i : i + AT_ONCE]:
                format = self.pool.format((b,) * self.layers, self._allocator.uses)
                now += self._allocator.allocate(1, format) or []
            sources = [p.block_id for p in row[i : i + len(now)]]
            assert len(now) == len(bits[i : i + AT_ONCE]), "the pool was made for all of them"
            self.pool.quantise(torch.tensor([sources, [p.quantised_block_id for p in now]], device=self.pool.device))
            for page in now:
                self._allocator.quantise(page)
            pages += now
        return pages


def _staging_pages(layers: int, shape: KVShape, dtype: torch.dtype, rows: list[list[KVBits]]) -> int:
    """Pages of 16 bits that hold as many bytes as pages of these bits."""
    probe = PagePool([shape] * layers, 0, dtype, torch.device("cpu"))
    uses: Counter[int] = Counter()
    total = sum(probe.format((bits,) * layers, uses).nbytes for row in rows for bits in row)
    return -(-total // probe.page_bytes)
