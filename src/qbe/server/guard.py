"""What every request passes before anything reads it: its framing, who asks, from where, for what; then its body.

Of a body nothing is read before its path and the key are known to take one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qbe.server.bodies import Bodies
from qbe.server.errors import APIError
from qbe.server.keys import Client, client_of
from qbe.server.observe import logs, traces
from qbe.server.rates import Rates
from qbe.server.settings import Settings

HEADER_BYTES = 16 * 1024
_LOCAL = {"localhost", "127.0.0.1", "::1"}
_INSIDE = {"/metrics", "/openapi.json"}  # about the server, for those who run it
_STATES = {"/health", "/ready"}
_UNCHARGED = {401, 429}  # refusals of who asks too much anyway, or is nobody
_CLOSE = (b"connection", b"close")
FRAMING = "framing"  # in a request's state: bytes of a body in chunks so small that its connection ended it
_FRAMING_COST = 256  # bytes of a body that take as long to read as one of those

Refused = Callable[[APIError, Scope], None]


class Guard:
    """ASGI middleware; puts the `Client`, the checked body and the request's id into the request's state.

    Args:
        app: what is guarded.
        settings: those in use now.
        refused: told of every refusal.
        bodies: parses them.
        rates: what keys may ask.
        inside_port: where `/metrics` and `/openapi.json` are; None: with all the rest.
    """

    def __init__(
        self, app: ASGIApp, settings: Callable[[], Settings], refused: Refused, bodies: Bodies,
        rates: Callable[[], Rates], inside_port: int | None = None,
    ) -> None:  # fmt: skip
        self._app, self._settings, self._refused, self._bodies = app, settings, refused, bodies
        self._rates, self._inside_port = rates, inside_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings, headers = self._settings(), dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(headers)
        logs.request_id.set(state["request_id"])
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""
        state["unread"] = has_body
        send = self._answering(state, send)
        try:
            self._check(scope, headers, settings)
            traces.remember_parent(headers)
            if scope["path"].startswith("/v1/"):
                address = (scope.get("client") or ("", 0))[0]
                state["client"] = replace(client_of(headers, settings), address=address)
            if scope["method"] == "POST" and scope["path"] in self._bodies.kinds:
                self._rates().check(state["client"])
                receive = await self._body(scope, headers, receive, settings)
        except APIError as error:
            self._refused(error, scope)
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes], settings: Settings) -> None:
        """What can be said without knowing who asks. Raises APIError."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
            raise APIError(431, f"the headers have more than {HEADER_BYTES} bytes", code="headers_too_large")
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # Of two parsers in a row each may believe another one (request smuggling).
            raise APIError(400, "a request has Content-Length or Transfer-Encoding, not both", code="invalid_request")
        path = scope["path"]
        if self._inside_port is not None:
            inside = (scope.get("server") or ("", None))[1] == self._inside_port
            if path not in _STATES and inside != (path in _INSIDE):
                raise APIError(404, "there is no such path on this port")
        if not settings.keys and _host(headers.get(b"host", b"")) not in _LOCAL:
            # A page of another site whose name was made to mean this machine (DNS rebinding).
            raise APIError(403, "this server has no keys and answers to localhost only", code="not_local")
        if settings.http.private and path in _INSIDE:
            key = client_of(headers, settings).key
            if key is not None and not key.operator:
                raise APIError(403, f"{path} needs an operator's key", code="not_operator")

    def _answering(self, state: dict[str, Any], send: Send) -> Send:
        """What every answer says beside its own headers; a refusal is counted."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                client: Client | None = state.get("client")
                more = [(b"x-request-id", state["request_id"].encode())]
                if client is not None and "body_bytes" in state:
                    status = message["status"]
                    if 400 <= status < 500 and status not in _UNCHARGED:
                        self._rates().refused(client, state["body_bytes"])
                if client is not None:
                    more += self._rates().headers(client)
                if state["unread"]:
                    more.append(_CLOSE)
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        return sent

    async def _body(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, settings: Settings
    ) -> Receive:  # fmt: skip
        """Read the body and check it; whoever receives now hears only that the client hangs up."""
        state, key = scope["state"], scope["state"]["client"].name
        declared, most = headers.get(b"content-length", b""), settings.limits.body_bytes
        too_large = APIError(413, f"the body has more than {most} bytes", code="body_too_large")
        if declared.isdigit() and int(declared) > most:
            raise too_large
        held, size, parts = 0, 0, list[bytes]()
        try:
            if declared.isdigit():
                self._bodies.hold(key, int(declared))
                held = int(declared)
            async with asyncio.timeout(settings.limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        state["body_bytes"] = size + _FRAMING_COST * state.get(FRAMING, 0)
                        raise APIError(400, "the client hung up")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    state["body_bytes"] = size
                    if size > most:
                        raise too_large
                    if size > held:
                        self._bodies.hold(key, size - held)
                        held = size
                    if not message.get("more_body", False):
                        break
            state["unread"] = False
            kind = headers.get(b"content-type", b"").decode("latin-1")
            state["body"] = await self._bodies.parse(scope["path"], kind, b"".join(parts))
        except TimeoutError:
            raise APIError(408, f"the body took longer than {settings.limits.body_s:g} s to arrive",
                           code="timeout") from None  # fmt: skip
        finally:
            self._bodies.free(key, held)
        return receive


def _host(value: bytes) -> str:
    name = value.decode("latin-1").lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's own, if it is one that can be written anywhere; else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    plain = 0 < len(given) <= 128 and given.isascii() and given.replace("-", "").replace("_", "").isalnum()
    return given if plain else f"req_{uuid.uuid4().hex}"
