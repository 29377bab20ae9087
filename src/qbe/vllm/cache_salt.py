"""Names of KV blocks that say at which precision they were computed, so that prefixes are shared only among equals.

A request's salt goes into the hash of its first block and from there into all that follow.
"""

from __future__ import annotations

import hashlib
from typing import Any

MARK = "|qbe:"  # parts the caller's own cache salt from ours


def own_salt(salt: str | None) -> str:
    """What the caller gave, of that or of a salt that `cache_salt` made."""
    return (salt or "").partition(MARK)[0]


def cache_salt(callers: str | None, key: str) -> str:
    """The cache salt of a request.

    Args:
        own: what the caller gave, or a salt that this function made.
        key: digest of the model's table, and `Blueprint.computed_key`.
    """
    return f"{own_salt(callers)}{MARK}{key}"


def resalt_blocks(request: Any, start: int, key: str, block: int) -> None:
    """Blocks that end after position `start` have tokens of another blueprint than those before.

    Args:
        key: `Blueprint.computed_key` of the new one.
        block: tokens of a block that has a name.
    """
    if request._block_hasher is None:  # prefix caching is off
        return
    hasher = getattr(request._block_hasher, "inner", request._block_hasher)

    salt = f"{key}@{start}".encode()

    def salted(of: Any) -> list[bytes]:
        return [hashlib.blake2b(h + salt, digest_size=len(h)).digest() for h in hasher(of)]

    salted.inner = hasher  # type: ignore[attr-defined]
    request._block_hasher = salted
    del request.block_hashes[start // block :]  # named when its last token was written, before that was computed
    request.update_block_hashes()
