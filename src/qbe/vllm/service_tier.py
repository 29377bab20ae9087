"""OpenAI's `service_tier` for vLLM's server, which does nothing with that field: `--middleware` of this class.

Also tells QBE's analysis what the user wrote last, where vLLM would hand it the whole conversation in its template.
"""

from __future__ import annotations

import json
from typing import Any

from qbe.vllm.request_options import PREFIX

PATHS = ("/v1/completions", "/v1/chat/completions")


class BeamsError(ValueError):
    """Beam search at a precision."""


class ServiceTier:
    """ASGI middleware: copies `service_tier`, and of a chat the last message's text, into the body's `vllm_xargs`.

    What is there already stays. A body that is no JSON object goes on as it is, for vLLM to refuse. Beam search with
    arguments for QBE is refused: each step of a beam is a request of its own for vLLM, which they would not reach.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            body = with_args(body)
        except BeamsError as error:
            await _refuse(send, str(error))
            return
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        given = False

        async def once() -> Any:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, once, send)


def with_args(body: bytes) -> bytes:
    """The request's body with QBE's arguments in it.

    Raises:
        BeamsError: it asks for beam search and a precision.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # the latter: nested deeper than Python reads
        return body
    if not isinstance(request, dict) or not isinstance(request.get("vllm_xargs") or {}, dict):
        return body
    fields = {}
    if (tier := request.get("service_tier")) is not None:
        fields["service_tier"] = tier if isinstance(tier, str) else json.dumps(tier)  # what cannot be is refused by QBE
    if text := _last_text(request.get("messages")):
        fields["qbe_text"] = text
    args = {**fields, **(request.get("vllm_xargs") or {})}
    if request.get("use_beam_search") and _precise(args):
        raise BeamsError("beam search has no precision of its own: leave out QBE's arguments and service_tier")
    return json.dumps({**request, "vllm_xargs": args}).encode() if fields else body


def _precise(args: dict[str, Any]) -> bool:
    """Whether arguments ask for more than the default tier."""
    ours = any(name.startswith(PREFIX) and name != "qbe_text" for name in args)
    return ours or args.get("service_tier") not in (None, "default", "auto", "scale")


async def _refuse(send: Any, message: str) -> None:
    """HTTP 400 in vLLM's form."""
    error = {"message": message, "type": "BadRequestError", "param": "use_beam_search", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _last_text(messages: Any) -> str | None:
    """Of the last message that has some."""
    for message in reversed(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "\n".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
        if isinstance(content, str) and content.strip():
            return content
    return None
