"""Where the numbers of the KV cache lie in memory, at each precision. Pure arithmetic; kernels and cache share it.

A page holds `PAGE_SIZE` tokens of one sequence at every layer. It consists of blocks, one for each layer and key head,
and each block is of a kind of its own. All kinds but the first hold rotated keys and values
(`qbe.kernels.reference.rotation`).

    16        keys [PAGE_SIZE, key_dim], then values [PAGE_SIZE, value_dim], in the model's dtype
    8, 4, 2   keys uint8 [key_dim, PAGE_SIZE * bits / 8], values uint8 [PAGE_SIZE, ceil(value_dim * bits / 8)],
              of the keys float16 scale [key_dim] and low [key_dim], of the values scale [PAGE_SIZE] and low [PAGE_SIZE]
    turbo4,   the same, but of the keys float16 scale [PAGE_SIZE], sketch scale [PAGE_SIZE] and mean [key_dim], up to a
    turbo2    multiple of 4 bytes

A number is scale * code + low. Keys share scales along a channel, because their outliers stay in a few channels; values
along a token (KIVI, Liu et al. 2024). Code i of a row is in byte i * bits // 8, the first one in its lowest bits.

On a GPU codes lie the other way around: keys uint8 [PAGE_SIZE, R], values uint8 [value_dim, R], where a row of m codes
has R = ceil(m * bits / 8) bytes and code i is field i // R of byte i % R. One shift and one mask of a tile of bytes is
then an operand of the tensor cores, and the numbers that these add up lie side by side. Each low or sketch scale lies
beside its scale.

Turbo keys follow TurboQuant (Zandieh et al. 2025): a token's key is mean + scale * levels + sketch scale * sketch. All
bits of a code but the highest name a level: a sign (1 is plus), below it an index into `LEVELS`. The highest bit is of
a sketch of what the levels leave over: the signs of its numbers after one more rotation (QJL, Zandieh et al. 2024). Its
scale makes the remainder's product with its own sketch exact, and those with all other vectors unbiased (RaBitQ, Gao
and Long 2024).

Two words lead a kernel to a block. A page's entry is its address in bytes | the number of its format; a format's word
for a layer and head is the block's offset in the page | its kind: its bits, and `TURBO`. Addresses and offsets are
multiples of `ALIGN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from qbe.sites import FULL_BITS, KV_BITS, TURBO, kv_number_bits

__all__ = [
    "ALIGN",
    "FORMATS",
    "FULL_BITS",
    "KV_BITS",
    "NO_ORIGINAL",
    "PAGE_SIZE",
    "STRETCH",
    "TURBO",
    "HeadLayout",
    "aligned",
    "head_layout",
    "quantised_pages",
]

PAGE_SIZE = 64
STRETCH = 8  # pages, see `quantised_pages`
ALIGN = 256
FORMATS = ALIGN  # numbers that an entry has room for
NO_ORIGINAL = -1  # in a table of originals (`qbe.kernels.ops.bounded_attention`), a page that has none

# Magnitudes that turbo keys of 2 and 4 bits have (with a sign 1 and 3 bits): those of Lloyd and Max (1960) for the
# normal distribution in whole numbers, so that they are exact in every dtype, and the standard deviation in that unit.
LEVELS = {2: (1,), 4: (7, 22, 39, 63)}
DEVIATION = {2: 1.2533, 4: 29.275}


def quantised_pages(full: int) -> int:
    """How many of the `full` pages that a sequence has filled its next one looks back on as they are quantised.

    All but the last: a token looks most at what was just before it (KIVI, Liu et al. 2024, keeps a window of such
    tokens at 16 bits). A stretch of pages begins without that, so that another sequence can go on after the quantised
    pages of whole stretches and see what this one saw.
    """
    return full - (full % STRETCH > 0)


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class HeadLayout:
    """A block's parts, in bytes from its beginning; scales are followed by as many lows or sketch scales.

    Attributes:
        kind, key_dim, value_dim: what it holds.
        itemsize: of the model's dtype, in bytes.
    """

    kind: int
    key_dim: int
    value_dim: int
    itemsize: int

    @property
    def bits(self) -> int:
        """Of a number, scales not counted."""
        return kv_number_bits(self.kind)

    @property
    def key_row(self) -> int:
        """Bytes of a row of keys (on a CPU)."""
        return self.key_dim * self.itemsize if self.bits == FULL_BITS else PAGE_SIZE * self.bits // 8

    @property
    def value_row(self) -> int:
        """Bytes of a row of values (on a CPU)."""
        return self.value_dim * self.itemsize if self.bits == FULL_BITS else -(-self.value_dim * self.bits // 8)

    @property
    def values(self) -> int:
        """Where values begin; keys begin at 0."""
        return PAGE_SIZE * (self.key_row if self.bits == FULL_BITS else -(-self.key_dim * self.bits // 8))

    @property
    def key_scales(self) -> int:
        """Where the keys' scales begin, for less than 16 bits."""
        return self.values + PAGE_SIZE * self.value_row

    @property
    def value_scales(self) -> int:
        """Where the values' scales begin, for less than 16 bits."""
        if self.kind < TURBO:
            return self.key_scales + 4 * self.key_dim
        return self.key_scales + 4 * PAGE_SIZE + 2 * (self.key_dim + self.key_dim % 2)

    @property
    def nbytes(self) -> int:
        """The whole, aligned."""
        return aligned(self.key_scales if self.bits == FULL_BITS else self.value_scales + 4 * PAGE_SIZE)


head_layout = cache(HeadLayout)
