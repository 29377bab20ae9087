"""`qbe` as a process.

qbe("info", "--json", home=folder)
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import forked

LIMIT_S = 300


@functools.cache
def _compiled() -> list[Path]:
    """What QBE compiles into its cache on first use, in the cache of this process."""
    from qbe.files import cache_dir
    from qbe.kernels.cpu import build, native
    from qbe.store import descent

    if build.backend() != "torch":
        native._compiled()
        descent.library()
    return list((cache_dir() / "kernels").glob("*.so"))


def cache_at(home: Path) -> dict[str, str]:
    """The environment of a process whose cache is there, where it need not compile what this one has: 5 s of a core."""
    folder = home / "kernels"
    for path in _compiled():
        with suppress(OSError):  # it has that already, or can be no cache
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).symlink_to(path)
    return {"QBE_CACHE": str(home)}


def qbe(
    *args: str | bytes, stdin: bytes = b"", home: Path | None = None, reader: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs one command. Without a `reader` its standard output is a pipe whose other end is closed."""
    environment = dict(os.environ, NO_COLOR="1")
    if home is not None:
        environment |= cache_at(home) | {"QBE_RECORDS": str(home / "records.sqlite")}
    out = subprocess.PIPE
    if not reader:
        read, out = os.pipe()
        os.close(read)
    try:
        done = forked.run(
            [sys.executable, "-m", "qbe", *args], env=environment, input=stdin, stdout=out, stderr=subprocess.PIPE,
            cwd=cwd, timeout=LIMIT_S,
        )  # fmt: skip
        return subprocess.CompletedProcess(list(args), done.returncode, done.stdout or b"", done.stderr)
    finally:
        if not reader:
            os.close(out)


def refused(
    *args: str | bytes, stdin: bytes = b"", home: Path | None = None, out: bytes = b"", cwd: Path | None = None
) -> str:
    done = qbe(*args, stdin=stdin, home=home, cwd=cwd)
    message = done.stderr.decode().strip()
    assert done.returncode == 2, message
    assert "Traceback" not in message
    assert message.startswith("qbe: ")
    assert "\n" not in message
    assert done.stdout == out
    return message
