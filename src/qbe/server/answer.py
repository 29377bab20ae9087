"""A chat answer while it is read: its text, its calls, and how it ended. All forms of it are made of these pieces."""

from __future__ import annotations

from collections.abc import Iterator

from qbe.engine.result import Result
from qbe.server import tools
from qbe.server.call_reader import Arguments, Begun, Custom, Reader, Text
from qbe.server.job import Delta
from qbe.server.protocol import ChatRequest

Piece = Text | Begun | Arguments | Custom


class AnswerReader:
    """Reads one answer to a request.

    Args:
        body: the request.
    """

    def __init__(self, body: ChatRequest) -> None:
        offered = tools.offered(body)
        self._reader = Reader(bool(offered), {t.name for t in offered if t.custom is not None})

    def pieces(self, delta: Delta) -> Iterator[Piece]:
        """What became certain with this delta."""
        return self._reader.push(delta.text, last=delta.result is not None)

    def reason(self, result: Result) -> str:
        """OpenAI's finish reason: `stop`, `length` or `tool_calls`."""
        if result.finish_reason == "stop" and self._reader.calls:
            return "tool_calls"
        return "length" if result.finish_reason == "cancelled" else result.finish_reason  # cut at `max_latency_ms`
