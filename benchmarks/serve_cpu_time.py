"""`qbe bench serve` where others use the machine: the clock is the CPU time of this process, with one thread.

    OMP_NUM_THREADS=1 python benchmarks/serve_cpu_time.py bound [--requests N] [--rounds N] [--slack TIMES]
                                                                [--config FILE] [--compile] [--rows shared|exact]
    OMP_NUM_THREADS=1 python benchmarks/serve_cpu_time.py priority [--probes N] [--flood N]

Without HTTP: the engine, the server's tiers and queues, Azure's trace. Requests come when the process has used so much
CPU time, and what they wait is counted in it; while nothing is to be done the clock jumps to the next arrival. Memory
that others use still costs time. Both ways of a comparison take turns in the same process.

    bound     requests a second within the bound of `qbe bench serve`: tiers as the settings have them, all at 16 bits
    priority  time to first token of priority requests: alone, beside a flood of flex, and beside one whose prompts may
              fill a step (`prompts = 1`)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qbe.bench.client import Answered
from qbe.bench.goodput import Bound, Search, TraceReplay, in_turns, quantile
from qbe.bench.serve import FULL_SETTINGS
from qbe.bench.serve_sizes import ServeSizes
from qbe.bench.traffic import Arrival, Traffic
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.server import contract
from qbe.server.queues import TierQueues
from qbe.server.settings import Settings
from qbe.server.speed import Speed
from qbe.store.shared_rows import ROWS

FILLED = "[tiers.flex]\nprompts = 1.0\n[tiers.default]\nprompts = 1.0\n"


@dataclass
class Clock:
    """CPU time of the process, and what was skipped while there was nothing to do."""

    skipped: float = 0.0
    began: float = field(default_factory=time.process_time)

    def __call__(self) -> float:
        return time.process_time() - self.began + self.skipped


class Replay:
    """The engine as a server with these settings drives it."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings, self.clock = engine, settings, Clock()
        scheduler = engine.core.scheduler
        self._queues = TierQueues(lambda: settings, scheduler.max_sequences, scheduler.max_batch_tokens, self.clock)
        self._queues.guide(scheduler)
        self._began: dict[str, float] = {}
        self._first: dict[str, float] = {}

    def ask(self, arrival: Arrival) -> str:
        """One request, now."""
        params = SamplingParams(max_tokens=arrival.tokens, ignore_eos=True, temperature=0.0)
        terms = contract.terms(arrival.tier, None, self._settings, 0.0)  # type: ignore[arg-type]
        limits = contract.budget(terms, 0, arrival.tokens, 1, 4.0, Speed())
        asked = self.clock()
        key = self._engine.submit(Request(arrival.prompt, params, limits, priority=self._queues.priority(arrival.tier)))  # type: ignore[arg-type]
        self._began[key] = asked
        return key

    def step(self) -> list[tuple[str, Answered]]:
        """One step; the answers that it ended."""
        self._engine.step()
        now, ended = self.clock(), []
        for key in list(self._began):
            if key not in self._first and self._engine.started(key):
                self._first[key] = now
            if self._engine.finished(key):
                began, first = self._began.pop(key), self._first.pop(key)
                result = self._engine.take_result(key)
                tokens = len(result.token_ids)
                each = (now - first) / (tokens - 1) if tokens > 1 else 0.0
                ended.append((key, Answered(200, first - began, each, now - began, tokens, result.average_weight_bits)))
        return ended

    def first_s(self, key: str) -> float | None:
        """Seconds to its first token, once it is there and while the answer goes on."""
        return self._first[key] - self._began[key] if key in self._first else None

    def run(self, arrivals: Sequence[Arrival]) -> list[Answered]:
        """Every request at its time."""
        left, found, start = list(arrivals), [], self.clock()
        while left or self._began:
            now = self.clock() - start
            if not self._began and left[0].at > now:
                self.clock.skipped += left[0].at - now
            while left and left[0].at <= self.clock() - start:
                self.ask(left.pop(0))
            found += [answer for _, answer in self.step()]
        return found


