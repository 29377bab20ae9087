"""Finds better launch configurations while the engine has nothing to do: a thread, trials, and what they conclude."""

from __future__ import annotations

import atexit
import functools
import logging
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from qbe.kernels.tuning.compiling import Compilation, CompilePool, collecting
from qbe.kernels.tuning.timing import seconds_per_launch
from qbe.kernels.tuning.trial import TuningTrial
from qbe.kernels.tuning.tunable import Choice, Config, KernelCache, choices, hardware, kernel_cache

log = logging.getLogger(__name__)
T = TypeVar("T")

ROUNDS = 3  # over all candidates, so that none has the quiet moments for itself; medians are compared
GAIN = 0.98  # of the generic one's time, at most: less is noise
LOOK_S = 0.2  # between two looks for something to tune
PAUSE_S = 0.01  # before an engine that serves is asked again
CLOSE_LIMIT_S = 5.0

_running: weakref.WeakSet[Tuner] = weakref.WeakSet()


class Host(Protocol):
    """Whose idle moments the tuner takes: an engine. No request of it ever waits for a trial."""

    def busy(self) -> bool:
        """Whether a request runs."""

    def renew(self) -> bool:
        """Bring one thing that holds an outdated configuration up to date; whether anything is still outdated."""


class Tuner:
    """A thread that tunes every choice of a device which launches have asked for, the most launched first.

    Trials take milliseconds of the device, on a stream and on data of their own, and begin when no request runs; one
    that a request disturbed is made again. Compilation happens in other processes at the lowest priority. A candidate
    is taken only when its results are those of the generic configuration, up to the rounding of another order of sums.

    Args:
        device: whose choices are tuned.
        host: held weakly; the tuner ends when it is gone.
        pool, trial, measure: the parts, for tests.
    """

    def __init__(
        self,
        device: torch.device,
        host: Host,
        *,
        pool: CompilePool | None = None,
        trial: Callable[[Choice], TuningTrial] = TuningTrial,
        measure: Callable[[TuningTrial, Config], float] = seconds_per_launch,
    ) -> None:
        self.device = device
        self._host = weakref.ref(host)
        self._pool = pool if pool is not None else CompilePool(nice=19)
        self._trial, self._measure = trial, measure
        self._stop, self._settled = threading.Event(), threading.Event()
        self._tuning_seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="qbe-tuner")
        _running.add(self)
        self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is left to tune or to renew; whether that came within `timeout` seconds."""
        self._settled.clear()
        return self._settled.wait(timeout)

    def close(self) -> None:
        """End the thread and the compiling processes. Returns within the time of one trial, and 5 s at the latest."""
        self._stop.set()
        self._pool.close()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_LIMIT_S)

    def numbers(self) -> KernelCache:
        """The kernel cache's numbers as they are now."""
        return kernel_cache(self.device, self._tuning_seconds)

    def _run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))
        try:
            while not self._stop.is_set():
                waiting = [c for c in choices(self.device) if not (c.settled or c.failed)]
                if waiting:
                    self._tune(max(waiting, key=lambda c: (c.misses, -c.problem.rows)))
                else:
                    if not self._renew():
                        self._settled.set()
                    self._stop.wait(LOOK_S)
        except _Stopped:
            pass
        finally:
            self._pool.close()

    @torch.inference_mode()
    def _tune(self, choice: Choice) -> None:
        try:
            if not choice.tunable.adopt(choice):  # another process may have been faster
                self._compare(choice)
        except _Stopped:
            raise
        except Exception as error:  # the generic configuration goes on serving
            choice.failed = True
            log.warning("the kernel of %s was not tuned: %s", choice.key, str(error).partition("\n")[0])

    def _compare(self, choice: Choice) -> None:
        compiling, tuning = self._pool.seconds, self._tuning_seconds
        generic, trial = choice.config, self._when_idle(lambda: self._trial(choice))
        others = choice.tunable.candidates(choice.problem, generic, choice.device)
        compiled = self._compile(trial, [generic, *others])
        expected = self._when_idle(lambda: trial.results(generic))
        others = [c for c in compiled if c is not generic and self._agrees(choice, trial, c, expected)]
        candidates = [generic, *others]
        times: list[list[float]] = [[] for _ in candidates]
        for _ in range(ROUNDS):
            for config, seconds in zip(candidates, times, strict=True):
                seconds.append(self._time(trial, config))
        medians = [statistics.median(seconds) for seconds in times]
        best = min(range(len(candidates)), key=medians.__getitem__)
        if medians[best] > GAIN * medians[0]:
            best = 0
        choice.tunable.store.put(
            choice.key, hardware(choice.device), dict(candidates[best]), medians[best], medians[0],
            self._pool.seconds - compiling, self._tuning_seconds - tuning,
        )  # fmt: skip
        choice.settle(candidates[best])

    def _time(self, trial: TuningTrial, config: Config) -> float:
        while True:
            seconds = self._when_idle(lambda: self._measure(trial, config))
            if not self._busy():
                return seconds

    def _compile(self, trial: TuningTrial, configs: Sequence[Config]) -> list[Config]:
        """Bring the kernels of the configurations to Triton's disk cache; those for which that worked."""

        def collect(config: Config) -> list[Compilation]:
            with collecting() as compilations:
                trial.launch(config, 0)
            return compilations

        needed = [(c, self._when_idle(functools.partial(collect, c))) for c in configs]
        outcomes = self._pool.compile([c for _, compilations in needed for c in compilations])
        if self._stop.is_set():
            raise _Stopped
        good = []
        for config, compilations in needed:
            errors = [e for c in compilations if (e := outcomes[c.key].error) is not None]
            if errors:
                log.info("a candidate does not compile (%s): %s", dict(config), errors[0])
            else:
                good.append(config)
        return good

    def _agrees(self, choice: Choice, trial: TuningTrial, config: Config, expected: list[torch.Tensor]) -> bool:
        """Whether a candidate's results are the generic one's, in a row at most an output's rounding apart."""

        def compare() -> bool:
            return all(_close(y, e) for y, e in zip(trial.results(config), expected, strict=True))

        try:
            if self._when_idle(compare):
                return True
            log.warning("a candidate for %s gives other results and is dropped: %s", choice.key, dict(config))
        except _Stopped:
            raise
        except Exception as error:  # more registers or shared memory than the device has
            log.info("a candidate does not run (%s): %s", dict(config), str(error).partition("\n")[0])
        return False

    def _when_idle(self, work: Callable[[], T]) -> T:
        """The result of `work`, begun when no request runs, and complete on the device."""
        while self._busy():
            self._stop.wait(PAUSE_S)
        began = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._tuning_seconds += time.perf_counter() - began
        return result

    def _busy(self) -> bool:
        return self._alive().busy()

    def _renew(self) -> bool:
        return self._alive().renew()

    def _alive(self) -> Host:
        """The host, which nothing but its owner keeps.

        Raises:
            _Stopped: the tuner is closed, or the host is gone.
        """
        host = self._host()
        if host is None or self._stop.is_set():
            raise _Stopped
        return host


class _Stopped(Exception):
    """The tuner is closing."""


def _close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Two roundings of nearly the same sums differ by less than half a last bit of each row's norm."""
    error = (y.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    tolerance = max(torch.finfo(y.dtype).eps / 2, 3e-6)
    return bool(torch.isfinite(y).all()) and error.max().item() <= tolerance


@atexit.register
def _close_all() -> None:
    """A daemon thread must not be inside of CUDA when the interpreter goes away."""
    for tuner in list(_running):
        tuner.close()
