"""How `/v1/messages` is answered: one sequence of events, which go out as they come or add up to the message."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from qbe.server import chat
from qbe.server.answer import AnswerReader, Piece
from qbe.server.anthropic.chat_request import FIELDS, chat_request, ignored
from qbe.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from qbe.server.bodies import wrong_body
from qbe.server.call_reader import Arguments, Begun, Text
from qbe.server.endpoint import Answering
from qbe.server.errors import APIError, renamed
from qbe.server.exchange import Exchange
from qbe.server.job import Delta
from qbe.server.keys import Client
from qbe.server.protocol import ChatRequest
from qbe.server.requests import Answer, Frame
from qbe.server.service import Service
from qbe.server.wire import event

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def begin(body: MessagesRequest, client: Client, service: Service) -> Answering:
    """Check the body and hand it to the engine. Raises APIError."""
    with renamed(FIELDS):
        asked = _asked(body)
        exchange = await chat.submit(asked, client, service, "msg_")
    answer = _Message(body, asked, service, exchange)
    return Answering(exchange, answer.stream, answer.whole)


async def count_tokens(body: CountTokensRequest, client: Client, service: Service) -> dict[str, int]:
    """How many tokens the prompt of a message has. Raises APIError."""
    with renamed(FIELDS):
        return {"input_tokens": await chat.count_tokens(_asked(body), client, service)}


def _asked(body: CountTokensRequest) -> ChatRequest:
    try:
        return chat_request(body)
    except ValidationError as error:
        raise wrong_body(error) from None


class _Content:
    """The blocks of an answer while it is read, and the events that tell of them."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last of them goes on
        self._arguments: list[str] = []  # of each call so far

    def push(self, pieces: Iterable[Piece]) -> Iterator[dict[str, Any]]:
        """Events of new pieces."""
        for piece in pieces:
            if isinstance(piece, Text):
                if not self._open or self.blocks[-1]["type"] != "text":
                    yield from self._begin({"type": "text", "text": ""})
                self.blocks[-1]["text"] += piece.text
                yield self._delta({"type": "text_delta", "text": piece.text})
            elif isinstance(piece, Begun):
                self._arguments.append("")
                yield from self._begin({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            elif isinstance(piece, Arguments):
                self._arguments[-1] += piece.text
                yield self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Events of the end; without any piece there is an empty text."""
        if not self.blocks:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end()

    def answer(self) -> Answer:
        """Its text and calls."""
        text = "".join(b["text"] for b in self.blocks if b["type"] == "text")
        names = [b["name"] for b in self.blocks if b["type"] == "tool_use"]
        return text, list(zip(names, self._arguments, strict=True))

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self.blocks.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": {**block}}

    def _end(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        self._open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = _object(self._arguments[-1])
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


class _Message:
    """One message while it is written.

    Args:
        body: what was sent.
        asked: the same as a chat request.
    """

    def __init__(self, body: MessagesRequest, asked: ChatRequest, service: Service, exchange: Exchange) -> None:
        self._body, self._asked, self._service, self._exchange = body, asked, service, exchange
        self._content = _Content()

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; hanging up cancels it."""
        try:
            async for sent in self._events():
                yield event(sent, sent["type"])
        except APIError as error:
            yield event(error.anthropic_body(self._exchange.request_id), "error")
        finally:
            self._exchange.over()

    async def whole(self) -> dict[str, Any]:
        """The message. Raises APIError."""
        message: dict[str, Any] = {}
        try:
            async for sent in self._events():
                if sent["type"] == "message_start":
                    message = sent["message"]
                elif sent["type"] == "message_delta":
                    message |= sent["delta"] | {"usage": sent["usage"]}
        finally:
            self._exchange.over()
        return message | {"content": self._content.blocks}

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        reader, content, last = AnswerReader(self._asked), self._content, None
        with renamed(FIELDS):
            async for _, delta in self._exchange.deltas():
                if last is None:
                    yield {"type": "message_start", "message": self._begun(delta)}
                    yield {"type": "ping"}
                last = delta
                for sent in content.push(reader.pieces(delta)):
                    yield sent
        assert last is not None
        assert last.result is not None
        for sent in content.close():
            yield sent
        usage = await Frame("message", self._service, self._exchange).usage([content.answer()])
        stopped = last.result.stop_reason if last.result.stop_reason in (self._asked.stop or ()) else None
        reason = _REASONS[reader.reason(last.result)]
        ended = {"stop_reason": "stop_sequence" if stopped is not None and reason == "end_turn" else reason,
                 "stop_sequence": stopped}  # fmt: skip
        yield {"type": "message_delta", "delta": ended, "usage": self._usage(usage)}
        yield {"type": "message_stop"}

    def _begun(self, delta: Delta) -> dict[str, Any]:
        """The message when nothing of it is written, but its prompt is read."""
        read = sum(job.choice[1].prompt_tokens for job in self._exchange.jobs)
        return {
            "id": self._exchange.id, "type": "message", "role": "assistant", "model": self._service.names[0],
            "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": _read(read, min(delta.cached_tokens, read)) | {"output_tokens": len(delta.tokens)},
        }  # fmt: skip

    def _usage(self, chat: dict[str, Any]) -> dict[str, Any]:
        """That of chat completions under the names that it has here."""
        names = ignored(self._body, chat["qbe"].pop("ignored", ()))
        return {
            **_read(chat["prompt_tokens"], chat["prompt_tokens_details"]["cached_tokens"]),
            "output_tokens": chat["completion_tokens"],
            "cost": chat["cost"],
            "qbe": chat["qbe"] | {"tier": self._exchange.asked.terms.tier} | ({"ignored": names} if names else {}),
        }


def _read(tokens: int, cached: int) -> dict[str, int]:
    """Anthropic counts what the cache had apart."""
    return {"input_tokens": tokens - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which may have been cut off."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
