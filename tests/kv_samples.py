"""Memory with pages of several precisions, filled through the reference."""

from __future__ import annotations

import torch

from qbe.kernels.kv_blocks import ALIGN, FORMATS, FULL_BITS, PAGE_SIZE, block
from qbe.kernels.reference import kv_pages as reference

Shape = tuple[int, int, int]  # kv_heads, key_dim, value_dim


def words_of(formats: list[tuple[int, ...]], shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """int32 `[FORMATS, kv_heads]` with these bits per head, and each format's bytes."""
    words, sizes = torch.zeros(FORMATS, shape[0], dtype=torch.int32), []
    for number, bits in enumerate(formats):
        at = 0
        for head, b in enumerate(bits):
            words[number, head] = at | b
            at += block(b, *shape[1:], dtype.itemsize).nbytes
        sizes.append(at)
    return words, sizes


class Memory:
    """Room for `pages` pages of 16 bits; bytes that nobody wrote are NaN in every dtype.

    formats: bits per head; the first one must be 16 everywhere.
    """

    def __init__(self, formats: list[tuple[int, ...]], shape: Shape, dtype: torch.dtype, pages: int) -> None:
        assert formats[0] == (FULL_BITS,) * shape[0]
        self.shape, self.dtype = shape, dtype
        self.words, self.sizes = words_of(formats, shape, dtype)
        self.data = torch.full((pages * self.sizes[0],), 255, dtype=torch.uint8)
        self.used = 0
        self.sources: dict[int, int] = {}  # entry of a sealed page -> the page of 16 bits that it was made from

    def page(self, number: int = 0) -> int:
        """The entry of a new page of this format."""
        entry = self.used | number
        self.used += self.sizes[number]
        assert self.used <= len(self.data)
        return entry

    def write(self, entry: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put tokens `[n, kv_heads, dim]` at the beginning of a page of 16 bits."""
        full = block(FULL_BITS, *self.shape[1:], self.dtype.itemsize)
        for head in range(self.shape[0]):
            _, at = reference.find(self.words, entry, head)
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
        reference.seal_pages(self.data, self.words[None], *ids, self.shape, self.dtype)
        return target


__all__ = ["ALIGN", "FULL_BITS", "PAGE_SIZE", "Memory", "Shape", "words_of"]
