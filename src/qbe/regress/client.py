"""A client of any OpenAI-compatible server: answers as their user sees them, and the likelihoods of given text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2

from qbe.errors import QBEError

LIMIT_S = 600.0
TOP = 20  # likeliest tokens that are compared; OpenAI gives no more


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        text: of the message. calls: names and arguments (JSON text) of the functions called.
        finish: `stop`, `length`, `tool_calls`; None where none came.
        error: why there is no answer.
        first_s, per_token_s: seconds to the first token, and between later ones; 0 where there were none.
        prompt_tokens, tokens: of prompt and answer.
        cost: in the server's currency; 0 where it has no prices.
        work: tokens times bits over 16, or tokens where a server does not tell bits.
        bits, kv_bits: averages of the weights and of the KV cache, where the server tells.
        valid: whether the answer has the form that was asked for, where the server tells.
    """

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str | None = None
    error: str = ""
    first_s: float = 0.0
    per_token_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    cost: float = 0.0
    work: float = 0.0
    bits: float | None = None
    kv_bits: float | None = None
    valid: bool | None = None

    @property
    def refused(self) -> bool:
        """Whether the server takes no such request, so that asking again would change nothing."""
        return self.error.startswith(("HTTP 400", "HTTP 404", "HTTP 413", "HTTP 422"))

    @property
    def said(self) -> str:
        """Text and calls, to be shown and compared."""
        return self.text + "".join(f"{name}({arguments})" for name, arguments in self.calls)


@dataclass(frozen=True)
class ScoredText:
    """What a model thinks of a given text.

    Attributes:
        tokens: of the text.
        likeliest: before each token, from the second on, the likeliest tokens with their logarithms.
    """

    tokens: tuple[str, ...]
    likeliest: tuple[Mapping[str, float], ...]


class Client:
    """Asks one server.

    Args:
        url: its address, with or without `/v1` at the end.
        key: of the API; "" for none.
        request: fields that every request has.
    """

    def __init__(self, url: str, key: str = "", request: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key, self.request = key, dict(request or {})
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.Client(base_url=self.url, timeout=LIMIT_S, headers=headers)
        self.model = self._model()

    def close(self) -> None:
        self._http.close()

    def _model(self) -> str:
        try:
            answer = self._http.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise QBEError(f"{self.url}/v1/models has no model ({_said(error)}); is it OpenAI's API?") from None

    def chats(self) -> bool:
        """Whether the model has a chat template. Raises QBEError where it answers nothing."""
        hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
        reply = self.ask("chat/completions", hello)
        if not reply.error:
            return True
        plain = self.ask("completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0})
        if plain.error:
            raise QBEError(f"{self.url} answers neither chats ({reply.error}) nor completions ({plain.error})")
        return False

    def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        """One answer, as a stream. Never raises for what the server does: see `Reply.error`."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        whole = {"model": self.model, **body, **stream, **self.request}
        reading = _Reading()
        try:
            with self._http.stream("POST", f"/v1/{path}", json=whole) as answer:
                if answer.status_code != 200:
                    return Reply(error=f"HTTP {answer.status_code}: {_message(answer.read())}")
                for event in _events(answer.iter_lines()):
                    reading.take(event)
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Reply(error=_said(error))
        return reading.reply()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer. Raises QBEError where there is none."""
        try:
            answer = self._http.post(f"/v1/{path}", json={"model": self.model, **body, **self.request})
            if answer.status_code != 200:
                raise QBEError(f"{self.url} answers HTTP {answer.status_code}: {_message(answer.content)}")
            found: dict[str, Any] = answer.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise QBEError(f"{self.url} does not answer: {_said(error)}") from None
        return found

    def score(self, text: str) -> ScoredText:
        """The text's own likelihoods, by `echo`. Raises QBEError where the server gives none."""
        body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": TOP, "temperature": 0}
        try:
            choice = self.post("completions", body)["choices"][0]
            found = choice["logprobs"]
            tokens = found["tokens"][:-1]
            likeliest = [dict(x or {}) for x in found["top_logprobs"][1:-1]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise QBEError(f"{self.url} gives no likelihoods of a prompt (echo with logprobs)") from None
        return ScoredText(tuple(tokens), tuple(likeliest))

    def ask_all(
        self, asked: Sequence[tuple[str, Mapping[str, Any]]], together: int, tick: Callable[[], None]
    ) -> list[Reply]:
        """Answers in the order of what is asked, so many under way at once."""

        def one(each: tuple[str, Mapping[str, Any]]) -> Reply:
            reply = self.ask(*each)
            tick()
            return reply

        with ThreadPoolExecutor(together) as pool:
            return list(pool.map(one, asked))


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


class _Reading:
    """A stream of an answer while it is read."""

    def __init__(self) -> None:
        self._asked = self._first = self._last = time.perf_counter()
        self._text, self._calls = "", dict[int, list[str]]()
        self._finish: str | None = None
        self._error, self._usage = "", dict[str, Any]()

    def take(self, event: Mapping[str, Any]) -> None:
        if event.get("error"):
            self._error = str(event["error"].get("message", event["error"]))
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            piece = (choice.get("text") or "") + (delta.get("content") or "")
            calls = delta.get("tool_calls") or ()
            if piece or calls:
                self._last = time.perf_counter()
                self._first = self._last if self._first == self._asked else self._first
            self._text += piece
            for call in calls:
                known = self._calls.setdefault(call.get("index", len(self._calls)), ["", ""])
                function = call.get("function") or {}
                known[0] += function.get("name") or ""
                known[1] += function.get("arguments") or ""
            self._finish = choice.get("finish_reason") or self._finish

    def reply(self) -> Reply:
        usage, own = self._usage, self._usage.get("qbe") or {}
        read, written = int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0))
        bits = own.get("average_weight_bits")
        error = self._error or ("" if self._finish else "the stream ended without a finish_reason")
        return Reply(
            self._text, tuple((name, arguments) for name, arguments in self._calls.values()), self._finish, error,
            self._first - self._asked, (self._last - self._first) / (written - 1) if written > 1 else 0.0, read,
            written, float(usage.get("cost") or 0.0), (read + written) * (bits or 16.0) / 16, bits,
            own.get("average_kv_bits"), own.get("valid"),
        )  # fmt: skip


def _message(content: bytes) -> str:
    try:
        found = json.loads(content)
        return str(found.get("error", found).get("message"))[:300]
    except (ValueError, AttributeError):
        return content.decode(errors="replace")[:300]


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
