"""Which launch configuration a kernel runs with: the generic one until a better one is known.

A `Tunable` is asked on every launch and answers out of a dictionary. Where nothing was tuned it answers with the
generic configuration, a plain function of the shape; nothing is ever compared or compiled on the way of a launch.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qbe.kernels.tuning.compiling import CompilePool
from qbe.kernels.tuning.store import TunedStore, shared

Config = Mapping[str, int]  # tile, split, pipeline and warps, as the kernel's launch takes them


class Problem(NamedTuple):
    """What a configuration is chosen for.

    Attributes:
        rows: of x, rounded up to a power of two.
        outputs: N of each weight of the launch.
        inputs: K.
        slices: widths of the slices of the weights.
        group_size: inputs that share a scale.
        dtype: of x.
        original, bias: whether the kernel was given them: it is compiled differently.
        float32_output: whether its results are float32 where x is not.
    """

    rows: int
    outputs: tuple[int, ...]
    inputs: int
    slices: tuple[int, ...]
    group_size: int
    dtype: torch.dtype
    original: bool
    bias: bool
    float32_output: bool = False


@dataclass(eq=False)
class Choice:
    """The configuration that serves a problem on a device.

    Attributes:
        config: in use now. It is replaced, never changed.
        settled: whether it is a tuned one, or the only one that there is.
        failed: tuning it failed; it is not tried again in this process.
        hits, misses: launches with a settled configuration, and with the generic one before.
    """

    tunable: Tunable
    device: torch.device
    problem: Problem
    config: Config
    settled: bool
    failed: bool = False
    hits: int = 0
    misses: int = 0

    @property
    def key(self) -> str:
        """What the choice is known by on disk."""
        return key_of(self.tunable.name, self.problem)

    def settle(self, config: Config) -> None:
        """From the next launch on, this configuration serves."""
        self.config, self.settled = config, True

    def count(self, config: Config, launches: int = 1) -> None:
        """Launches with `config`, which was in use when they were made or captured."""
        if self.settled and config is self.config:
            self.hits += launches
        else:
            self.misses += launches


class _Thread(threading.local):
    launches: list[tuple[Choice, Config]] | None = None


_thread = _Thread()
_tunables: weakref.WeakSet[Tunable] = weakref.WeakSet()


@dataclass(eq=False)
class Tunable:
    """A kernel whose launch can be configured.

    Attributes:
        name: of the kernel, in the keys on disk.
        generic: the configuration that serves until a better one is known.
        candidates: other configurations worth a trial, every one of them valid; the second argument is the generic one.
        valid: whether a configuration (from disk) may be launched for a problem.
        store: where tuned configurations are looked up.
    """

    name: str
    generic: Callable[[Problem, torch.device], Config]
    candidates: Callable[[Problem, Config, torch.device], Sequence[Config]]
    valid: Callable[[Problem, Config], bool]
    store: TunedStore = shared
    _choices: dict[tuple[Any, ...], Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _tunables.add(self)

    def config(
        self, device: torch.device, rows: int, outputs: tuple[int, ...], inputs: int, slices: tuple[int, ...],
        group_size: int, dtype: torch.dtype, original: bool, bias: bool, float32_output: bool = False,
    ) -> Config:  # fmt: skip
        """The configuration to launch with now. See `Problem`; `rows` is their number as it is."""
        bucket = 1 << (rows - 1).bit_length()
        key = (device, bucket, outputs, inputs, slices, group_size, dtype, original, bias, float32_output)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices.setdefault(key, self._first(device, Problem(*key[1:])))
        config = choice.config
        if _thread.launches is None:
            choice.count(config)
        else:
            _thread.launches.append((choice, config))
        return config

    def _first(self, device: torch.device, problem: Problem) -> Choice:
        generic = self.generic(problem, device)
        choice = Choice(self, device, problem, generic, not self.candidates(problem, generic, device))
        if not choice.settled:
            self.adopt(choice)
        return choice

    def adopt(self, choice: Choice) -> bool:
        """Take what the store has for a choice; whether it had something that fits."""
        config = self.store.get(choice.key, hardware(choice.device))
        if config is None or config.keys() != choice.config.keys() or not self.valid(choice.problem, config):
            return False
        choice.settle(config)
        return True


def choices(device: torch.device) -> list[Choice]:
    """Every choice that a launch on the device has asked for since this process began."""
    made = [c for t in list(_tunables) for c in list(t._choices.values())]
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    return [c for c in made if c.device.type == device.type and c.device.index == index]


@contextmanager
def recording() -> Iterator[list[tuple[Choice, Config]]]:
    """The launches that this thread makes inside, in order; they are not counted. So a CUDA graph knows its own."""
    before = _thread.launches
    launches: list[tuple[Choice, Config]] = []
    _thread.launches = launches
    try:
        yield launches
    finally:
        _thread.launches = before


@dataclass(frozen=True)
class KernelCache:
    """Numbers of the kernel cache since this process began.

    Attributes:
        hits: launches, replayed from a CUDA graph or not, with a tuned configuration or one without alternatives.
        misses: launches with a generic configuration while there was none better yet.
        tuned: problems whose best configuration is known.
        queued: problems that run with a generic configuration for now.
        compile_seconds: of the processes that compiled kernels, at the start and for trials.
        tuning_seconds: that trials took of the engine's idle time.
    """

    hits: int
    misses: int
    tuned: int
    queued: int
    compile_seconds: float
    tuning_seconds: float

    @property
    def hit_rate(self) -> float | None:
        """Share of hits among launches; None before the first."""
        launches = self.hits + self.misses
        return self.hits / launches if launches else None

    def describe(self) -> dict[str, Any]:
        """The numbers as JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}


def kernel_cache(device: torch.device, tuning_seconds: float = 0.0) -> KernelCache:
    """The numbers as they are now, of all engines on that device; the tuning is the caller's to know."""
    made = choices(device)
    return KernelCache(
        hits=sum(c.hits for c in made),
        misses=sum(c.misses for c in made),
        tuned=sum(c.settled for c in made),
        queued=sum(not (c.settled or c.failed) for c in made),
        compile_seconds=CompilePool.total_seconds,
        tuning_seconds=tuning_seconds,
    )


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors; those of an H200 for a CPU, where kernels run in Triton's interpreter only."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def hardware(device: torch.device) -> str:
    """The device as the keys on disk name it; two with the same name are equally fast."""
    if device.type != "cuda":
        return device.type
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors"


@cache
def _software() -> tuple[str, str]:
    """Triton's version and a hash of QBE's kernels and of the code that launches them."""
    from importlib.metadata import PackageNotFoundError, version

    source = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "triton").rglob("*.py")):
        source.update(path.read_bytes())
    try:
        triton = version("triton")
    except PackageNotFoundError:  # vendors' builds go by other names
        triton = "unknown"
    return triton, source.hexdigest()[:16]


def key_of(kernel: str, problem: Problem) -> str:
    """The key of a problem on disk, as JSON; the hardware is a column of its own."""
    triton, source = _software()
    fields = {**problem._asdict(), "dtype": str(problem.dtype).removeprefix("torch.")}
    return json.dumps({"kernel": kernel, "triton": triton, "source": source, **fields})
