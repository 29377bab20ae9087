"""Who is at the door: whether the headers of a request, as they came, are worth a place before all others.

That costs microseconds, a refusal about a millisecond. It decides nothing but who waits (`qbe.server.entrance`): what
these headers mean the parser says later, and whether they are refused `qbe.server.guard`.
"""

from __future__ import annotations

from qbe.server.errors import APIError
from qbe.server.keys import client_of
from qbe.server.rates import Rates
from qbe.server.settings import Settings

_STATES = (b"GET /health ", b"GET /ready ")  # asked by whoever keeps the server alive, without a key
_CREDENTIALS = (b"authorization", b"x-api-key")


def key_at(head: bytes, settings: Settings, rates: Rates) -> str | None:
    """The name of its key, whose limits are not used up; None for who has none, unless it needs none or asks how the
    server is.

    Args:
        head: from the method to the last header.
    """
    if head.startswith(_STATES):
        return ""
    headers = {}
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if (name := name.lower()) in _CREDENTIALS:
            headers[name] = value.strip()
    try:
        client = client_of(headers, settings)
        rates.check(client)
    except APIError:
        return None
    return client.name
