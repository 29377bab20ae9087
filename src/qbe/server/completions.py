"""`/v1/completions`: plain prompts, as text or tokens, with the prompt's own logprobs where `echo` asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from qbe.engine.result import PromptInput
from qbe.engine.sampling.logprobs import Logprob
from qbe.server.endpoint import Answering
from qbe.server.errors import APIError
from qbe.server.exchange import EngineRequest, Exchange
from qbe.server.job import Delta
from qbe.server.keys import Client
from qbe.server.protocol import CompletionRequest
from qbe.server.requests import Answer, Frame, check_model, check_stream, ignored, sampling, terms
from qbe.server.service import Service
from qbe.server.structure import of_format
from qbe.server.token_text import TextOffset
from qbe.server.wire import DONE, event

_DEFAULT_TOKENS = 16  # OpenAI's


async def begin(body: CompletionRequest, client: Client, service: Service) -> Answering:
    """Check the body and hand it to the engine. Raises APIError."""
    exchange = await _submit(body, client, service)
    return Answering(exchange, lambda: stream(body, service, exchange), lambda: whole(body, service, exchange))


async def _submit(body: CompletionRequest, client: Client, service: Service) -> Exchange:
    check_model(body, service)
    check_stream(body)
    service.engine()
    wanted = await of_format(body.response_format, service)
    tokens = _DEFAULT_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return await service.begin(
        EngineRequest(
            client=client,
            prompts=_prompts(body),
            params=sampling(body, tokens, body.logprobs, body.logprobs if body.echo else None),
            n=body.n or 1,
            terms=terms(body, client, service),
            structure=wanted,
            ignored=ignored(body),
            stream=bool(body.stream),
            hidden=int(body.max_tokens == 0),
        )
    )


def _prompts(body: CompletionRequest) -> Sequence[PromptInput]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    first, *_ = body.prompt
    prompts: Any = [body.prompt] if isinstance(first, int) else body.prompt
    return prompts


class _CompletionChoice:
    """One answer while it is read."""

    def __init__(self, index: int, body: CompletionRequest, service: Service, exchange: Exchange) -> None:
        self.index, self._token_text = index, service.token_text
        job = exchange.jobs[index // exchange.asked.n]
        self._prompt_ids, self._prompt = job.choice[0], exchange.asked.prompts[index // exchange.asked.n]
        self._echo, self._top, self._nothing = body.echo, body.logprobs, body.max_tokens == 0
        self._begun, self.answer = False, ""
        if self._echo:
            self._text = (
                self._token_text.decode(self._prompt_ids) if isinstance(self._prompt, list) else str(self._prompt)
            )
            self._position = TextOffset(self._text, fresh=True)
        else:
            self._position = TextOffset(fresh=all(map(self._token_text.is_special, self._prompt_ids)))

    def delta(self, delta: Delta) -> dict[str, Any]:
        """A `choices[]` entry of a stream."""
        text, read, written = "", list[Logprob | int](), list[Logprob | int]()
        if self._echo and not self._begun:
            text = self._text
            read += [self._prompt_ids[0], *(delta.prompt_logprobs or self._prompt_ids[1:])]
        self._begun = True
        if not self._nothing:
            text += delta.text
            self.answer += delta.text
            written += self._token_text.within(delta.logprobs)
        logprobs = None
        if self._top is not None:
            logprobs = self._token_text.for_completion(read, written, self._position, self._top)
        reason = None if delta.result is None else delta.result.finish_reason
        reason = "length" if reason == "cancelled" or (reason and self._nothing) else reason
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def stream(body: CompletionRequest, service: Service, exchange: Exchange) -> AsyncIterator[bytes]:
    """The answers as server-sent events; hanging up cancels them."""
    frame = Frame("text_completion", service, exchange)
    options, written = check_stream(body), 0
    choices = [_CompletionChoice(i, body, service, exchange) for i in range(len(exchange.jobs) * exchange.asked.n)]
    try:
        async for index, delta in exchange.deltas():
            written += 0 if body.max_tokens == 0 else len(delta.tokens)
            more: dict[str, Any] = {}
            if options.include_usage:
                more["usage"] = frame.usage_so_far(written) if options.continuous_usage_stats else None
            entry = choices[index].delta(delta)
            if entry["text"] or entry["finish_reason"] or entry["logprobs"]:
                yield event(frame.object([entry], **more))
        if options.include_usage:
            yield event(frame.object([], usage=await frame.usage(_answers(choices))))
        yield DONE
    except APIError as error:
        yield event(error.body())
    finally:
        exchange.over()


async def whole(body: CompletionRequest, service: Service, exchange: Exchange) -> dict[str, Any]:
    """The answers in one object. Raises APIError."""
    frame = Frame("text_completion", service, exchange)
    choices = [_CompletionChoice(i, body, service, exchange) for i in range(len(exchange.jobs) * exchange.asked.n)]
    found: list[dict[str, Any]] = [{} for _ in choices]
    try:
        async for index, delta in exchange.deltas():
            _add(found[index], choices[index].delta(delta))
    finally:
        exchange.over()
    return frame.object(found, usage=await frame.usage(_answers(choices)))


def _answers(choices: list[_CompletionChoice]) -> list[Answer]:
    return [(choice.answer, []) for choice in choices]


def _add(found: dict[str, Any], entry: dict[str, Any]) -> None:
    """Append a delta to what there is."""
    if not found:
        found.update(entry)
        return
    found["text"] += entry["text"]
    found["finish_reason"] = entry["finish_reason"]
    for name, values in (entry["logprobs"] or {}).items():
        if values is not None:
            found["logprobs"][name] += values
