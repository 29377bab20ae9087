"""`qbe serve` as a process of its own, for whoever measures it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from qbe.errors import QBEError

_START_S = 900.0  # the first time a model is nested
_END_S = 30.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[str]
    ledger: Path


@contextmanager
def serving(
    model: str | Path, device: str, settings: str, *options: str, originals: str | None = "device",
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:  # fmt: skip
    """Start a server on a free port, with a ledger and records of its own, and wait until it is ready.

    Args:
        settings: TOML.
        options: more of them.
        originals: where the 16-bit weights live; None: where the settings say.
        environment: more of it.

    Raises:
        QBEError: it does not start; what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="qbe-bench-") as home:
        config, log = Path(home, "serve.toml"), Path(home, "log")
        config.write_text(settings)
        env = {**os.environ, "QBE_LEDGER": f"{home}/ledger.sqlite", "QBE_RECORDS": f"{home}/records.sqlite",
               "NO_COLOR": "1", **(environment or {})}  # fmt: skip
        command = [sys.executable, "-m", "qbe", "serve", "--port", "0", "--model", str(model), "--device", device,
                   "--config", str(config), *options]  # fmt: skip
        command += [] if originals is None else ["--originals", originals]
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as process,
        ):
            try:
                yield RunningServer(_ready(process, log), process, Path(home, "ledger.sqlite"))
            finally:
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _ready(process: subprocess.Popen[str], log: Path) -> str:
    """Its address, once it takes requests."""
    ends, url = time.monotonic() + _START_S, ""
    assert process.stdout is not None
    with httpx2.Client(timeout=_END_S) as http:
        while time.monotonic() < ends:
            if process.poll() is not None:
                lines = log.read_text().strip().splitlines() or ["it said nothing"]
                raise QBEError(f"the server ended at its start: {lines[-1].removeprefix('qbe: ')}")
            if not url:
                if select.select([process.stdout], [], [], 1.0)[0]:
                    url = process.stdout.readline().rpartition(" ")[2].strip()
            elif http.get(f"{url}/ready").status_code == 200:
                return url
            else:
                time.sleep(0.1)
    raise QBEError(f"the server was not ready after {_START_S:g} s")
