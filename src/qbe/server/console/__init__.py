"""`/`: a small page of what the server does now, and a playground. Three files, served as they are."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from qbe.server.wire import dumps

_TYPES = {
    "page.html": "text/html; charset=utf-8", "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
}  # fmt: skip
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
}  # fmt: skip


def add_console(app: FastAPI, service_of: Any, bearer: list[Any]) -> None:
    """Add the page and what it asks for.

    Args:
        service_of: gives the service of the application.
        bearer: for the document: `/v1/` needs the key.
    """

    def answer(name: str) -> Response:
        return Response((files(__package__) / name).read_bytes(), 200, _HEADERS, _TYPES[name])

    @app.get("/", response_class=Response, include_in_schema=False)
    async def page() -> Response:
        return answer("page.html")

    @app.get("/console.css", response_class=Response, include_in_schema=False)
    async def style() -> Response:
        return answer("console.css")

    @app.get("/console.js", response_class=Response, include_in_schema=False)
    async def script() -> Response:
        return answer("console.js")

    @app.get("/v1/qbe/live", dependencies=bearer)
    async def live(request: Request) -> Response:
        """Requests that are answered now and the last minute's tokens, bits and cost by tier."""
        found = await service_of(app).live(request.state.client)
        return Response(dumps(found), media_type="application/json", headers={"Cache-Control": "no-store"})
