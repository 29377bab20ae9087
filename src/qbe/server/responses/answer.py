"""How `/v1/responses` is answered: one sequence of events, which go out as they come or add up to the response."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError

from qbe.server import chat
from qbe.server.answer import AnswerReader
from qbe.server.bodies import wrong_body
from qbe.server.endpoint import Answering
from qbe.server.errors import APIError, renamed
from qbe.server.exchange import Exchange
from qbe.server.keys import Client
from qbe.server.protocol import ChatRequest
from qbe.server.requests import Frame
from qbe.server.responses.chat_request import FIELDS, LOGPROBS, chat_request, ignored
from qbe.server.responses.output import Output
from qbe.server.responses.protocol import InputItem, ResponsesRequest
from qbe.server.service import Service
from qbe.server.wire import event

_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {}, "temperature": 1.0,
    "top_p": 1.0, "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "safety_identifier": None, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled",
    "user": None,
}  # fmt: skip


async def begin(body: ResponsesRequest, client: Client, service: Service) -> Answering:
    """Check the body and hand it to the engine. Raises APIError."""
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise APIError(400, f"top_logprobs is given, but include has no '{LOGPROBS}'", param="top_logprobs")
    items = service.responses.conversation(client.name, body.previous_response_id, body.input or ())
    if not items and body.instructions is None:
        raise APIError(400, "input: it is empty: give a text, or the conversation", param="input", code="invalid_value")
    with renamed(FIELDS):
        asked = _asked(body, items)
        exchange = await chat.submit(asked, client, service, "resp_")
    answer = _Response(body, asked, items, service, exchange)
    return Answering(exchange, answer.stream, answer.whole)


def _asked(body: ResponsesRequest, items: list[InputItem]) -> ChatRequest:
    try:
        return chat_request(body, items)
    except ValidationError as error:
        raise wrong_body(error) from None


class _Response:
    """One response while it is written.

    Args:
        body, asked: what was sent, and the same as a chat request.
        items: the whole conversation.
    """

    def __init__(
        self, body: ResponsesRequest, asked: ChatRequest, items: list[InputItem], service: Service, exchange: Exchange
    ) -> None:  # fmt: skip
        self._body, self._asked, self._items = body, asked, items
        self._service, self._exchange = service, exchange
        self._output, self._created = Output(), int(time.time())

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; hanging up cancels it."""
        number = 0
        try:
            async for sent in self._events():
                yield _numbered(sent, number)
                number += 1
        except APIError as error:
            failed = self._describe("failed", error={"code": error.code or "server_error", "message": error.message})
            yield _numbered({"type": "response.failed", "response": failed}, number)
        finally:
            self._exchange.over()

    async def whole(self) -> dict[str, Any]:
        """The response. Raises APIError."""
        response: dict[str, Any] = {}
        try:
            async for sent in self._events():
                response = sent.get("response", response)
        finally:
            self._exchange.over()
        return response

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        reader, output, reason = AnswerReader(self._asked), self._output, ""
        begun = self._describe("in_progress")
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        with renamed(FIELDS):
            async for _, delta in self._exchange.deltas():
                logprobs = self._service.token_text.within(delta.logprobs)
                shown = self._service.token_text.for_chat(logprobs) if self._asked.logprobs else []
                for sent in output.push(reader.pieces(delta), shown):
                    yield sent
                reason = reason if delta.result is None else reader.reason(delta.result)
        status = "incomplete" if reason == "length" else "completed"
        for sent in output.close(status):
            yield sent
        usage = await Frame("response", self._service, self._exchange).usage([output.answer()])
        response = self._describe(status, usage=self._usage(usage))
        if self._body.store is not False:
            self._service.responses.put(self._exchange.asked.client.name, response, self._items)
        yield {"type": f"response.{status}", "response": response}

    def _describe(self, status: str, **more: Any) -> dict[str, Any]:
        """The response as it is now."""
        body, terms = self._body, self._exchange.asked.terms
        given = body.model_dump(by_alias=True, exclude_none=True, include={*_ECHOED, "text", "reasoning"})
        text = {"format": {"type": "text"}} | given.pop("text", {})
        reasoning = {"effort": None, "summary": None} | given.pop("reasoning", {})
        return {
            "id": self._exchange.id, "object": "response", "created_at": self._created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **_ECHOED, **given, "model": self._service.names[0], "output": [*self._output.items],
            "background": False, "service_tier": terms.tier, "store": body.store is not False, "text": text,
            "reasoning": reasoning, "usage": None, **more,
        }  # fmt: skip

    def _usage(self, chat: dict[str, Any]) -> dict[str, Any]:
        """That of chat completions under the names that it has here."""
        names = ignored(self._body, chat["qbe"].pop("ignored", ()))
        return {
            "input_tokens": chat["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": chat["prompt_tokens_details"]["cached_tokens"],
                                     "cache_write_tokens": 0},
            "output_tokens": chat["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": chat["total_tokens"],
            "cost": chat["cost"],
            "qbe": chat["qbe"] | ({"ignored": names} if names else {}),
        }  # fmt: skip


def _numbered(sent: dict[str, Any], number: int) -> bytes:
    return event({"type": sent["type"], "sequence_number": number} | sent, sent["type"])
