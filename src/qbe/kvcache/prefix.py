"""What a page's contents are known by, so that sequences that begin alike share pages."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def page_key(before: bytes, blueprint: str, tokens: Sequence[int]) -> bytes:
    """A name for the keys and values of a full page.

    They depend on the tokens of the page and of all pages before it, and on the bits at which they were computed and
    stored: weights, activations and KV cache.

    Args:
        before: key of the page before it; empty for the first one.
        blueprint: `Blueprint.key`.
        tokens: of the page.
    """
    return hashlib.blake2b(before + blueprint.encode() + array("q", tokens).tobytes(), digest_size=16).digest()
