"""Cross-origin requests, for the sites that the settings name now."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from qbe.server.settings import Settings

_SHOWN = [
    "Retry-After", "X-Request-Id",
    *(f"X-RateLimit-{number}-{kind}" for kind in ("Requests", "Tokens") for number in ("Limit", "Remaining", "Reset")),
]  # fmt: skip


class Cors:
    """ASGI middleware: Starlette's, made anew when the settings name other sites.

    Args:
        app: what answers.
        settings: those in use now.
    """

    def __init__(self, app: ASGIApp, settings: Callable[[], Settings]) -> None:
        self._app, self._settings = app, settings
        self._made: tuple[tuple[str, ...], ASGIApp] = ((), app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origins = self._settings().http.cors_origins
        if origins != self._made[0]:
            more = CORSMiddleware(
                self._app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
                expose_headers=_SHOWN,
            )  # fmt: skip
            self._made = origins, more if origins else self._app
        await self._made[1](scope, receive, send)
