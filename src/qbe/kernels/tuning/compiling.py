"""Compiles kernels in processes of their own, for Triton's disk cache: a process that serves only loads them then.

Triton compiles a kernel of ours in 5 to 30 s and holds Python's lock for up to 30 ms at a time meanwhile (measured). A
worker needs no GPU and, without torch, starts in 0.3 s.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from qbe.errors import QBEError

COMPILE_LIMIT_S = 180.0


@dataclass(frozen=True)
class Compilation:
    """One kernel with its constants: everything that a worker needs to make the binary that a launch will look for."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: tuple[str, Any, int]
    cache_key: str  # Triton's for the kernel's source, which depends on what a process has hashed before

    @property
    def key(self) -> str:
        return repr(self)


@dataclass(frozen=True)
class CompileResult:
    """What became of a compilation: seconds, and one line where it failed."""

    seconds: float
    error: str | None = None


_one_collects = threading.Lock()


@contextmanager
def collecting() -> Iterator[list[Compilation]]:
    """What the launches of this thread inside would have to compile. No kernel of Triton's runs meanwhile: one that is
    compiled already might read what one that is not would have written, addresses included."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    needed: dict[str, Compilation] = {}
    thread = threading.get_ident()
    with _one_collects:
        before, plain = knobs.runtime.jit_cache_hook, JITFunction.run

        def hook(**call: Any) -> bool:
            if threading.get_ident() != thread:
                return bool(before(**call)) if before is not None else False
            target = driver.active.get_current_target()
            compilation = _compilation(call, (target.backend, target.arch, target.warp_size))
            needed[compilation.key] = compilation
            return True  # Triton then neither compiles nor launches

        def run(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
            return plain(self, *args, warmup=warmup or threading.get_ident() == thread, **kwargs)

        out: list[Compilation] = []
        knobs.runtime.jit_cache_hook, JITFunction.run = hook, run
        try:
            yield out
        finally:
            knobs.runtime.jit_cache_hook, JITFunction.run = before, plain
            out += needed.values()


def _compilation(call: dict[str, Any], target: tuple[str, Any, int]) -> Compilation:
    """From what Triton tells the hook. Its options come as JSON, which has no tuples."""
    about = call["compile"]
    options = json.loads(about["specialization_data"])["options"]
    return Compilation(
        call["fn"].module, call["fn"].name, dict(about["signature"]), dict(about["constants"]),
        dict(about["configs"][0]), {k: _tuples(v) for k, v in options.items()}, target,
        call["fn"].jit_function.cache_key,
    )  # fmt: skip


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class _Worker:
    """A process that compiles what it is sent. Not for several threads."""

    def __init__(self, nice: int) -> None:
        source = str(Path(__file__).parents[3])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "qbe.kernels.tuning.compile_worker", str(nice)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def compile(self, compilation: Compilation, limit: float) -> CompileResult:
        to, back = self.process.stdin, self.process.stdout
        assert to is not None
        assert back is not None
        clock = threading.Timer(limit, self.process.kill)
        clock.daemon = True
        clock.start()
        try:
            pickle.dump(compilation, to)
            to.flush()
            outcome: CompileResult = pickle.load(back)
        finally:
            clock.cancel()
        return outcome

    def end(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not sent
                    pipe.close()
        self.process.wait()


@dataclass
class CompilePool:
    """Worker processes.

    Attributes:
        workers: how many at most; they start when there is work for them and stay until `close`.
        nice: added to their niceness, so that serving goes first.
        limit: seconds that one compilation may take.
        seconds: of compilation so far, of all workers together.
        total_seconds: the same of all pools of this process.
    """

    total_seconds: ClassVar[float] = 0.0

    workers: int = field(default_factory=lambda: max(1, min(8, len(os.sched_getaffinity(0)) // 2)))
    nice: int = 0
    limit: float = COMPILE_LIMIT_S
    seconds: float = 0.0
    _idle: list[_Worker] = field(default_factory=list)
    _all: list[_Worker] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def compile(
        self, compilations: Sequence[Compilation], on_done: Callable[[], None] | None = None
    ) -> dict[str, CompileResult]:
        """Compile them all; how each went, by its key. A worker that dies or takes too long fails its compilation.

        Args:
            on_done: called after each (a progress bar).
        """
        tasks = iter(list({c.key: c for c in compilations}.values()))
        outcomes: dict[str, CompileResult] = {}

        def work() -> None:
            worker: _Worker | None = None
            while True:
                with self._lock:
                    task = None if self._closed else next(tasks, None)
                    if task is None:
                        if worker is not None:
                            self._idle.append(worker)
                        return
                try:
                    worker = worker or self._worker()
                    outcome = worker.compile(task, self.limit)
                except (OSError, EOFError, ValueError, pickle.PickleError, QBEError) as error:
                    outcome = CompileResult(0.0, f"the compiling process failed: {error or type(error).__name__}")
                    if worker is not None:
                        self._drop(worker)
                        worker = None
                with self._lock:
                    outcomes[task.key] = outcome
                    self.seconds += outcome.seconds
                    CompilePool.total_seconds += outcome.seconds
                    if on_done is not None:
                        on_done()

        count = min(self.workers, len({c.key for c in compilations}))
        threads = [threading.Thread(target=work, daemon=True, name="qbe-compile") for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def close(self) -> None:
        """End the workers now; what they were compiling fails."""
        with self._lock:
            self._closed = True
            for worker in self._idle:
                worker.end()
            for worker in self._all:
                worker.process.kill()  # if it works, the thread that waits for it then ends it
            self._all, self._idle = [], []

    def _worker(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise QBEError("the compile pool is closed")
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self.nice)
            self._all.append(worker)
            return worker

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            if worker in self._all:
                self._all.remove(worker)
        worker.end()
