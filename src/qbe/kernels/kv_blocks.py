"""Where the numbers of the KV cache lie in memory, at each precision. Pure arithmetic; kernels and cache share it.

A page holds `PAGE_SIZE` tokens of one sequence at every layer. It consists of blocks, one for each layer and key head,
and each block has a precision of its own:

    16 bits   keys [PAGE_SIZE, key_dim], then values [PAGE_SIZE, value_dim], in the model's dtype
    8, 4, 2   keys uint8 [key_dim, PAGE_SIZE * bits / 8], values uint8 [PAGE_SIZE, ceil(value_dim * bits / 8)],
              of the keys float16 scale [key_dim] and low [key_dim], of the values scale [PAGE_SIZE] and low [PAGE_SIZE]

A number is scale * code + low. Keys share scales along a channel, because their outliers stay in a few channels; values
along a token (KIVI, Liu et al. 2024). Code i of a row is in byte i * bits // 8, the first one in its lowest bits.

Two words lead a kernel to a block. A page's entry is its address in bytes | the number of its format; a format's word
for a layer and head is the block's offset in the page | its bits. Addresses and offsets are multiples of `ALIGN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from qbe.sites import FULL_BITS, KV_BITS

__all__ = ["ALIGN", "FORMATS", "FULL_BITS", "KV_BITS", "PAGE_SIZE", "Block", "aligned", "block"]

PAGE_SIZE = 64
ALIGN = 256
FORMATS = ALIGN  # numbers that an entry has room for


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Block:
    """A block's parts, in bytes from its beginning; scales are followed by as many lows.

    Attributes:
        key_row, value_row: bytes of a row of keys or values.
        values, key_scales, value_scales: where they begin; keys begin at 0. A block of 16 bits has no scales.
        nbytes: the whole, aligned.
    """

    key_row: int
    value_row: int
    values: int
    key_scales: int
    value_scales: int
    nbytes: int


@cache
def block(bits: int, key_dim: int, value_dim: int, itemsize: int) -> Block:
    """The layout of a block; `itemsize` is that of the model's dtype, in bytes."""
    if bits == FULL_BITS:
        values = PAGE_SIZE * key_dim * itemsize
        size = values + PAGE_SIZE * value_dim * itemsize
        return Block(key_dim * itemsize, value_dim * itemsize, values, size, size, aligned(size))
    key_row, value_row = PAGE_SIZE * bits // 8, -(-value_dim * bits // 8)
    values = key_dim * key_row
    key_scales = values + PAGE_SIZE * value_row
    value_scales = key_scales + 4 * key_dim
    return Block(key_row, value_row, values, key_scales, value_scales, aligned(value_scales + 4 * PAGE_SIZE))
