"""A uvicorn server that lets what runs end: it drains on the first signal and ends on the second."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from qbe.server.service import Service

_FORCE_S = 1.0  # after a second signal; then connections are closed whatever they do


class DrainingServer(uvicorn.Server):
    """Drains on the first signal, ends on the second; the exit code after a drain is 0.

    Args:
        services: those that have been made by the time a signal comes.
        drain_s: seconds that running requests get.
    """

    def __init__(self, config: uvicorn.Config, services: Sequence[Service], drain_s: float) -> None:
        super().__init__(config)
        self._services, self._drain_s = services, drain_s

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal came."""
        if self.should_exit:
            for service in self._services:
                service.drain(0.0)
            force = threading.Timer(_FORCE_S if self._services else 0.0, self._force)
            force.daemon = True
            force.start()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs, but not for ever."""
        for service in self._services:
            service.drain(self._drain_s)
        await super().shutdown(sockets)

    def _force(self) -> None:
        self.force_exit = True
