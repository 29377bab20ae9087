"""`qbe` in processes that are forked from one which has imported everything: each as real as `python -m qbe` (streams,
signals, exit code), without the seconds that importing torch and transformers takes. Not on machines with a GPU.

    qbe("info", "--json", home=folder)
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LIMIT_S = 300


class Commands:
    """The process that forks; `close` ends it."""

    def __init__(self) -> None:
        # BLAS's threads would not live on in forks.
        environment = dict(os.environ, NO_COLOR="1", OPENBLAS_NUM_THREADS="1")
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    def run(
        self, args: Sequence[str | bytes], environment: Mapping[str, str], stdin: bytes = b"", reader: bool = True,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[bytes]:  # fmt: skip
        """Runs one command. Without a `reader` its standard output is a pipe whose other end is closed."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            streams[0].write_bytes(stdin)
            ask = {
                "args": [os.fsdecode(a) for a in args],
                "environment": dict(environment),
                "streams": [str(s) for s in streams],
                "reader": reader,
                "cwd": os.fspath(cwd or Path.cwd()),
            }
            self._server.stdin.write(json.dumps(ask).encode() + b"\n")
            self._server.stdin.flush()
            if not select.select([self._server.stdout], [], [], LIMIT_S)[0]:
                os.killpg(self._server.pid, signal.SIGKILL)
                raise TimeoutError(f"qbe {args} did not end within {LIMIT_S} s")
            code = int(self._server.stdout.readline())
            out, err = (s.read_bytes() if s.exists() else b"" for s in streams[1:])
        return subprocess.CompletedProcess(list(args), code, out, err)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)


@functools.cache
def _commands() -> Commands:
    """One for all tests of a process."""
    commands = Commands()
    atexit.register(commands.close)
    return commands


def qbe(
    *args: str | bytes, stdin: bytes = b"", home: Path | None = None, reader: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    import torch  # not above: where this file is run, it is imported after QBE

    environment = dict(os.environ, NO_COLOR="1")
    if home is not None:
        environment |= {"QBE_CACHE": str(home), "QBE_RECORDS": str(home / "records.sqlite")}
    run = _started if torch.cuda.is_available() else _commands().run
    return run(args, environment, stdin, reader, cwd)


def _started(
    args: Sequence[str | bytes], environment: Mapping[str, str], stdin: bytes, reader: bool, cwd: Path | None
) -> subprocess.CompletedProcess[bytes]:
    """`python -m qbe`, for machines with a GPU: torchao starts CUDA as it is imported, and forks could not use it."""
    out = subprocess.PIPE
    if not reader:
        read, out = os.pipe()
        os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "qbe", *args], env=environment, input=stdin, stdout=out, stderr=subprocess.PIPE,
            cwd=cwd, timeout=LIMIT_S, check=False,
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


def serve() -> None:
    """Forks for every line of JSON on standard input and prints the exit code of what it forked."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    import qbe.cli.info
    import qbe.engine.engine
    import qbe.explain.html  # noqa: F401
    from qbe.cli import main

    gc.freeze()  # else every process would look at each object of ours as it ends
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            ask = json.loads(line)
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        return
    os.environ.clear()
    os.environ.update(ask["environment"])
    os.chdir(ask["cwd"])
    if ask["reader"]:
        out = os.open(ask["streams"][1], os.O_WRONLY | os.O_CREAT)
    else:
        read, out = os.pipe()
        os.close(read)
    opened = (os.open(ask["streams"][0], os.O_RDONLY), out, os.open(ask["streams"][2], os.O_WRONLY | os.O_CREAT))
    for number, stream in enumerate(opened):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding=s.encoding, errors=s.errors, closefd=False)  # noqa: SIM115
        for number, (mode, s) in enumerate((("r", sys.stdin), ("w", sys.stdout), ("w", sys.stderr)))
    )
    main(ask["args"])


if __name__ == "__main__":
    serve()
