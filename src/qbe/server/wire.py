"""JSON and server-sent events as they go over the wire."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


# Many clients split a stream into lines at these, too, as Python's `splitlines` does; JSON has them in texts only.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def dumps(value: Any) -> bytes:
    """Compact JSON of one line. Lone surrogates, which a body may contain and an error may quote, become question
    marks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return text.encode("utf-8", "replace")


def event(value: Any, kind: str = "") -> bytes:
    """One server-sent event.

    Args:
        kind: what the event is called, where its readers go by that.
    """
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + dumps(value) + b"\n\n"
