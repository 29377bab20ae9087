"""Looking at something again and again, whatever a look comes to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from qbe.errors import QBEError


async def watch(seconds: float, look: Callable[[], Awaitable[bool]], failed: Callable[[str], None]) -> None:
    """Never returns: a loop that an error ended would never again see that a key was revoked.

    Args:
        look: called every so many seconds; whether that shows that what failed before is well again.
        failed: told of an error in one line, once until all is well or it is another.
    """
    said = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            if await look():
                said = ""
        except Exception as error:
            why = _line(error)
            if why != said:
                failed(why)
            said = why


def _line(error: Exception) -> str:
    """An error, in one line; of a defect, its kind too."""
    return " ".join((str(error) if isinstance(error, QBEError) else f"a defect: {error!r}").split())
