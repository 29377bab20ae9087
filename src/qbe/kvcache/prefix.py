"""What a page's contents are known by, so that sequences that begin alike share pages."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from qbe.sites import KVBits


def page_key(before: bytes, computed: str, kv_bits: Sequence[KVBits], tokens: Sequence[int]) -> bytes:
    """A name for the keys and values of a full page.

    They depend on the tokens of the page and of all pages before it, on the bits of weights and activations at which
    they were computed, and on those at which this page and the ones before it were quantised.

    Args:
        before: key of the page before it; for the first one the sequence's salt.
        computed: `Blueprint.computed_key`.
        kv_bits: of the page, as in `Blueprint.kv_bits`.
        tokens: of the page.
    """
    contents = before + computed.encode() + repr(tuple(kv_bits)).encode() + array("q", tokens).tobytes()
    return hashlib.blake2b(contents, digest_size=16).digest()
