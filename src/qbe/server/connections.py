"""HTTP/1.1 connections as uvicorn has them, with what it lacks: their number and the time that headers may take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qbe.server.settings import Settings

log = logging.getLogger(__name__)

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def protocol(settings: Callable[[], Settings]) -> type[H11Protocol]:
    """The class for uvicorn's `http`.

    Args:
        settings: those in use now.
    """

    class Limited(H11Protocol):
        """A connection that ends when a request's headers do not come in time, or when there are too many."""

        _headers: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Somebody connects."""
            super().connection_made(transport)
            if len(self.connections) > settings().limits.connections:
                transport.write(_FULL)
                transport.close()
                return
            self._expect()

        def data_received(self, data: bytes) -> None:
            """Bytes have come, the headers' last or not."""
            super().data_received(data)
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
                self._expect()
            elif self._headers is not None:
                self._headers.cancel()
                self._headers = None

        def connection_lost(self, exc: Exception | None) -> None:
            """It has ended."""
            if self._headers is not None:
                self._headers.cancel()
            super().connection_lost(exc)

        def _expect(self) -> None:
            """Wait for headers from now on, unless that began before."""
            if self._headers is None:
                self._headers = self.loop.call_later(settings().limits.header_s, self._late)

        def _late(self) -> None:
            log.info("a client did not send its headers in time")
            self.transport.close()

    return Limited
