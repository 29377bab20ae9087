"""HTTP/1.1 connections as uvicorn has them, with what it lacks.

Their number and the time that headers may take are limited. Of a body nothing is read before the application asks for
it, and nothing of one in tiny chunks, whose framing costs far more than its bytes. What two parsers may take for
different requests is refused: bare line feeds here, lengths that contradict each other in `qbe.server.guard`. Requests
that come at once begin a few at a time (`qbe.server.entrance`), those first that have a key (`qbe.server.door`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from qbe.server.door import key_at
from qbe.server.entrance import Entrance
from qbe.server.guard import FRAMING, HEADER_BYTES
from qbe.server.rates import Rates
from qbe.server.settings import Settings

log = logging.getLogger(__name__)

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_READ_BYTES = 16 * 1024  # of one read; asyncio takes up to 256 KiB, before anybody knows who sends them
_PIECE_BYTES = 4 * 1024  # of a body, that are parsed before its framing is looked at
_FRAMING = 0.25  # bytes of framing for each byte of a body,
_FRAMING_BYTES = 8 * 1024  # and these beside
_SILENT = 0.25  # part of `header_s` after which a silent connection makes room for another
_LINGER_BYTES = 32 * 1024  # of a body that nobody wants, read so that its sender gets the answer before the end,
_LINGER_S = 1.0  # and how long
_BARE = re.compile(rb"(?<!\r)\n")
_END = b"\r\n\r\n"


class _Flow(FlowControl):
    """Says when the application wants more of a body.

    Args:
        wanted: called then.
    """

    def __init__(self, transport: asyncio.Transport, wanted: Callable[[], None]) -> None:
        super().__init__(transport)
        self._wanted = wanted

    def resume_reading(self) -> None:
        """Somebody waits for a message."""
        super().resume_reading()
        self._wanted()


class _Transport:
    """A connection that does not end while its client still sends: it would lose the answer (RFC 9112, 9.6).

    Args:
        transport: asyncio's.
        unread: whether a part of a body has not been read.
    """

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool]) -> None:
        self._transport, self._unread = transport, unread
        self._left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is written."""
        return self._left is not None or self._transport.is_closing()

    def close(self) -> None:
        """End it when what was written is out, and soon."""
        if self.is_closing() or not self._unread() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._left = _LINGER_BYTES
        self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)

    def drops(self, count: int) -> bool:
        """So many bytes have come: whether nobody wants them."""
        if self._left is not None:
            self._left -= count
            if self._left < 0:
                self._transport.close()
        return self._left is not None


