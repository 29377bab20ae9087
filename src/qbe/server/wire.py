"""JSON and server-sent events as they go over the wire."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """Compact JSON. Lone surrogates, which a body may contain and an error may quote, become question marks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def event(value: Any, kind: str = "") -> bytes:
    """One server-sent event.

    Args:
        kind: what the event is called, where its readers go by that.
    """
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + dumps(value) + b"\n\n"
