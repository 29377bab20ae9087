"""What every request passes before anything reads it: who asks, from where, and a body that is small and soon there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qbe.server.errors import APIError
from qbe.server.keys import client_of
from qbe.server.observe import traces
from qbe.server.settings import Settings

HEADER_BYTES = 16 * 1024
_LOCAL = {"localhost", "127.0.0.1", "::1"}


class Guard:
    """ASGI middleware; puts the `Client` into the request's state.

    Args:
        app: what is guarded.
        settings: those in use now.
        refused: told of every refusal.
    """

    def __init__(self, app: ASGIApp, settings: Callable[[], Settings], refused: Callable[[APIError], None]) -> None:
        self._app, self._settings, self._refused = app, settings, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings = self._settings()
        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES:
                raise APIError(431, f"the headers have more than {HEADER_BYTES} bytes", code="headers_too_large")
            headers = dict(scope["headers"])
            if not settings.keys and _host(headers.get(b"host", b"")) not in _LOCAL:
                # A page of another site whose name was made to mean this machine (DNS rebinding).
                raise APIError(403, "this server has no keys and answers to localhost only", code="not_local")
            traces.remember_parent(headers)
            if scope["path"].startswith("/v1/"):
                scope.setdefault("state", {})["client"] = client_of(headers, settings)
            if scope["method"] == "POST":
                receive = await _body(headers, receive, settings)
        except APIError as error:
            self._refused(error)
            response = error.response()
            response.headers["Connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host(value: bytes) -> str:
    name = value.decode("latin-1").lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


async def _body(headers: dict[bytes, bytes], receive: Receive, settings: Settings) -> Receive:
    """Read the body; the app gets it in one piece."""
    limits, parts, size = settings.limits, list[bytes](), 0
    too_large = APIError(413, f"the body has more than {limits.body_bytes} bytes", code="body_too_large")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise APIError(400, "the client hung up")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.body_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise APIError(408, f"the body took longer than {limits.body_s:g} s to arrive", code="timeout") from None
    whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again
