"""Memory with pages of several precisions, filled through the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from qbe.format.kv_blocks import ALIGN, FORMATS, FULL_BITS, PAGE_SIZE, head_layout, quantised_pages
from qbe.kernels.reference import kv_pages as reference
from qbe.kvcache.allocator import PageAllocator
from qbe.kvcache.pages import KVShape, PagePool, pages_for
from qbe.kvcache.prompt import PromptSpan
from qbe.sites import KVBits

Shape = tuple[int, int, int]  # kv_heads, key_dim, value_dim


def head_offsets_of(formats: list[tuple[int, ...]], shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """int32 `[FORMATS, kv_heads]` with these bits per head, and each format's bytes."""
    head_offsets, sizes = torch.zeros(FORMATS, shape[0], dtype=torch.int32), []
    for number, bits in enumerate(formats):
        at = 0
        for head, b in enumerate(bits):
            head_offsets[number, head] = at | b
            at += head_layout(b, *shape[1:], dtype.itemsize).nbytes
        sizes.append(at)
    return head_offsets, sizes


class Memory:
    """Room for `pages` pages of 16 bits; bytes that nobody wrote are NaN in every dtype.

    formats: bits per head; the first one must be 16 everywhere.
    """

    def __init__(self, formats: list[tuple[int, ...]], shape: Shape, dtype: torch.dtype, pages: int) -> None:
        assert formats[0] == (FULL_BITS,) * shape[0]
        self.shape, self.dtype = shape, dtype
        self.head_offsets, self.sizes = head_offsets_of(formats, shape, dtype)
        self.data = torch.full((pages * self.sizes[0],), 255, dtype=torch.uint8)
        self.used = 0
        self.sources: dict[int, int] = {}  # entry of a quantised page -> the page of 16 bits that it was made from

    def page(self, number: int = 0) -> int:
        """The entry of a new page of this format."""
        block_id = self.used | number
        self.used += self.sizes[number]
        assert self.used <= len(self.data)
        return block_id

    def write(self, block_id: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put tokens `[n, kv_heads, dim]` at the beginning of a page of 16 bits."""
        full = head_layout(FULL_BITS, *self.shape[1:], self.dtype.itemsize)
        for head in range(self.shape[0]):
            _, at = reference.find(self.head_offsets, block_id, head)
            for x, begin in ((keys, at), (values, at + full.values)):
                raw = x[:, head].to(self.dtype).contiguous().view(torch.uint8).flatten()
                self.data[begin : begin + len(raw)] = raw

    def filled(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The entry of a new page of this format that holds these tokens `[n, kv_heads, dim]`."""
        source = self.page()
        self.write(source, keys, values)
        if number == 0 or len(keys) < PAGE_SIZE:
            return source
        target = self.page(number)
        self.sources[target] = source
        ids = torch.tensor([source]), torch.tensor([target])
        reference.quantise_pages(self.data, self.head_offsets[None], *ids, self.shape, self.dtype)
        return target


def full_pages(pool: PagePool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of what is or could be pages of 16 bits at a layer with attention: keys `[num_pages + 1, kv_heads,
    PAGE_SIZE, key_dim]` and values, of the model's dtype."""
    shape, head_offsets = pool.shapes[layer], pool.head_offsets[layer]
    assert shape is not None
    assert head_offsets is not None
    part, size = head_layout(FULL_BITS, shape.key_dim, shape.value_dim, pool.dtype.itemsize), pool.dtype.itemsize
    numbers, begin = pool.memory.view(pool.dtype), int(head_offsets[0, 0]) - FULL_BITS
    sizes = (pool.num_pages + 1, shape.kv_heads, PAGE_SIZE)
    strides = (pool.page_bytes // size, part.nbytes // size)
    keys = numbers.as_strided((*sizes, shape.key_dim), (*strides, shape.key_dim, 1), begin // size)
    values_at = (begin + part.values) // size
    return keys, numbers.as_strided((*sizes, shape.value_dim), (*strides, shape.value_dim, 1), values_at)


def prompt_in_pages(
    shape: KVShape, heads: int, start: int, count: int, bits: Sequence[KVBits], dtype: torch.dtype, device: str = "cpu"
) -> tuple[PagePool, PromptSpan, torch.Tensor]:
    """A pool of one layer, whose pages take turns with these bits and hold a sequence's `start + count` tokens, what a
    step knows of the last `count` of them, and queries `[1, heads, count, key_dim]`. Nobody else's bytes are numbers.
    """
    generator = torch.Generator().manual_seed(start)
    total = pages_for(start + count)
    pool = PagePool([shape], 2 * total, dtype, torch.device(device))
    allocator = PageAllocator(2 * total, pool.full)
    formats = [pool.format((bits[i % len(bits)],), Counter()) for i in range(total)]
    pages = [p for f in formats for p in allocator.allocate(1, f)]
    pool.memory.fill_(255)  # NaN, whatever it is read as
    for i, page in enumerate(pages):
        used = min(PAGE_SIZE, start + count - i * PAGE_SIZE)
        staging_page = (page.address if page.staging_page is None else page.staging_page) // pool.page_bytes
        for memory in full_pages(pool, 0):
            numbers = torch.randn(shape.kv_heads, used, memory.shape[-1], generator=generator)
            memory[staging_page, :, :used] = numbers.to(device, dtype)
    pool.quantise(pool.to_quantise(pages[: (start + count) // PAGE_SIZE]))
    for page in pages[: quantised_pages(start // PAGE_SIZE)]:
        allocator.quantise(page)
    prompt = PromptSpan.of(0, count, start, pages, torch.device(device))
    query = torch.randn(count, heads, shape.key_dim, generator=generator).to(device, dtype).transpose(0, 1)[None]
    return pool, prompt, query


__all__ = ["ALIGN", "FULL_BITS", "PAGE_SIZE", "Memory", "Shape", "full_pages", "head_offsets_of", "prompt_in_pages"]
