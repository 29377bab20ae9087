"""The one exception a user sees: a clear line that says what, where and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class QBEError(Exception):
    """Bad input or a refused request. The command line prints the message alone and exits with code 2.

    Args:
        message: one line: what is wrong, where, and what to do about it.
        field: of a request, that it is about, as `Request`, `SamplingParams` or `Budget` call it; None: of none.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@contextmanager
def about(field: str) -> Iterator[None]:
    """What is refused within is about this field of a request, unless it says itself what it is about."""
    try:
        yield
    except QBEError as error:
        error.field = error.field or field
        raise
