"""Names of KV blocks that say at which precision they were computed, so that prefixes are shared only among equals.

A request's salt goes into the hash of its first block and from there into all that follow.
"""

from __future__ import annotations

import hashlib
from typing import Any

MARK = "|qbe:"  # parts the caller's own cache salt from ours


def salt_of(own: str | None, key: str) -> str:
    """The cache salt of a request.

    Args:
        own: what the caller gave, or a salt that this function made.
        key: `Blueprint.computed_key`.
    """
    return f"{(own or '').partition(MARK)[0]}{MARK}{key}"


def resalt(request: Any, key: str) -> None:
    """Blocks that get their names from now on were computed at another blueprint than those before."""
    if request._block_hasher is None:  # prefix caching is off
        return
    hasher = getattr(request._block_hasher, "inner", request._block_hasher)

    def salted(of: Any) -> list[bytes]:
        return [hashlib.blake2b(h + key.encode(), digest_size=len(h)).digest() for h in hasher(of)]

    salted.inner = hasher  # type: ignore[attr-defined]
    request._block_hasher = salted


def prefix_salt(request: Any, key: str) -> None:
    """All blocks of the request will be computed anew, at this blueprint: they get new names."""
    request.cache_salt = salt_of(request.cache_salt, key)
    if request._block_hasher is None:
        return
    request._block_hasher = getattr(request._block_hasher, "inner", request._block_hasher)
    request.block_hashes.clear()
    request.update_block_hashes()
