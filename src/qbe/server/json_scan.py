"""Where in a JSON text one is: enough of it to know what grows without an end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Where = Literal["all", "calls"]  # all of an answer is JSON, or what follows `<tool_call>`
_CALL = b"<tool_call>"

_DIGITS = frozenset(b"0123456789")
_NUMBER = _DIGITS | frozenset(b"+-.eE")


@dataclass
class JSONScan:
    """Follows JSON byte by byte; what comes before its first bracket or quote is passed over.

    Attributes:
        stack: the open brackets, and of each the items so far.
        string: bytes of the string that is open; None outside of one.
        digits: of the number that is being written.
        ended: whether the value is complete.
    """

    stack: list[list[int]] = field(default_factory=list)
    string: int | None = None
    digits: int = 0
    ended: bool = False
    _escaped: bool = False

    def feed(self, text: bytes) -> int:
        """Take more; returns how much of it belonged to the value."""
        for n, byte in enumerate(text):
            if self.ended:
                return n
            self._take(byte)
        return len(text)

    def _take(self, byte: int) -> None:
        if self.string is not None:
            if self._escaped:
                self._escaped = False
            elif byte == 0x5C:
                self._escaped = True
            elif byte == 0x22:
                self.string = None
                self.ended = not self.stack
                return
            self.string += 1
            return
        self.digits = self.digits + (byte in _DIGITS) if byte in _NUMBER else 0
        if byte == 0x22:
            self.string = 0
        elif byte in b"[{":
            self.stack.append([byte, 1])
        elif byte in b"]}" and self.stack:
            self.stack.pop()
            self.ended = not self.stack
        elif byte == 0x2C and self.stack:
            self.stack[-1][1] += 1

    @property
    def items(self) -> int:
        """Of the longest array or object that is open."""
        return max((count for _, count in self.stack), default=0)

    def copy(self) -> JSONScan:
        """The same place."""
        return JSONScan([list(s) for s in self.stack], self.string, self.digits, self.ended, self._escaped)


class AnswerScan:
    """Follows the JSON in an answer.

    Args:
        where: it is; None: nowhere.

    Attributes:
        json: the value that one is in; None between two.
    """

    def __init__(self, where: Where | None) -> None:
        self._where = where
        self.json: JSONScan | None = JSONScan() if where == "all" else None
        self._tail = b""  # of what is no JSON

    def feed(self, text: bytes) -> None:
        """Take more."""
        while text and self._where is not None:
            if self.json is not None:
                text = text[self.json.feed(text) :]
                if self.json.ended:
                    self.json = JSONScan() if self._where == "all" else None
                continue
            _, opened, after = (self._tail + text).partition(_CALL)
            self._tail = b"" if opened else (self._tail + text)[-len(_CALL) :]
            if not opened:
                return
            self.json, text = JSONScan(), after

    def copy(self) -> AnswerScan:
        """The same place."""
        copied = AnswerScan(None)
        copied._where, copied._tail = self._where, self._tail
        copied.json = None if self.json is None else self.json.copy()
        return copied

    @property
    def in_string(self) -> bool:
        """Whether a string of JSON is open."""
        return self.json is not None and self.json.string is not None
