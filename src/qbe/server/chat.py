"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from qbe.errors import QBEError
from qbe.server import tools
from qbe.server.answer import AnswerReader
from qbe.server.call_reader import Arguments, Begun, Custom
from qbe.server.endpoint import Answering
from qbe.server.errors import APIError
from qbe.server.exchange import EngineRequest, Exchange
from qbe.server.job import Delta
from qbe.server.keys import Client
from qbe.server.protocol import ChatRequest
from qbe.server.requests import Answer, Frame, check_model, check_stream, ignored, sampling, terms, variables
from qbe.server.service import Service
from qbe.server.structure import Structure, of_format, of_tools
from qbe.server.wire import DONE, event


async def begin(body: ChatRequest, client: Client, service: Service) -> Answering:
    """Check the body and hand it to the engine. Raises APIError."""
    exchange = await submit(body, client, service)
    return Answering(exchange, lambda: stream(body, service, exchange), lambda: whole(body, service, exchange))


async def submit(body: ChatRequest, client: Client, service: Service, prefix: str = "chatcmpl-") -> Exchange:
    """Check the body and hand it to the engine.

    Args:
        prefix: of the answer's id.

    Raises:
        APIError: the body cannot be served.
    """
    check_model(body, service)
    check_stream(body)
    engine = service.engine()
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs is given, but logprobs is not true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise APIError(400, "max_tokens is the old name of max_completion_tokens: give one of them", param="max_tokens")
    offered = tools.offered(body)
    if offered:
        wanted: Structure | None = await of_tools(body, offered, service)
    else:
        wanted = await of_format(body.response_format, service)
    asked = body.max_tokens or body.max_completion_tokens
    prompt = _prompt(body, engine.tokenizer)
    return await service.begin(
        EngineRequest(
            client=client,
            prompts=[prompt.messages],
            params=sampling(body, asked or service.settings.limits.answer_tokens,
                            (body.top_logprobs or 0) if body.logprobs else None),
            n=body.n or 1,
            terms=terms(body, client, service),
            tools=prompt.tools,
            structure=wanted,
            variables=prompt.variables,
            ignored=ignored(body, str(getattr(engine.tokenizer, "chat_template", "") or "")),
            lenient=asked is None,
            field="messages",
            length_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            prefix=prefix,
            stream=bool(body.stream),
        )
    )  # fmt: skip


