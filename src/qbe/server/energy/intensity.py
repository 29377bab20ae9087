"""Carbon intensity of the grid, grams of CO2 a kilowatt-hour, from where the settings say: a number, a file, a URL."""

from __future__ import annotations

import json
import logging
import math
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qbe.errors import QBEError

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_BYTES = 65536
_KEPT_S = 3600.0  # how long the last number stands in for one that cannot be had


def fetch(source: float | str, field: str = "") -> float:
    """The intensity now.

    Args:
        source: the number itself, a path, or an http(s) URL.
        field: where in the JSON of a file or answer it is, names and numbers with dots: `data.0.intensity.actual`.
            Empty: the text is the number.

    Raises:
        QBEError: it cannot be had, or is no number of at least 0.
    """
    if not isinstance(source, str):
        return source
    try:
        if urlsplit(source).scheme in ("http", "https"):
            with urllib.request.urlopen(source, timeout=_TIMEOUT_S) as answer:
                text = answer.read(_BYTES).decode()
        else:
            with Path(source).open(encoding="utf-8") as file:
                text = file.read(_BYTES)
        found: Any = json.loads(text)
        for name in filter(None, field.split(".")):
            found = found[int(name)] if isinstance(found, list) else found[name]
        number = float(found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        where = f" at '{field}'" if field else ""
        raise QBEError(f"the carbon intensity of {source}{where} cannot be had: {error!r}") from None
    if not 0 <= number < math.inf:
        raise QBEError(f"the carbon intensity of {source} is {number}, but must be a number of at least 0")
    return number


class Intensity:
    """The last intensity that could be had.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: tuple[float, float] | None = None  # when, and what
        self._failing = False

    @property
    def now(self) -> float | None:
        """Grams a kilowatt-hour; None when nothing is known, or nothing new for an hour."""
        if self._found is None or self._clock() - self._found[0] > _KEPT_S:
            return None
        return self._found[1]

    def renew(self, source: float | str, field: str) -> None:
        """Ask again; it may take seconds. What fails is logged once."""
        try:
            self._found = self._clock(), fetch(source, field)
            self._failing = False
        except QBEError as error:
            if not self._failing:
                log.warning("%s; the last one counts for an hour", error)
            self._failing = True
