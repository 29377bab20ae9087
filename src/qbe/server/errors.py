"""Refusals in OpenAI's error format: one line, and the field it is about."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from qbe.server.wire import dumps

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 500: "server_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


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

    def response(self) -> Response:
        """As an HTTP response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}
        return Response(dumps(self.body()), self.status, headers, "application/json")
