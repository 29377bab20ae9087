"""A captured decode step: its graph, what it writes, and which configurations of kernels it holds."""

from __future__ import annotations

import collections.abc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qbe.analysis.difficulty import difficulty
from qbe.engine.devices import no_collection
from qbe.kernels.tuning.tunable import Choice, Config, recording


class Kind(NamedTuple):
    """Of a step: its size, and whether any of its sequences is bounded, has several rows, or has its bits moved by the
    cascade."""

    size: int
    bounded: bool = False
    several: bool = False
    cascaded: bool = False


Forward = Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # size of a step -> logits and likeliest tokens


@dataclass
class Captured:
    """A graph and what it writes: logits float32 [B, V], tokens int64 [B], -1 where the logits are not numbers, and
    their `difficulty` float64 [3, B].

    Of every step: who asks for it changes from step to step, and launches beside a graph cost the host ten times what
    the device does for it. `forward` is what was captured; `launches` are its nested linear kernels, with the
    configuration of each, counted.
    """

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor
    measured: torch.Tensor
    forward: Forward
    launches: list[tuple[Choice, Config, int]]
    final: bool = False  # it could not be captured again

    def outdated(self) -> bool:
        """Whether a kernel in it has another configuration by now."""
        return not self.final and any(choice.config is not config for choice, config, _ in self.launches)

    def replay(self) -> None:
        self.graph.replay()
        for choice, config, times in self.launches:
            choice.count(config, times)


def capture(forward: Forward, size: int, device: torch.device, memory: Any) -> Captured:
    """Capture a step on its inputs as they are, in the graphs' `memory` (`torch.cuda.graph_pool_handle`).

    Raises:
        RuntimeError: something in the step cannot be captured.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), recording() as launches:
        for _ in range(2):  # kernels compile and libraries make their workspaces outside of the capture
            difficulty(*forward(size))
        stream.synchronize()
        launches.clear()
        graph = torch.cuda.CUDAGraph()
        modes = {"pool": memory, "stream": stream, "capture_error_mode": "thread_local"}
        with no_collection(), torch.cuda.graph(graph, **modes):
            logits, tokens = forward(size)
            measured = difficulty(logits, tokens)
    torch.cuda.current_stream(device).wait_stream(stream)
    return Captured(graph, logits, tokens, measured, forward, counted(launches))


def counted(launches: collections.abc.Sequence[tuple[Choice, Config]]) -> list[tuple[Choice, Config, int]]:
    """Each choice once, and how many launches it has. Nothing is tuned while a graph is captured."""
    times = Counter(choice for choice, _ in launches)
    return [(choice, config, times[choice]) for choice, config in dict(launches).items()]
