"""Carbon intensity of the grid, grams of CO2 a kilowatt-hour, from where the settings say: a number, a file, a URL."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qbe.errors import QBEError

log = logging.getLogger(__name__)

_LIMIT_S = 5.0  # for an answer, all of it
_BYTES = 65536
_KEPT_S = 3600.0  # how long the last number stands in for one that cannot be had


def check(source: str, field: str) -> None:
    """Raises ValueError, in one line, for a source that can never be asked."""
    if not source or not (source + field).isprintable():
        raise ValueError("intensity and intensity_field must be text without control characters")
    if not _is_url(source):
        return
    parts = urlsplit(source)  # with port, it raises, too
    if re.search(r"\s", source) or not (parts.path + parts.query).isascii():
        raise ValueError("an intensity's URL must not have white space or, after its host, other than ASCII: escape it")
    if not parts.hostname or parts.port == 0 or "@" in parts.netloc:
        raise ValueError("an intensity's URL must be http(s)://HOST[:PORT]/…, without a user")


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
        value: Any = json.loads(_answer(source) if _is_url(source) else _content(source))
        for name in filter(None, field.split(".")):
            value = value[int(name)] if isinstance(value, list) else value[name]
        if isinstance(value, bool):
            raise TypeError("it is no number")
        number = float(value)
    except Exception as error:  # others say what comes: broken HTTP, JSON as deep or numbers as long as they like
        where = f" at '{field}'" if field else ""
        raise QBEError(f"the carbon intensity of {source}{where} cannot be had: {error!r:.200}") from None
    if not 0 <= number < math.inf:
        raise QBEError(f"the carbon intensity of {source} is {number}, but must be a number of at least 0")
    return number


def _is_url(source: str) -> bool:
    return re.match(r"\s*https?:", source, re.IGNORECASE) is not None


def _answer(url: str) -> str:
    ends, text = time.monotonic() + _LIMIT_S, b""
    with urllib.request.urlopen(url, timeout=_LIMIT_S) as answer:
        while len(text) < _BYTES and (more := answer.read1(_BYTES)):
            text += more
            if time.monotonic() > ends:  # the limit above is of each read
                raise TimeoutError("the answer is too slow")
    return text.decode()


def _content(path: str) -> str:
    with Path(path).open(encoding="utf-8") as file:
        return file.read(_BYTES)


@dataclass(eq=False)
class _Reading:
    """What is known of one source. Its thread alone writes into it, so that a late answer is never another source's.

    Attributes:
        found: when it said something last, and what.
        failing: whether that it fails was logged.
        thread: which asks it.
    """

    source: float | str | None = None
    field: str = ""
    found: tuple[float, float] | None = None
    failing: bool = False
    thread: threading.Thread | None = None


class Intensity:
    """The last intensity that could be had of the source that was asked last.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._asked = clock, _Reading()

    @property
    def now(self) -> float | None:
        """Grams a kilowatt-hour; None when nothing is known, or nothing new for an hour."""
        source, reading = self._asked.source, self._asked.found
        if isinstance(source, float):
            return source
        return None if reading is None or self._clock() - reading[0] > _KEPT_S else reading[1]

    def renew(self, source: float | str | None, field: str) -> None:
        """Ask again; it may take seconds. What fails is logged once. Another source than before has no past.

        An answer that is still on its way then counts when it comes, and is not asked for a second time.

        Args:
            source, field: as in `fetch`; None: there is none any more.
        """
        asked = self._asked
        if (source, field) != (asked.source, asked.field):
            asked = self._asked = _Reading(source, field)
        if not isinstance(source, str):
            return
        if asked.thread is None or not asked.thread.is_alive():
            # A thread of its own: looking up a host, or opening a pipe, has no limit of time, and must not keep the
            # process from ending.
            asked.thread = threading.Thread(target=self._ask, args=(asked, source), name="qbe-intensity", daemon=True)
            asked.thread.start()
        asked.thread.join(_LIMIT_S)
        if asked.thread.is_alive():
            _failed(asked, f"the carbon intensity of {source} has not come in {_LIMIT_S:g} s")

    def _ask(self, asked: _Reading, source: str) -> None:
        try:
            asked.found = self._clock(), fetch(source, asked.field)
            asked.failing = False
        except QBEError as error:
            _failed(asked, str(error))


def _failed(asked: _Reading, why: str) -> None:
    if not asked.failing:
        log.warning("%s; the last one counts for an hour", why)
    asked.failing = True
