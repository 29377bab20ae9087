"""`device_memory`: what it asks of an engine's other options, and how a core is held within it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress

from qbe.engine.core import Core
from qbe.engine.extensions.resident_reads import ResidentReads
from qbe.engine.memory import of_engine
from qbe.errors import QBEError
from qbe.residency.residency import Residency, check_miss
from qbe.residency.size import at_least, parse_size


def check(device_memory: int | str | None, miss: str | None, others: Mapping[str, bool]) -> int | None:
    """The bound in bytes; None without one.

    Args:
        others: what would not go with a bound -> whether it was asked for.

    Raises:
        QBEError: a size that is none, or options that do not go together.
    """
    if device_memory is None:
        if miss is not None:
            raise QBEError("miss says what happens to slices that device_memory leaves out: give that, too")
        return None
    check_miss(miss or "lower")
    size = parse_size("device_memory", device_memory)
    for other, asked in others.items():
        if asked:
            raise QBEError(f"device_memory does not go with {other}: leave one of them out")
    return size


def hold(core: Core, residency: Residency, bound: int) -> None:
    """Places slices so that weights, KV cache and plan take no more than `bound` bytes, and watches requests.

    Raises:
        QBEError: a bound that does not hold what has to be there, or a store that cannot be read.
    """
    core.residency = residency
    memory = of_engine(core)
    rest = memory.describe()["total"]  # the lowest slices included, as nothing else is there yet
    least = rest + residency.least
    if bound < least:
        waits = " and what a step waits for" if residency.waits else ""
        lowest = "dense layers, graphs" if core.device.type == "cuda" else "lowest slices"
        raise QBEError(
            f"device_memory is {bound} bytes, but what always stays on the device takes {at_least(least)}: {lowest}, "
            f"scales and weights that are not nested {at_least(least - memory.kv - residency.least)}, KV cache "
            f"{at_least(memory.kv)}{waits}; give at least that, or a smaller kv_tokens"
        )
    _trim_heap()
    residency.start(core.plan, bound - rest)
    if residency.waits and core.device.type == "cuda":
        core.runner.decode = None  # a graph's experts cannot wait between their router and their products
    core.extensions.append(ResidentReads(residency, core.plan, core.runner))


def _trim_heap() -> None:
    """Give the system back what loading took and freed: glibc keeps it, other C libraries have no such call."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
