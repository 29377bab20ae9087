"""The most bits that a row may read of each site: what is resident of it (`qbe.residency`).

As with shared reading, a row whose precision changes has another column of the plan; nothing else knows of it. Where
its blueprint asks for more than is there, the row reads the nearest precision that is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qbe.blueprint import Blueprint

_KEPT = 256  # blueprints whose limited form is remembered


class ReadLimits:
    """Limits the rows of steps.

    Args:
        bits: int64 [nested sites].

    Attributes:
        bits: as `set` had them last.
    """

    def __init__(self, bits: npt.NDArray[np.int64]) -> None:
        self.bits = bits
        self._known: OrderedDict[str, Blueprint] = OrderedDict()  # least recently used first

    def set(self, bits: npt.NDArray[np.int64]) -> None:
        """From the next step on."""
        if not np.array_equal(bits, self.bits):
            self.bits = bits.copy()
            self._known.clear()

    def of(self, blueprint: Blueprint) -> Blueprint:
        """What a row with this blueprint reads; its KV bits mean nothing."""
        key = blueprint.linear_key
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        asked = np.asarray(blueprint.weight_bits, np.int64)
        read = np.minimum(asked, self.bits)
        limited = blueprint if (read == asked).all() else replace(blueprint, weight_bits=tuple(read.tolist()))
        if len(self._known) == _KEPT:
            self._known.popitem(last=False)
        self._known[key] = limited
        return limited
