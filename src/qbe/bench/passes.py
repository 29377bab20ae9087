"""Passes through a token's linear layers, and how they are timed.

GPU: one CUDA graph for each part and one for the whole token, so that launches cost what they cost in a captured
decode step; a replay streams more weights than the L2 cache holds. CPU: one pass in the model's order, which streams
all weights from memory as a model does, with a clock around each call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qbe.bench.machine import Roofline, seconds
from qbe.bench.measure import Outcome, Sample, Timing
from qbe.bench.report import Row, rows_beside
from qbe.bench.weights import LinearGroup, Token, Weights

WHOLE = "all linears"

Call = Callable[[LinearGroup, int], object]
"""Runs one linear layer: copy number i of a part."""


def one_pass(token: Token, call: Call, device: torch.device) -> Sample:
    """A sample of one pass: part name -> microseconds of one linear layer, and `WHOLE` -> of all of them."""
    return _replays(token, call) if device.type == "cuda" else _walk(token, call)


def _walk(token: Token, call: Call) -> Sample:
    order = token.order()

    def sample() -> dict[str, float]:
        spent = dict.fromkeys((p.name for p in token.all_parts), 0.0)
        with torch.inference_mode():
            begin = last = time.perf_counter()
            for part, i in order:
                call(part, i)
                now = time.perf_counter()
                spent[part.name] += now - last
                last = now
        each = {p.name: spent[p.name] * 1e6 / token.copies(p) for p in token.all_parts}
        return each | {WHOLE: (last - begin) * 1e6}

    return sample


def _replays(token: Token, call: Call) -> Sample:
    replays = {p.name: _captured([(p, i) for i in range(token.copies(p))], call) for p in token.all_parts}
    launches = {p.name: token.copies(p) for p in token.all_parts} | {WHOLE: 1}
    replays[WHOLE] = _captured(token.order(), call)

    def sample() -> dict[str, float]:
        times = {}
        for name, replay in replays.items():
            replay()  # clocks and caches as in a running model
            times[name] = seconds(replay, torch.device("cuda")) * 1e6 / launches[name]
        return times

    return sample


def _captured(launches: list[tuple[LinearGroup, int]], call: Call) -> Replay:
    def run() -> None:
        for part, i in launches:
            call(part, i)

    return captured(run)


@dataclass(frozen=True)
class Replay:
    """A graph, and `run`, whose tensors it reads and writes: it has their addresses, and would not keep them alive."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


@torch.inference_mode()
def captured(run: Callable[[], object]) -> Replay:
    """What it launches as a CUDA graph, after a first run that compiles what must be compiled."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of this thread only: elsewhere kernels may be compiling, which must not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return Replay(graph, run)


def whole(run: Callable[[], object], device: torch.device) -> Sample:
    """A sample of `run` as one piece: `WHOLE` -> seconds, on a GPU of a replay of its graph."""
    if device.type == "cuda":
        replay = captured(run)

        def replayed() -> dict[str, float]:
            replay()  # clocks and caches as in a running model
            return {WHOLE: seconds(replay, device)}

        return replayed

    def once() -> dict[str, float]:
        with torch.inference_mode():
            return {WHOLE: seconds(run, device)}

    return once


def pass_rows(
    weights: Weights,
    limits: Roofline,
    ours: Mapping[str, Timing],
    peers: Mapping[str, Outcome],
    *,
    rows: int,
    group: int,
    widths: tuple[int, ...],
    bits: float | str,
    notes: Mapping[str, str],
    case: str = "",
    eight: bool = False,
) -> list[Row]:
    """One row per peer for the whole token (milliseconds) and for each part (microseconds of one linear layer).

    Args:
        ours, peers: what passes gave.
        rows: M.
        widths: the precisions that occur in the batch; `bits` is how the rows show them.
        notes: peer -> note.
        case: what else is said of the rows.
        eight: their activations have 8 bits, whose products have twice the rate of 16.
    """
    token, case = weights.token, f"M {rows}, group {group}{case}"
    flops = 1.0 if eight else 2.0
    least = {
        p.name: limits.seconds(weights.bytes_read(p, widths, group, rows), flops * rows * p.n * p.k)
        for p in token.all_parts
    }
    total = sum(least[p.name] * token.copies(p) for p in token.all_parts)
    beside = rows_beside(
        peers, WHOLE, 1e-3, what=WHOLE, size=f"{len(token.order())} layers", case=case, bits=bits,
        ours=ours[WHOLE], unit="ms", limit=total * 1e3, notes=notes,
    )  # fmt: skip
    for p in token.all_parts:
        beside += rows_beside(
            peers, p.name, 1.0, what=p.name, size=f"{p.n}x{p.k}", case=case, bits=bits, ours=ours[p.name],
            unit="us", limit=least[p.name] * 1e6, notes=notes,
        )  # fmt: skip
    return beside


def check(ours: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.25) -> None:
    """A system that computes something else is no peer.

    Raises:
        RuntimeError: relative error (Frobenius) above the tolerance, which 4-bit rounding of random weights stays
            below by far, or numbers that are none.
    """
    error = ((ours.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= tolerance:
        raise RuntimeError(f"its result differs from the 16-bit one by {error:.0%}: it is not the same work")
