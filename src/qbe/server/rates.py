"""What a key may ask for a minute, and OpenAI's headers that say what is left of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from qbe.server.errors import APIError
from qbe.server.keys import Client

MINUTE_S = 60.0
REFUSED_BYTES = 32 << 20  # of bodies that were refused, of each client a minute: reading those costs as much as others


class Bucket:
    """A token bucket: `per_minute` come in evenly, as many are held.

    Args:
        clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.size, self._clock = per_minute, clock
        self._level, self._at = float(per_minute), clock()

    @property
    def level(self) -> float:
        """How many can be taken now; negative where more were taken than there are."""
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._at) * self.size / MINUTE_S)
        self._at = now
        return self._level

    def wait(self, count: float) -> float:
        """Seconds until `count` can be taken; 0 now, infinity never."""
        level = self.level
        return math.inf if count > self.size else max(0.0, count - level) * MINUTE_S / self.size

    def take(self, count: float) -> None:
        """Take; a negative count gives back."""
        self._level = min(self.size, self._level - count)


class Rates:
    """Counts what each key asks for.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str, int], Bucket] = {}

    def check(self, client: Client) -> None:
        """Before a body is read: raises APIError for a key that may ask nothing now."""
        requests = self._bucket(client, "requests")
        if requests is not None and (wait := requests.wait(1)):
            raise self._over(requests, "requests", wait)
        if wait := max(0.0, self._refusals(client).wait(1)):
            raise APIError(429, "too much of what this key sent was refused: try again later",
                           code="rate_limit_exceeded", retry_after=wait)  # fmt: skip

    def charge(self, client: Client, tokens: int) -> None:
        """Count a request of so many tokens. Raises APIError when a limit is reached."""
        asked = (("requests", 1), ("tokens", tokens))
        for kind, count in asked:
            bucket = self._bucket(client, kind)
            if bucket is not None and (wait := bucket.wait(count)):
                raise self._over(bucket, kind, wait, count)
        for kind, count in asked:
            if (bucket := self._bucket(client, kind)) is not None:
                bucket.take(count)

    def refund(self, client: Client, tokens: int) -> None:
        """Tokens that were charged and not used."""
        if (bucket := self._bucket(client, "tokens")) is not None:
            bucket.take(-tokens)

    def refused(self, client: Client, body_bytes: int) -> None:
        """Count a request whose body was read and was wrong, or asked for what cannot be served."""
        if (bucket := self._bucket(client, "requests")) is not None:
            bucket.take(1)
        refusals = self._refusals(client)
        refusals.wait(0)  # brings it up to date
        refusals.take(body_bytes)

    def headers(self, client: Client) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-…` of the limits that the key has."""
        headers = []
        for kind in ("requests", "tokens"):
            if (bucket := self._bucket(client, kind)) is not None:
                left = bucket.level
                for quantity, value in (("limit", str(bucket.size)), ("remaining", str(max(0, math.floor(left)))),
                                    ("reset", _span((bucket.size - left) * MINUTE_S / bucket.size))):  # fmt: skip
                    headers.append((f"x-ratelimit-{quantity}-{kind}".encode(), value.encode()))
        return headers

    @staticmethod
    def _over(bucket: Bucket, kind: str, wait: float, count: int = 1) -> APIError:
        message = f"this key may use {bucket.size} {kind} a minute"
        if math.isinf(wait):
            return APIError(429, f"{message}, but this request alone takes up to {count}: lower max_tokens",
                            code="rate_limit_exceeded")  # fmt: skip
        return APIError(429, f"{message}: try again later", code="rate_limit_exceeded", retry_after=wait)

    def _bucket(self, client: Client, kind: str) -> Bucket | None:
        limit: int | None = getattr(client.key, f"{kind}_per_minute", None)
        return None if limit is None else self._of(client.name, kind, limit)

    def _refusals(self, client: Client) -> Bucket:
        return self._of(client.name, "refused", REFUSED_BYTES)

    def _of(self, *key: *tuple[str, str, int]) -> Bucket:
        if key not in self._buckets:
            self._buckets[key] = Bucket(key[2], self._clock)
        return self._buckets[key]


def _span(seconds: float) -> str:
    """As OpenAI writes it: `120ms`, `8.64s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    if seconds < MINUTE_S:
        return f"{math.ceil(seconds * 100) / 100:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