def bound(engine: Engine, sizes: ServeSizes, settings: Settings) -> dict[str, object]:
    """The highest rates."""
    full = Settings.model_validate(tomllib.loads(FULL_SETTINGS))
    ways = [settings, full]
    traffic = Traffic(sizes.data, sizes.trace, sizes.shrink, sizes.shares)
    for way in ways:
        Replay(engine, way).run(traffic.take(8, 4.0, 0))
    alone = []
    for arrival in traffic.take(max(6, sizes.requests // 4), 1.0, 1):
        alone += Replay(engine, full).run([arrival])
    first, each = (quantile([getattr(a, f) for a in alone], 0.5) for f in ("first_s", "per_token_s"))
    limit = Bound(sizes.slack * first, sizes.slack * each)
    print(f"bound: first {limit.first_s * 1e3:.0f} ms, later ones {limit.per_token_s * 1e3:.0f} ms each", flush=True)
    best: list[list[float]] = [[], []]
    bits: list[list[float]] = [[], []]
    for turn in range(sizes.rounds):
        searches = [Search(limit, len(alone) / sum(a.seconds for a in alone), sizes.halvings) for _ in ways]

        def trial(number: int, rate: float, turn: int = turn) -> TraceReplay:
            found = TraceReplay.of(rate, Replay(engine, ways[number]).run(traffic.take(sizes.requests, rate, turn)))
            print(f"  {('tiers', '16 bits')[number]:8} {rate:5.2f}/s: first {found.first_s:.2f} s, each "
                  f"{found.per_token_s * 1e3:.0f} ms, {found.bits:.2f} bits", flush=True)  # fmt: skip
            bits[number].append(found.bits)
            return found

        in_turns(searches, trial)
        for number, search in enumerate(searches):
            best[number].append(search.best)
    ratios = [a / b if b else float("inf") for a, b in zip(*best, strict=True)]
    print(f"tiers {best[0]}, 16 bits {best[1]}: {statistics.median(ratios):.2f}x, bits {np.mean(bits[0]):.2f}")
    return {"bound": vars(limit), "tiers": best[0], "16 bits": best[1], "bits": float(np.mean(bits[0]))}


def priority(engine: Engine, sizes: ServeSizes, settings: Settings) -> dict[str, object]:
    """First tokens of priority requests, milliseconds."""
    traffic = Traffic(sizes.data, sizes.trace, sizes.shrink, sizes.shares)
    filled = Settings.model_validate(tomllib.loads(FILLED))
    found: dict[str, list[float]] = {"alone": [], "flood": [], "flood, prompts = 1": []}
    blocks = 4
    for block in range(-1, blocks):  # the first one does not count
        for name, way in (("alone", settings), ("flood", settings), ("flood, prompts = 1", filled)):
            probes = traffic.take(-(-sizes.probes // blocks) if block >= 0 else 2, 1.0, block, "priority")
            flood = sizes.flood if name != "alone" else 0
            first = _probed(Replay(engine, way), probes, traffic.endless(block, "flex"), flood)
            found[name] += first if block >= 0 else []
    for name, values in found.items():
        parts = [quantile(values, p) for p in (0.5, 0.95, 0.99)]
        over = [p / quantile(found["alone"], q) for p, q in zip(parts, (0.5, 0.95, 0.99), strict=True)]
        shown = zip(("p50", "p95", "p99"), parts, over, strict=True)
        print(f"{name:20} " + ", ".join(f"{p} {v * 1e3:5.0f} ms ({times:.2f}x)" for p, v, times in shown))
    return dict(found)


def _probed(replay: Replay, probes: Sequence[Arrival], flex: Iterator[Arrival], flood: int) -> list[float]:
    """Each probe comes at a random moment within a step, which it waits for; so many flex requests are always there."""
    draw, found = np.random.default_rng(len(probes)), []
    inside = {replay.ask(next(flex)) for _ in range(flood)}

    def step() -> float:
        before = replay.clock()
        for key, _ in replay.step():
            if key in inside:
                inside.discard(key)
                inside.add(replay.ask(next(flex)))
        return replay.clock() - before

    for _ in range(20 if flood else 0):
        step()
    for probe in probes:
        waits = 0.0
        for _ in range(int(draw.integers(1, 8)) if flood else 0):
            waits = step() * draw.random()
        key = replay.ask(Arrival(0.0, probe.prompt, 4, "priority"))
        while (first := replay.first_s(key)) is None:
            step()
        found.append(first + waits)
        while replay.first_s(key) is not None:
            step()
    replay_left = inside
    while replay_left:  # the flood runs dry
        replay_left -= {key for key, _ in replay.step()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bound", "priority"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--json", type=Path)
    for name, value in (("requests", 32), ("rounds", 2), ("probes", 60), ("flood", 24)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--slack", type=float, default=ServeSizes.slack, help="the bound, in times of an answer alone")
    parser.add_argument("--compile", action="store_true", help="decode steps as those of `qbe serve --compile`")
    parser.add_argument("--rows", choices=ROWS, default="shared", help="as `qbe serve --rows`")
    args = parser.parse_args()
    sizes = ServeSizes(data=args.data, requests=args.requests, rounds=args.rounds, slack=args.slack, probes=args.probes,
                  flood=args.flood)  # fmt: skip
    text = args.config.read_text() if args.config else ""
    settings = Settings.model_validate(tomllib.loads(text))
    with Engine(sizes.model, records=False, compile=args.compile, rows=args.rows) as engine:
        found = {"bound": bound, "priority": priority}[args.what](engine, sizes, settings)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
