"""What the endpoints that write text have in common, for HTTP and for batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from qbe.server.exchange import Exchange
from qbe.server.keys import Client
from qbe.server.service import Service


@dataclass(frozen=True)
class Answering:
    """A request that the engine has taken, and the two ways to answer it, of which one is used once.

    Attributes:
        exchange: what comes of it.
        stream: the answer as server-sent events.
        whole: the answer in one object; raises APIError.
    """

    exchange: Exchange
    stream: Callable[[], AsyncIterator[bytes]]
    whole: Callable[[], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Endpoint:
    """A path that text is written at.

    Attributes:
        path: of the URL.
        body: what it takes.
        begin: checks a body and hands it to the engine; raises APIError.
        what: it answers, for the document.
    """

    path: str
    body: type[BaseModel]
    begin: Callable[[Any, Client, Service], Awaitable[Answering]]
    what: str
