"""Amounts of memory as people write them."""

from __future__ import annotations

import math
import re

from qbe.errors import QBEError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.ASCII | re.IGNORECASE)


def parse_size(name: str, size: int | str) -> int:
    """Bytes of a size such as 12GiB, 500MB or a number.

    Args:
        name: of the option, for the error.

    Raises:
        QBEError: anything else, or nothing at all.
    """
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is not None:
        size = round(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**60:
        raise QBEError(f"{name} is {size!r}, but must be a size such as 12GiB, 500MB or a number of bytes")
    return size


def at_least(size: int) -> str:
    """A size that is at least so many bytes, as `parse_size` reads it."""
    unit = next((u for u in ("TiB", "GiB", "MiB") if size >= 10 * _UNITS[u[:2].lower()]), "KiB")
    return f"{math.ceil(10 * size / _UNITS[unit[:2].lower()]) / 10:.1f}{unit}"
