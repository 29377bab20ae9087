"""Runs a program that a model wrote: in a process of its own, for seconds, with little memory and no network.

What holds it: a fresh Python without site packages and environment, in an empty folder that is deleted; limits of the
kernel on time, memory, file size, open files and processes (of root's processes it counts none); on Linux, where user
namespaces are allowed, a network namespace with no device in it; and a hook of Python that refuses network, other
programs and writing outside of the folder.

What this does not prevent: the program runs as this user and can read what the user can read. The hook is a fence, not
a wall: code that finds a hole in CPython gets over it, and where namespaces are not allowed it alone keeps the network
away. A program may also lie about having passed. Against attackers put a container or a virtual machine around all of
`qbe eval`; for the programs of models that mean no harm this is enough.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECONDS = 10.0
MEMORY = 1 << 30  # bytes of address space
CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Verdict:
    """How a program ended.

    Attributes:
        passed: whether it ran to its end; leaving early with `exit(0)` is no pass.
        said: `passed`, the type of what it raised, `time`, or how its process ended.
    """

    passed: bool
    said: str


def run(program: str, seconds: float = SECONDS) -> Verdict:
    """Runs Python source to its end.

    Args:
        seconds: of wall-clock time, after which it and all processes it made are killed; of processor time as many.
    """
    with tempfile.TemporaryDirectory(prefix="qbe-sandbox-", ignore_cleanup_errors=True) as folder:
        source = Path(folder, "program.py")
        source.write_text(program, encoding="utf-8", errors="replace")
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), str(source), str(int(seconds) + 1), str(MEMORY)],
            cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                out = b"time"
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has left behind
    said = out.decode(errors="replace").strip()[:200] or f"ended with {process.returncode}"
    return Verdict(said == "passed", said)
