"""`subprocess.Popen` for Python, forked from a process that has imported everything: as real as a new interpreter
(arguments, streams, signals, exit code), without the seconds that importing torch and transformers takes.

    with Popen([sys.executable, "-m", "qbe", "info", "--json"], stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=60)

On machines with a GPU it is `subprocess.Popen` itself: torchao starts CUDA as it is imported, and forks cannot use it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# What processes of the product import, and those of tests in Triton's interpreter, which is chosen as Triton is.
PRODUCT = ("qbe.cli.main", "qbe.cli.info", "qbe.engine.engine", "qbe.server.app", "qbe.explain.html", "uvicorn",
           "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
           "transformers.models.auto.tokenization_auto", "pydantic.root_model", "anyio._backends._asyncio",
           "uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on", "typer.rich_utils", "scipy.stats", "torch._dynamo",
           "torch._inductor.compile_fx")  # fmt: skip
# torch imports its decompositions, and sympy, when it calls the first operation in the interpreter.
INTERPRETED = ("pytest", "hypothesis", "triton.runtime.interpreter", "qbe.kernels.reference.nested_linear",
               "torch._inductor.decomposition", "qbe.engine.sampling.sampler", "qbe.store.nested_linears")  # fmt: skip
NUMBER = struct.Struct("i")
Started = subprocess.Popen  # tests put `_Forked` in its place
SERVES = list[str]()  # the address that this process forks at, where it does


@functools.cache
def _server(interpret: bool) -> str:
    """The address of the process that forks; it ends when this one does."""
    if SERVES:  # this one, or what it forked, whose commands start others
        return SERVES[0]
    address = str(Path(tempfile.mkdtemp(prefix="qbe-forks-")) / "socket")
    # BLAS's threads would not live on in forks.
    environment = dict(os.environ, NO_COLOR="1", OPENBLAS_NUM_THREADS="1")
    if interpret:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = Started(
        [sys.executable, __file__, address], env=environment, start_new_session=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def close() -> None:
        process.communicate(timeout=60)
        shutil.rmtree(Path(address).parent)

    atexit.register(close)
    return address


class _Forked(Started[Any]):
    """Of arguments that begin with `sys.executable`, then `-m MODULE`, `-c CODE` or a script; others are not forked."""

    _ended: socket.socket | None = None

    def _execute_child(
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, *rest: Any,
    ) -> None:  # fmt: skip
        program, *arguments = args
        if program != sys.executable or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
                p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
            )  # fmt: skip
            return
        assert preexec_fn is None
        environment = dict(os.environ if env is None else env)
        ask = {"args": [os.fsdecode(a) for a in arguments], "environment": environment,
               "cwd": os.path.abspath(os.fspath(cwd or "."))}  # fmt: skip
        streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._ended = socket.socket(socket.AF_UNIX)
        self._ended.connect(_server(environment.get("TRITON_INTERPRET") == "1"))
        socket.send_fds(self._ended, [b"."], streams)
        self._ended.sendall(json.dumps(ask).encode() + b"\n")
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid = self._hear()
        self._child_created = True

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._ended is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            with suppress(BlockingIOError):
                self.returncode = os.waitstatus_to_exitcode(self._hear(socket.MSG_DONTWAIT))
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._ended is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._internal_poll()
        assert self.returncode is not None
        return self.returncode

    def _hear(self, *flags: int) -> int:
        """The process's number when it has begun, its status when it has ended."""
        assert self._ended is not None
        found = self._ended.recv(NUMBER.size, *flags)
        return int(NUMBER.unpack(found)[0])


def popen_type() -> type[subprocess.Popen[Any]]:
    """Whichever of the two this machine can have."""
    import torch  # not above: the process that forks imports it after QBE

    return Started if torch.cuda.is_available() else _Forked


def Popen(args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """A process; its options are those of `subprocess.Popen`."""
    return popen_type()(args, **options)


def run(
    args: Sequence[str], *, input: Any = None, timeout: float, capture_output: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options.setdefault("stdin", subprocess.DEVNULL if input is None else subprocess.PIPE)
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Forks for each connection, until standard input ends. Returns in the forks, with what they are asked for."""
    while True:
        if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection:
        _, streams, *_ = socket.recv_fds(connection, 1, 3)
        ask: dict[str, Any] = json.loads(connection.makefile("rb").readline())
        child = os.fork()
        if child:  # waits, since exit codes are told to parents alone
            for stream in streams:
                os.close(stream)
            with suppress(OSError):  # who asked may have gone
                connection.sendall(NUMBER.pack(child))
                connection.sendall(NUMBER.pack(os.waitpid(child, 0)[1]))
            os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return ask


def become(ask: dict[str, Any]) -> None:
    """Runs what `python ARGS` would run."""
    os.environ.clear()
    os.environ.update(ask["environment"])
    os.chdir(ask["cwd"])
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, 1 if number == 2 else -1, s.encoding, s.errors, closefd=False)  # noqa: SIM115
        for number, (mode, s) in enumerate((("r", sys.stdin), ("w", sys.stdout), ("w", sys.stderr)))
    )
    kind, *rest = ask["args"]
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv, sys.path[0] = ask["args"], os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


def end_as_python_would(ask: dict[str, Any]) -> None:
    """`become`, then the end of this process, but for what Python does last: it takes all modules apart, and a fork
    copies for that every page that it shares, which takes longer than most commands. Exceptions it leaves to Python."""
    status: Any = None
    try:
        become(ask)
    except SystemExit as error:
        status = error.code
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):  # who reads has gone: Python says so by an exit code of its own
        sys.exit(status)
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    SERVES.append(sys.argv[1])
    for name in INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else PRODUCT:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait are not waited for
    gc.freeze()  # else every process would look at each object of ours as it ends
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        print("ready", flush=True)
        asked = serve(listener)
    if asked is not None:
        subprocess.Popen = _Forked  # type: ignore[misc]
        end_as_python_would(asked)
