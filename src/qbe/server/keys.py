"""Who asks: keys are kept as SHA-256 (they are 256 random bits, so that a slow hash would add nothing)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from qbe.budget import TIER_ALIASES
from qbe.server.errors import APIError
from qbe.server.settings import TIER_NAMES, Key, Settings, TierName


@dataclass(frozen=True)
class Client:
    """Who asks. Without keys everyone is `anonymous` and may do everything.

    Attributes:
        line: of a batch, which is the id of its answer; empty where somebody waits for that.
        window_s: seconds that the batch has left.
        address: that the request came from; empty for a batch.
    """

    name: str
    key: Key | None
    line: str = ""
    window_s: float = 0.0
    address: str = ""

    @property
    def cache_salt(self) -> bytes:
        """Of the cached prefixes that it may find: how long an answer takes must not tell what others ask."""
        return b"" if self.key is None or self.key.shared_prefixes else self.key.sha256.encode()

    @property
    def oversees(self) -> bool:
        """Whether it may see what others ask: an operator, and everyone where there are no keys."""
        return self.key is None or self.key.operator

    @property
    def tiers(self) -> tuple[TierName, ...]:
        """Those it may use."""
        return TIER_NAMES if self.key is None else self.key.tiers

    @property
    def queue(self) -> str:
        """Whose turn it is, among those that wait in a tier: a key's batches do not count as what it waits for."""
        return f"{self.name} batch" if self.line else self.name

    def tier(self, wanted: str) -> TierName:
        """The tier that `service_tier` means for this client. Raises APIError if it may not use it."""
        allowed = self.tiers
        if self.line:
            cheapest = min(allowed, key=TIER_NAMES.index)
            if wanted not in ("auto", cheapest):
                raise APIError(
                    400, f"service_tier: a batch runs in the cheapest tier, '{cheapest}': leave it out",
                    param="service_tier",
                )  # fmt: skip
            return cheapest
        if wanted == "auto":
            return "default" if "default" in allowed else allowed[0]
        given = next((t for t in allowed if t == TIER_ALIASES.get(wanted, wanted)), None)
        if given is None:
            may = ", ".join(allowed)
            raise APIError(
                403, f"service_tier: this key may not use '{wanted}', only {may}", param="service_tier",
                code="tier_not_allowed",
            )  # fmt: skip
        return given


ANYONE = Client("anonymous", None)


def new_key(name: str) -> tuple[str, str]:
    """A new key, and the lines of TOML that let it in."""
    key = f"qbe-{secrets.token_urlsafe(32)}"
    return key, f'[keys.{name}]\nsha256 = "{digest(key)}"\n'


def digest(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def client_of(headers: Mapping[bytes, bytes], settings: Settings) -> Client:
    """Who sent these headers. Raises APIError for a key that is missing or unknown."""
    if not settings.keys:
        return ANYONE
    scheme, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    given = given if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")
    hashed = digest(given.strip())
    client = None
    for name, key in settings.keys.items():  # all of them, so that the time says nothing
        if hmac.compare_digest(hashed, key.sha256):
            client = Client(name, key)
    if client is None:
        raise APIError(
            401, "the key is missing or unknown: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
        )  # fmt: skip
    return client