class Limited(H11Protocol):
    """A connection that ends when a request's headers do not come in time, or when there are too many."""

    _settings: Callable[[], Settings]  # those in use now; these four are of one server (`protocol`)
    _rates: Callable[[], Rates]
    _expecting: dict[Limited, float]  # to be let in, and since when; the one that has done so longest first
    _entrance: Entrance
    _headers: asyncio.TimerHandle | None = None
    _held = b""  # bytes that the parser has not got yet
    _wanted = _pumping = _cut = False
    _in_line = _may_begin = False  # its next request, whose headers are complete,
    _welcome = True  # and whether others do not go first
    _framed = _body = 0  # bytes of this request's body, with their framing and without

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody connects. Where there are too many, whoever has been silent longest goes, if it was for long."""
        if hasattr(transport, "max_size"):  # asyncio's, without TLS
            transport.max_size = _READ_BYTES
        self._line = _Transport(
            transport, lambda: self._cut or bool(self._held) or self.conn.their_state is h11.SEND_BODY
        )
        super().connection_made(cast("asyncio.Transport", self._line))
        self.flow = _Flow(transport, self._want)
        if len(self.connections) > self._settings().limits.connections:
            oldest, since = next(iter(self._expecting.items()), (None, 0.0))
            if oldest is None or self.loop.time() - since < _SILENT * self._settings().limits.header_s:
                transport.write(_FULL)
                transport.close()
                return
            log.info("there are too many connections: one that has sent no request is closed")
            oldest._forget()
            oldest.transport.abort()
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Bytes have come, the headers' last or not."""
        if self._line.drops(len(data)):
            return
        self._unset_keepalive_if_required()
        self._held += data
        self._pump()
        waits = not self._in_line or not self._welcome
        if self.conn.their_state is h11.IDLE and waits and (self._held or self.conn.trailing_data[0]):
            self._expect()
        else:
            self._forget()

    def handle_events(self) -> None:
        """Let the parser go on."""
        if self.conn.their_state is h11.IDLE:
            self._wanted, self._framed, self._body = False, 0, 0
            if _BARE.search(self.conn.trailing_data[0].partition(_END)[0]):
                self._refuse("a line of the headers does not end with CR LF")
                return
        before = self.cycle, len(self.cycle.body) if self.cycle else 0
        super().handle_events()
        if self.cycle is not None:
            self._body += len(self.cycle.body) - (before[1] if self.cycle is before[0] else 0)

    def on_response_complete(self) -> None:
        """A response is out, which its request's body need not be."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()  # nobody reads what is left
        super().on_response_complete()
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._forget()
        self._held = b""
        super().connection_lost(exc)

    def _want(self) -> None:
        self._wanted = self.conn.their_state is h11.SEND_BODY
        self._pump()

    def _pump(self) -> None:
        """Give the parser what it may see now: headers up to their end, and pieces of a body that is wanted."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._held and not self.transport.is_closing() and (count := self._may_see()):
                piece, self._held = self._held[:count], self._held[count:]
                in_body = self.conn.their_state is h11.SEND_BODY
                super().data_received(piece)
                if in_body and self.conn.their_state is h11.SEND_BODY:
                    self._framed += len(piece)
                    if self._framed - self._body > _FRAMING_BYTES + _FRAMING * self._body:
                        cast("dict[str, Any]", self.scope)["state"][FRAMING] = self._framed
                        self._refuse("the chunks of the body are too small: send larger ones")
        finally:
            self._pumping = False
        if self._held and not self.transport.is_closing():
            self.flow.pause_reading()

    def _may_see(self) -> int:
        state = self.conn.their_state
        if state is h11.IDLE:
            before = self.conn.trailing_data[0]
            end = (before + self._held).find(_END)
            if end < 0 and len(before) + len(self._held) > HEADER_BYTES:
                self._cut, self._held = True, b""
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                return 0
            if end < 0:
                return len(self._held)
            return max(1, end + len(_END) - len(before)) if self._begins((before + self._held)[:end]) else 0
        # What has come of a body lies with the application until that asks for more.
        return _PIECE_BYTES if state is h11.SEND_BODY and self._wanted and not self.flow.read_paused else 0

    def _begins(self, head: bytes) -> bool:
        """Whether the request whose headers have come is taken up now, rather than when its turn comes."""
        if self._may_begin:
            self._may_begin = False
            return True
        if not self._in_line:
            key = key_at(head, self._settings(), self._rates())
            self._welcome = key is not None
            self._in_line = not self._entrance.enter(self._begin, key, self.client[0] if self.client else "")
        return not self._in_line

    def _begin(self) -> None:
        self._in_line, self._may_begin = False, True
        self._forget()
        self._pump()

    def _refuse(self, why: str) -> None:
        log.info("a request is refused: %s", why)
        self._cut, self._held = True, b""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.send_400_response(why)
        else:
            self.transport.close()

    def _forget(self) -> None:
        """It does not wait for headers any more."""
        self._expecting.pop(self, None)
        if self._headers is not None:
            self._headers.cancel()
            self._headers = None

    def _expect(self) -> None:
        """Wait for headers from now on, unless that began before."""
        if self._headers is None:
            self._expecting[self] = self.loop.time()
            self._headers = self.loop.call_later(self._settings().limits.header_s, self._late)

    def _late(self) -> None:
        log.info("a client did not send its headers in time")
        self.transport.close()


def protocol(settings: Callable[[], Settings], rates: Callable[[], Rates]) -> type[H11Protocol]:
    """The class for uvicorn's `http`: connections that know each other.

    Args:
        settings: those in use now.
        rates: what keys may ask; called once requests come.
    """
    of_server = {
        "_settings": staticmethod(settings), "_rates": staticmethod(rates), "_expecting": {}, "_entrance": Entrance(),
    }  # fmt: skip
    return type("LimitedConnection", (Limited,), of_server)
