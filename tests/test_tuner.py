"""The tuner on a made-up kernel: what it picks, what it refuses, when it works, and how it ends."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from qbe.kernels.tuning.compiling import CompilePool
from qbe.kernels.tuning.store import TunedStore
from qbe.kernels.tuning.tunable import Choice, Config, Problem, Tunable, choices, kernel_cache, recording
from qbe.kernels.tuning.tuner import Tuner

META = torch.device("meta")  # nothing else launches there
LIMIT_S = 30.0
TILES = (1, 2, 3, 4)  # of the made-up kernel; 1 is the generic one


class Host:
    """An engine that does as it is told."""

    def __init__(self) -> None:
        self.is_busy, self.stale = False, 0
        self.looked = threading.Event()
        self.renewed: list[bool] = []

    def busy(self) -> bool:
        self.looked.set()
        return self.is_busy

    def renew(self) -> bool:
        if self.stale and not self.is_busy:
            self.stale -= 1
            self.renewed.append(self.is_busy)
        return self.stale > 0


class Trial:
    """Results of 1 + tile * 0 where a candidate is right, and of what `wrong` says where it is not."""

    def __init__(self, choice: Choice, wrong: dict[int, Any] | None = None) -> None:
        self.wrong = wrong or {}

    def launch(self, config: Config, copy: int) -> None:
        pass

    def results(self, config: Config) -> list[torch.Tensor]:
        outcome = self.wrong.get(config["TILE"], 1.0)
        if isinstance(outcome, Exception):
            raise outcome
        return [torch.ones(2, 4), torch.full((2, 4), outcome)]


@pytest.fixture
def tunable(tmp_path: Path) -> Iterator[Tunable]:
    made = make(tmp_path)
    yield made
    made._choices.clear()


def make(folder: Path) -> Tunable:
    return Tunable(
        "made-up",
        generic=lambda problem, device: {"TILE": TILES[0]},
        candidates=lambda problem, generic, device: [{"TILE": t} for t in TILES[1:]] if problem.rows < 64 else [],
        valid=lambda problem, config: config["TILE"] in TILES,
        store=TunedStore(folder / "tuned.sqlite"),
    )


def ask(tunable: Tunable, rows: int = 5, n: int = 64) -> Config:
    return tunable.config(META, rows, (n,), 256, (4, 2, 2), 64, torch.bfloat16, True, False)


def times(found: dict[int, float]) -> Callable[[Any, Config], float]:
    return lambda trial, config: found[config["TILE"]]


def tuner(host: Host, measure: Callable[[Any, Config], float], **parts: Any) -> Tuner:
    return Tuner(META, host, trial=parts.pop("trial", Trial), measure=measure, **parts)


def tuned(tunable: Tunable, found: Sequence[float], **parts: Any) -> Config:
    """The configuration in use after tuning, given what launches with each take."""
    ask(tunable)
    host = Host()
    running = tuner(host, times(dict(zip(TILES, found, strict=True))), **parts)
    assert running.wait(LIMIT_S)
    running.close()
    return ask(tunable)


def test_buckets_hits_misses_and_what_has_no_alternative(tunable: Tunable) -> None:
    for rows in (1, 8, 9, 16, 17):
        ask(tunable, rows)
    ask(tunable, 100)  # no candidates: nothing better can come
    assert sorted(c.problem.rows for c in choices(META)) == [1, 8, 16, 32, 128]
    numbers = kernel_cache(META)
    assert (numbers.hits, numbers.misses, numbers.queued) == (1, 5, 4)
    assert numbers.hit_rate == pytest.approx(1 / 6)
    with recording() as launches:
        config = ask(tunable, 7)
    assert [(c.problem.rows, used) for c, used in launches] == [(8, config)]
    assert kernel_cache(META).misses == 5


def test_the_fastest_is_taken_kept_and_found_by_the_next_process(tunable: Tunable, tmp_path: Path) -> None:
    assert tuned(tunable, (4.0, 3.0, 1.0, 2.0)) == {"TILE": 3}
    numbers = kernel_cache(META)
    assert (numbers.hits, numbers.misses, numbers.tuned, numbers.queued) == (1, 1, 1, 0)
    again = make(tmp_path)
    assert ask(again) == {"TILE": 3}
    assert [c.settled for c in again._choices.values()] == [True]
    again._choices.clear()


@pytest.mark.parametrize("found", [(1.0, 2.0, 3.0, 4.0), (1.0, 0.99, 0.995, 1.0)], ids=["slower", "noise"])
def test_the_generic_one_stays_where_none_is_clearly_faster(tunable: Tunable, found: tuple[float, ...]) -> None:
    assert tuned(tunable, found) == {"TILE": 1}
    assert kernel_cache(META).tuned == 1


@pytest.mark.parametrize("outcome", [1.1, float("nan"), float("inf"), RuntimeError("out of registers")], ids=str)
def test_a_candidate_with_other_results_or_none_is_refused(tunable: Tunable, outcome: Any) -> None:
    def trial(choice: Choice) -> Trial:
        return Trial(choice, {3: outcome})

    assert tuned(tunable, (4.0, 3.0, 1.0, 2.0), trial=trial) == {"TILE": 4}


def test_a_trial_that_fails_leaves_the_generic_one(tunable: Tunable) -> None:
    def trial(choice: Choice) -> Trial:
        raise torch.OutOfMemoryError("no memory")

    assert tuned(tunable, (4.0, 3.0, 1.0, 2.0), trial=trial) == {"TILE": 1}
    numbers = kernel_cache(META)
    assert (numbers.tuned, numbers.queued) == (0, 0)
    assert tunable.store.summary("meta")["tuned"] == 0


def test_a_kept_configuration_that_is_not_valid_is_not_used(tunable: Tunable, tmp_path: Path) -> None:
    assert tuned(tunable, (4.0, 3.0, 1.0, 2.0)) == {"TILE": 3}
    (choice,) = choices(META)
    for bad in ({"TILE": 99}, {"TILE": 2, "MORE": 1}, {}):
        tunable.store.put(choice.key, "meta", bad, 1e-6, 1e-6, 0.0, 0.0)
        again = make(tmp_path)
        assert ask(again) == {"TILE": 1}
        again._choices.clear()


def test_what_another_process_tuned_meanwhile_is_taken_over(tunable: Tunable) -> None:
    ask(tunable)
    (choice,) = choices(META)
    tunable.store.put(choice.key, "meta", {"TILE": 2}, 1e-6, 2e-6, 0.0, 0.0)
    assert tuned(tunable, (1.0, 1.0, 1.0, 1.0)) == {"TILE": 2}


def test_the_most_launched_comes_first(tunable: Tunable) -> None:
    order: list[int] = []
    for n, launches in ((64, 1), (128, 5), (192, 3)):
        for _ in range(launches):
            ask(tunable, n=n)

    def trial(choice: Choice) -> Trial:
        order.append(choice.problem.outputs[0])
        return Trial(choice)

    host = Host()
    running = tuner(host, times(dict.fromkeys(TILES, 1.0)), trial=trial)
    assert running.wait(LIMIT_S)
    running.close()
    assert order == [128, 192, 64]


def test_no_trial_begins_while_a_request_runs_and_a_disturbed_one_is_made_again(tunable: Tunable) -> None:
    ask(tunable)
    host = Host()
    host.is_busy, host.stale = True, 2
    measured: list[int] = []

    def measure(trial: Any, config: Config) -> float:
        assert not host.is_busy
        measured.append(config["TILE"])
        if len(measured) == 5:
            host.is_busy = True  # a request comes in the middle of this one
            threading.Timer(0.1, lambda: setattr(host, "is_busy", False)).start()
        return float(config["TILE"])

    running = tuner(host, measure)
    assert host.looked.wait(LIMIT_S)
    time.sleep(0.1)
    assert measured == []
    host.is_busy = False
    assert running.wait(LIMIT_S)
    running.close()
    assert measured == [1, 2, 3, 4, 1, 1, 2, 3, 4, 1, 2, 3, 4]
    assert host.renewed == [False, False]


def test_it_closes_in_the_middle_of_a_compilation(tunable: Tunable) -> None:
    ask(tunable)
    compiling, closed = threading.Event(), threading.Event()

    class Pool(CompilePool):
        def compile(self, *arguments: Any) -> dict[str, Any]:
            compiling.set()
            closed.wait(LIMIT_S)
            return {}

        def close(self) -> None:
            closed.set()

    host = Host()
    running = tuner(host, times(dict.fromkeys(TILES, 1.0)), pool=Pool())
    assert compiling.wait(LIMIT_S)
    running.close()
    assert not running._thread.is_alive()
    assert ask(tunable) == {"TILE": 1}
    assert kernel_cache(META).queued == 1


def test_it_ends_with_its_engine(tunable: Tunable) -> None:
    host = Host()
    gone = weakref.ref(host)
    running = tuner(host, times(dict.fromkeys(TILES, 1.0)))
    assert running.wait(LIMIT_S)
    del host
    gc.collect()
    running._thread.join(LIMIT_S)
    assert gone() is None
    assert not running._thread.is_alive()


LEFT_RUNNING = f"""
import sys, tempfile, threading, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tuner import Host, ask, make, tuner
tunable, host, measuring = make(Path(tempfile.mkdtemp())), Host(), threading.Event()
ask(tunable)
running = tuner(host, lambda trial, config: measuring.set() or time.sleep(0.05) or 1.0)
assert measuring.wait(30)
print("done")
"""


def test_a_process_ends_while_it_tunes(tmp_path: Path) -> None:
    source = str(Path(__file__).parents[1] / "src")
    env = {**os.environ, "PYTHONPATH": source, "TMPDIR": str(tmp_path)}
    done = forked.run([sys.executable, "-c", LEFT_RUNNING], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "done", "")


def test_problems_are_what_the_launch_said(tunable: Tunable) -> None:
    ask(tunable, 12)
    (choice,) = choices(META)
    assert choice.problem == Problem(16, (64,), 256, (4, 2, 2), 64, torch.bfloat16, True, False)
