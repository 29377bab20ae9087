"""What a page's contents are known by, so that sequences that begin alike share pages.

Known pages form trees: one for each salt, a page below the page before it. Pages with the same tokens below the same
page differ in the precision at which they were written. So a way down a tree is what some sequence had.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from qbe.blueprint import Blueprint, kv_covers
from qbe.sites import KVBits


@dataclass(frozen=True)
class PagePrecision:
    """At what a page was written.

    Attributes:
        blueprint: that its keys and values were computed at.
        kv_bits: that they were quantised at, as in `Blueprint.kv_bits`.
    """

    blueprint: Blueprint
    kv_bits: tuple[KVBits, ...]

    def excess(self, asked: PagePrecision, more: bool, more_kv: bool) -> int | None:
        """How far a page written at this is above what `asked` is: 0 for no more, 1 where keys and values have more
        bits, 2 where they were computed with more, 3 for both; None where it is not above it, or may not be.

        Args:
            more: whether it may have been computed with more bits.
            more_kv: whether it may have been quantised with more bits.
        """
        computed = self.blueprint.computed_key != asked.blueprint.computed_key
        quantised = self.kv_bits != asked.kv_bits
        if computed and not (more and self.blueprint.covers(asked.blueprint)):
            return None
        if quantised and not (more_kv and kv_covers(self.kv_bits, asked.kv_bits)):
            return None
        return 2 * computed + quantised


def tokens_key(before: bytes, tokens: Sequence[int], pictures: bytes = b"") -> bytes:
    """A name for full pages that differ in nothing but their precision.

    Args:
        before: key of the page before them; for first pages the sequence's salt.
        tokens: of the page.
        pictures: the digests of those that have rows in it.
    """
    return hashlib.blake2b(before + array("q", tokens).tobytes() + pictures, digest_size=16).digest()


def page_key(alike: bytes, written: PagePrecision) -> bytes:
    """A name for the keys and values of a full page.

    They depend on the tokens and pictures of the page and of all pages before it, on the bits of weights and
    activations at which they were computed, and on those at which this page and the ones before it were quantised.

    Args:
        alike: `tokens_key` of the page.
    """
    contents = alike + written.blueprint.computed_key.encode() + repr(written.kv_bits).encode()
    return hashlib.blake2b(contents, digest_size=16).digest()
