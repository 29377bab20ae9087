"""`qbe serve` as a process of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx2

import forked
from cli_process import cache_at
from server_running import LIMIT_S, tiny_parts, until


def save_tiny(folder: Path) -> Path:
    """The tiny model as a folder."""
    for part in tiny_parts():
        part.save_pretrained(folder)
    return folder


@contextmanager
def serving(
    *options: str, home: Path, program: tuple[str, ...] = ("-m", "qbe"), log: IO[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address; it is ready.

    Args:
        log: takes its log; None: a pipe does, which holds what some hundred requests say.
    """
    process = start(*options, home=home, program=program, log=log)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT_S)[0], "it says where it listens"
        url = process.stdout.readline().split()[-1]

        with httpx2.Client(base_url=url, timeout=LIMIT_S, verify=False) as http:

            def ready() -> bool:
                assert process.poll() is None, process.stderr.read() if process.stderr is not None else "see its log"
                return http.get("/ready").status_code == 200

            assert http.get("/health").status_code == 200  # before the model is there
            until(ready, "it is ready", every_s=0.05)
        yield process, url
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def start(
    *options: str, home: Path, program: tuple[str, ...] = ("-m", "qbe"), log: IO[str] | None = None
) -> subprocess.Popen[str]:
    """`qbe serve` on a free port.

    Args:
        home: its cache, records and ledger.
        program: what runs in place of `qbe`.
        log: as in `serving`.
    """
    environment = dict(os.environ, NO_COLOR="1", **cache_at(home), QBE_RECORDS=str(home / "records.sqlite"),
                       QBE_LEDGER=str(home / "ledger.sqlite"))  # fmt: skip
    command = [sys.executable, *program, "serve", "--port", "0", *options]
    return forked.Popen(command, stdout=subprocess.PIPE, stderr=log or subprocess.PIPE, text=True, env=environment)
