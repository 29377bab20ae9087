"""Refusals in OpenAI's error format, or Anthropic's: one line, and the field it is about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Scope

from qbe.server.wire import dumps, event

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 500: "server_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_ANTHROPIC_TYPES = _TYPES | {408: "timeout_error", 413: "request_too_large", 500: "api_error"}


class ErrorDetail(BaseModel):
    """What went wrong, in which field of the body, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error format."""

    error: ErrorDetail


class APIError(Exception):
    """A request that is refused or failed.

    Args:
        status: of HTTP.
        message: one line: what, where, what to do.
        param: the field of the body it is about.
        code: a word for programs.
        retry_after: seconds after which another try makes sense.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str | None) -> dict[str, Any]:
        """As JSON in Anthropic's format, with OpenAI's `param` and `code` beside."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        detail = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        return {"type": "error", "error": detail, "request_id": request_id}

    def response(self, scope: Scope) -> Response:
        """As an HTTP response to this request."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}
        request_id = scope.get("state", {}).get("request_id")
        body = self.anthropic_body(request_id) if is_anthropic(scope) else self.body()
        return Response(dumps(body), self.status, headers, "application/json")

    def stream_event(self, scope: Scope) -> bytes:
        """As the last event of a stream that answers this request."""
        if is_anthropic(scope):
            return event(self.anthropic_body(scope.get("state", {}).get("request_id")), "error")
        return event(self.body())


def is_anthropic(scope: Scope) -> bool:
    """Whether Anthropic's client asks."""
    return scope["path"].startswith("/v1/messages") or any(n == b"anthropic-version" for n, _ in scope["headers"])


@contextmanager
def renamed(fields: Mapping[str, str]) -> Iterator[None]:
    """Refusals name the fields of this body, not of the chat request that was made of it.

    Args:
        fields: name in a chat request -> in this body.
    """
    try:
        yield
    except APIError as error:
        old = next((name for name in fields if error.param == name), None)
        if old is None:
            raise
        message = re.sub(rf"^{re.escape(old)}\b", fields[old], error.message)
        raise APIError(error.status, message, param=fields[old], code=error.code,
                       retry_after=error.retry_after) from error  # fmt: skip
