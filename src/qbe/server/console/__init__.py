"""`/`: a playground, and what the server does now. A few files, served as they are."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from qbe.server.wire import dumps

_FILES = ("console.css", "console.js", "differences.js", "format.js", "playground.js")
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
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

    def add(path: str, name: str) -> None:
        content, kind = (files(__package__) / name).read_bytes(), _TYPES[name.rpartition(".")[2]]

        @app.get(path, response_class=Response, include_in_schema=False)
        async def answer() -> Response:
            return Response(content, 200, _HEADERS, kind)

    add("/", "page.html")
    for name in _FILES:
        add(f"/{name}", name)

    @app.get("/v1/qbe/live", dependencies=bearer)
    async def live(request: Request) -> Response:
        """What runs and ran, tokens, bits and cost of the last minute and hour, and what the key may use."""
        found = await service_of(app).live(request.state.client)
        return Response(dumps(found), media_type="application/json", headers={"Cache-Control": "no-store"})
