"""Log lines on standard error: as text with `key=value`, or as JSON objects. No prompt is in them unless asked for."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from qbe.server.settings import Settings

requests = logging.getLogger("qbe.server.requests")
request_id: ContextVar[str] = ContextVar("request_id", default="")


class Lines(logging.Formatter):
    """Formats every line as the settings say now.

    Args:
        settings: those in use.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        super().__init__()
        self._settings = settings

    def format(self, record: logging.LogRecord) -> str:
        """One line; of an exception more, as text."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._settings().logs.format == "json":
            when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            line = {"time": when, "level": record.levelname.lower(), "message": record.getMessage(), **fields}
            return json.dumps(line | ({"exception": trace} if trace else {}), ensure_ascii=True)
        pairs = "".join(f" {name}={_plain(value)}" for name, value in fields.items() if value is not None)
        return f"qbe: {record.getMessage()}{pairs}" + (f"\n{trace}" if trace else "")


def start(settings: Callable[[], Settings]) -> None:
    """Send the server's lines to standard error, others' from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(settings))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("qbe.server").setLevel(logging.INFO)


def say(message: str, fields: dict[str, Any]) -> None:
    """One line about a request, with the time."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    requests.info(message, extra={"fields": fields | {"time": now}})


def _plain(value: Any) -> str:
    """Without spaces that would end it."""
    if isinstance(value, bool | dict | list):
        return json.dumps(value, separators=(",", ":"))
    text = str(value)
    return json.dumps(text) if not text.isprintable() or any(c in text for c in ' "=') else text
