"""Reads calls out of an answer, however it is cut into pieces or cut off."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from qbe.engine.detokenize import overlap

OPEN = '<tool_call>\n{"name": '
ARGUMENTS = ', "arguments": '
CLOSE = "}\n</tool_call>"
RAW = "}\n"  # where a text follows that is not JSON
RAW_CLOSE = "\n</tool_call>"


@dataclass(frozen=True)
class Text:
    """A piece of an answer that is no call."""

    text: str


@dataclass(frozen=True)
class Begun:
    """A call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments, which are JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class Custom:
    """A call of a custom tool, whole."""

    index: int
    id: str
    name: str
    input: str


class Reader:
    """Reads an answer piece by piece. What may be the beginning of a tag is held back.

    Args:
        tools: whether there may be calls.
        custom: names of custom tools.

    Attributes:
        calls: how many have begun.
    """

    def __init__(self, tools: bool, custom: Collection[str] = ()) -> None:
        self.calls = 0
        self._held, self._within, self._tools, self._custom = "", "text", tools, custom
        self._call: Begun | None = None  # of a custom tool
        self._input = ""

    def push(self, text: str, last: bool = False) -> Iterator[Text | Begun | Arguments | Custom]:
        """What became certain.

        Args:
            last: nothing follows.
        """
        self._held += text
        while self._tools:
            if self._within == "name":
                if not (begun := self._begin()):
                    return
                yield from begun
            tag = {"text": OPEN, "raw": RAW_CLOSE}.get(self._within, CLOSE)
            piece, opened, rest = self._held.partition(tag)
            if not opened:
                break
            yield from self._piece(piece)
            yield from self._end()
            self._within, self._held = ("name", rest) if self._within == "text" else ("text", rest.removeprefix("\n"))
        keep = overlap(self._held, tag) if self._tools else 0
        if last and keep < (len("<tool_call>") if self._within == "text" else len("}\n<")):
            keep = 0  # it was no tag; longer ones are of a call that was cut off
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._piece(piece)
        if last:
            yield from self._end()

    def _begin(self) -> list[Begun] | None:
        """The call whose name is complete; of a custom one nothing is told before its end. None: it is not."""
        ends = [(begin, tag, within) for tag, within in ((ARGUMENTS, "arguments"), (RAW, "raw"))
                if (begin := self._held.find(tag)) >= 0]  # fmt: skip
        if not ends:
            return None
        begin, tag, self._within = min(ends)
        begun = Begun(self.calls, f"call_{uuid.uuid4().hex[:24]}", json.loads(self._held[:begin]))
        self._held = self._held[begin + len(tag) :]
        self.calls += 1
        self._call, self._input = (begun, "") if begun.name in self._custom else (None, "")
        return [] if self._call else [begun]

    def _end(self) -> Iterator[Custom]:
        if self._call is not None:
            said = self._input if self._within == "raw" else _input_of(self._input)
            yield Custom(self._call.index, self._call.id, self._call.name, said)
            self._call = None

    def _piece(self, piece: str) -> Iterator[Text | Arguments]:
        if self._call is not None:
            self._input += piece
        elif self._within != "text":
            if piece:
                yield Arguments(self.calls - 1, piece)
        elif piece and not (self.calls and not piece.strip()):  # the line between two calls
            yield Text(piece)


def _input_of(arguments: str) -> str:
    """The text in the arguments of a custom tool's call, which may have been cut off."""
    for end in ("", '"}', '""}', "}"):
        try:
            return str(json.loads(arguments + end)["input"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return ""