class _Prompt(NamedTuple):
    """A conversation as the engine takes it. Its pictures are decoded later, in another thread."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


def _prompt(body: ChatRequest, tokenizer: Any) -> _Prompt:
    known, told = tools.knows_tools(tokenizer), tools.told(body)
    described = [tools.described(t) for t in told] if told and known else None
    return _Prompt(tools.conversation(body.messages, told, known), described, variables(body))


async def count_tokens(body: ChatRequest, client: Client, service: Service) -> int:
    """Tokens of the prompt. Raises APIError."""
    check_model(body, service)
    try:
        prompt = _prompt(body, service.engine().tokenizer)
        return await service.count_tokens(client, prompt.messages, tools=prompt.tools, variables=prompt.variables)
    except QBEError as error:
        raise APIError(400, str(error), param="messages") from error
    except TimeoutError:
        raise APIError(504, "it took too long until the prompt was counted", code="timeout") from None


class _ChatChoice:
    """One answer while it is read: what is new goes into deltas, and all of them make the message."""

    def __init__(self, index: int, body: ChatRequest, service: Service) -> None:
        self.index, self._token_text = index, service.token_text
        self._reader = AnswerReader(body)
        self._logprobs = bool(body.logprobs)
        self._begun = False

    def deltas(self, delta: Delta) -> list[dict[str, Any]]:
        """`choices[]` entries of a stream: none, one or several."""
        found: list[dict[str, Any]] = [] if self._begun else [{"role": "assistant", "content": ""}]
        self._begun = True
        for piece in self._reader.pieces(delta):
            if isinstance(piece, Begun):
                call = {"index": piece.index, "id": piece.id, "type": "function",
                        "function": {"name": piece.name, "arguments": ""}}  # fmt: skip
                found.append({"tool_calls": [call]})
            elif isinstance(piece, Custom):
                custom = {"name": piece.name, "input": piece.input}
                found.append({"tool_calls": [
                    {"index": piece.index, "id": piece.id, "type": "custom", "custom": custom}
                ]})  # fmt: skip
            elif isinstance(piece, Arguments):
                found.append({"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]})
            else:
                found.append({"content": piece.text})
        reason = None if delta.result is None else self._reader.reason(delta.result)
        logprobs = self._token_text.within(delta.logprobs)
        if not found and (reason is not None or logprobs):
            found.append({})
        entries: list[dict[str, Any]] = [
            {"index": self.index, "delta": d, "logprobs": None, "finish_reason": None} for d in found
        ]
        if entries:
            if self._logprobs:
                entries[-1]["logprobs"] = {"content": self._token_text.for_chat(logprobs), "refusal": None}
            entries[-1]["finish_reason"] = reason
        return entries


async def stream(body: ChatRequest, service: Service, exchange: Exchange) -> AsyncIterator[bytes]:
    """The answer as server-sent events; hanging up cancels it."""
    frame = Frame("chat.completion.chunk", service, exchange)
    options, written = check_stream(body), 0
    choices = [_ChatChoice(i, body, service) for i in range(exchange.asked.n)]
    found = [_Message() for _ in choices]
    try:
        async for index, delta in exchange.deltas():
            written += len(delta.tokens)
            for entry in choices[index].deltas(delta):
                found[index].add(entry)
                yield event(frame.object([entry], **_running_usage(options, frame, written)))
        if options.include_usage:
            yield event(frame.object([], usage=await frame.usage([m.answer() for m in found])))
        yield DONE
    except APIError as error:
        yield event(error.body())
    finally:
        exchange.over()


def _running_usage(options: Any, frame: Frame, written: int) -> dict[str, Any]:
    if not options.include_usage:
        return {}
    return {"usage": frame.usage_so_far(written) if options.continuous_usage_stats else None}


async def whole(body: ChatRequest, service: Service, exchange: Exchange) -> dict[str, Any]:
    """The answer in one object: what the stream's deltas add up to. Raises APIError."""
    frame = Frame("chat.completion", service, exchange)
    readers = [_ChatChoice(i, body, service) for i in range(exchange.asked.n)]
    found = [_Message() for _ in readers]
    try:
        async for index, delta in exchange.deltas():
            for entry in readers[index].deltas(delta):
                found[index].add(entry)
    finally:
        exchange.over()
    usage = await frame.usage([m.answer() for m in found])
    return frame.object([m.describe(i) for i, m in enumerate(found)], usage=usage)


class _Message:
    """Adds up deltas."""

    def __init__(self) -> None:
        self.content, self.calls, self.logprobs = "", list[dict[str, Any]](), list[Any]()
        self.asked_logprobs, self.reason = False, ""

    def add(self, entry: dict[str, Any]) -> None:
        """One more."""
        delta = entry["delta"]
        self.content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self.calls.append({k: v for k, v in call.items() if k != "index"})
            else:
                self.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if entry["logprobs"] is not None:
            self.asked_logprobs = True
            self.logprobs += entry["logprobs"]["content"]
        self.reason = entry["finish_reason"] or self.reason

    def answer(self) -> Answer:
        """Its text and calls."""
        called = [c["function"] for c in self.calls if "function" in c]
        return self.content, [(c["name"], c["arguments"]) for c in called]

    def describe(self, index: int) -> dict[str, Any]:
        """The choice."""
        content = self.content if self.content.strip() or not self.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            message["tool_calls"] = self.calls
        logprobs = {"content": self.logprobs, "refusal": None} if self.asked_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.reason}
