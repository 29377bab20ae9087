"""Baseline and candidate: a server's address, or a model that is served here as it is configured."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qbe.bench.serving import serving
from qbe.models import pull
from qbe.regress.client import Client
from qbe.sites import FULL_BITS
from qbe.store.provenance import content_digest

# Of a baseline that is served here, where the suite does not say how it is asked.
FULL_PRECISION: dict[str, Any] = {"qbe": {"bits": FULL_BITS, "kv_bits": FULL_BITS}}


@dataclass(frozen=True)
class Target:
    """One side of the comparison.

    Attributes:
        where: an address, or anything that `qbe.pull` takes.
        settings: of `qbe serve`, TOML.
        request: fields of every request.
        options: of `qbe serve`.
        device: of the server.
    """

    where: str
    settings: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    device: str = "auto"

    @property
    def is_url(self) -> bool:
        return self.where.startswith(("http://", "https://"))

    @property
    def path(self) -> Path | None:
        """Of the model's folder or file; None for a server elsewhere."""
        return None if self.is_url else pull(self.where, progress=False)


@dataclass
class Served:
    """A target that answers.

    Attributes:
        client: asks it.
        pid: of the server's process where it was started here.
        started_s: seconds until it was ready.
    """

    client: Client
    pid: int | None = None
    started_s: float | None = None

    def memory(self) -> int | None:
        """Bytes of memory that the process has, without what it needed to start; None where that cannot be known."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0]) * 1024
        except (OSError, ValueError, IndexError):
            return None


@contextmanager
def serve(target: Target) -> Iterator[Served]:
    """Starts the server, where it is not one already, and stops it in the end.

    Raises:
        QBEError: it does not start, or nobody answers.
    """
    if target.is_url:
        client = Client(target.where, os.environ.get("OPENAI_API_KEY", ""), target.request)
        try:
            yield Served(client)
        finally:
            client.close()
        return
    began = time.monotonic()
    with (
        _own_key(target.settings) as (key, options),
        serving(target.where, target.device, target.settings, *target.options, *options, originals=None) as server,
    ):
        client = Client(server.url, key, target.request)
        try:
            yield Served(client, server.process.pid, time.monotonic() - began)
        finally:
            client.close()


@contextmanager
def _own_key(settings: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A key and the option that makes it known, where the settings have keys: of those only digests are known."""
    if not tomllib.loads(settings).get("keys"):
        yield "", ()
        return
    key, name = f"qbe-{secrets.token_hex(16)}", f"regress-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="qbe-regress-") as folder:
        file = Path(folder, "keys.toml")
        file.write_text(f'[keys.{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n')
        yield key, ("--keys", str(file))


def digest_of(target: Target, client: Client) -> str:
    """Of what a model's folder or file holds; of a server elsewhere, of what it says that it is.

    A verdict is about exactly this.
    """
    path = target.path
    if path is None:
        said = f"{client.url}\n{client.model}"
        return f"url:{hashlib.sha256(said.encode()).hexdigest()}"
    return content_digest(path)
