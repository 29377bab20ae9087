"""How long a launch takes on a GPU, although the host takes longer to make one than the GPU to run it."""

from __future__ import annotations

import torch

from qbe.kernels.tuning.trial import TuningTrial
from qbe.kernels.tuning.tunable import Config

LAUNCHES = 8  # in a row, at least
REPEATS = 3  # at each precision; the fastest counts, the first may find cold caches
SPIN = 1 << 21  # cycles that the GPU is kept waiting for, about a millisecond; doubled until that is enough
MOST_SPIN = 1 << 26


def seconds_per_launch(trial: TuningTrial, config: Config) -> float:
    """At the lowest and at the highest precision on average. Takes some milliseconds of the current stream.

    The launches queue up behind a kernel that does nothing for a while. (A CUDA graph would do as well, but while one
    is captured other threads cannot draw random numbers on the device.)
    """
    launches, spin, total = max(LAUNCHES, trial.copies), SPIN, 0.0
    for width in (trial.precisions[0], trial.precisions[-1]):
        trial.set_bits(width)
        times: list[float] = []
        while len(times) < REPEATS:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(spin)
            start.record()
            for i in range(launches):
                trial.launch(config, i)
            end.record()
            late = start.query()  # the GPU had begun before the last launch was made
            end.synchronize()
            if not late or spin >= MOST_SPIN:
                times.append(start.elapsed_time(end) * 1e-3)
            else:
                spin *= 2
        total += min(times) / launches
    return total / 2
