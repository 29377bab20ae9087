"""A real `qbe serve` under real traffic: requests within a latency bound, what HTTP costs, who waits for whom, schemas.

The server is a process of its own, its clients are in this one. On a small machine they take turns with the server for
the same cores, which counts against the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import numpy as np
import torch

from qbe.bench import schemas, soak
from qbe.bench.client import LIMIT_S, Answered, Clients, all_good
from qbe.bench.goodput import PART, Bound, Search, TraceReplay, in_turns, quantile
from qbe.bench.machine import Roofline
from qbe.bench.measure import Timing
from qbe.bench.report import Row
from qbe.bench.serve_sizes import ServeSizes
from qbe.bench.serving import RunningServer, serving
from qbe.bench.traffic import Arrival, Traffic
from qbe.budget import Budget
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.progress import bar

Found = TypeVar("Found")

FULL = "[tiers.{0}]\nbits = [16.0, 16.0]\n"
FULL_SETTINGS = "".join(FULL.format(tier) for tier in ("flex", "default", "priority"))
ALL_FULL = "all at 16 bits"
SOAK_PARTS = 4


def sizes_for(device: torch.device) -> ServeSizes:
    """A GPU takes the trace as it is."""
    return ServeSizes() if device.type != "cuda" else ServeSizes(shrink=1.0, threads=0, requests=400, flood=64)


def run(device: torch.device, limits: Roofline, sizes: ServeSizes, progress: bool = False) -> list[Row]:
    """Rows of each part.

    Raises:
        QBEError: data are missing, a server does not start or answers with an error.
    """
    parts: dict[str, Callable[[torch.device, ServeSizes, bool], list[Row]]] = {
        "bound": within_bound, "overhead": overhead, "priority": priority, "schemas": structured,
        "soak": soaked,
    }  # fmt: skip
    return [row for name in sizes.parts for row in parts[name](device, sizes, progress)]


def _serving(
    sizes: ServeSizes, device: torch.device, settings: str, *options: str, **environment: str
) -> AbstractContextManager[RunningServer]:
    return serving(sizes.model, device.type, settings, "--policy", sizes.policy, *options, environment=environment)


def _traffic(sizes: ServeSizes) -> Traffic:
    return Traffic(sizes.data, sizes.trace, sizes.shrink, sizes.shares)


def _asking(served: RunningServer, ask: Callable[[Clients], Awaitable[Found]]) -> Found:
    """What comes of asking this server, in an event loop of its own."""

    async def whole() -> Found:
        clients = Clients(served.url)
        try:
            return await ask(clients)
        finally:
            await clients.close()

    return asyncio.run(whole())


def within_bound(device: torch.device, sizes: ServeSizes, progress: bool) -> list[Row]:
    """Requests a second of the trace that meet the same bound: tiers as the settings have them, and all at 16 bits.

    On a CPU with compiled steps, as a server under such traffic would run there; on a GPU only those of one answer are.
    """
    traffic, best, bits = _traffic(sizes), ([], []), ([], [])  # type: ignore[var-annotated]
    compiled = ["--compile"] if device.type == "cpu" else []
    with ExitStack() as stack, bar("bound", sizes.rounds, progress) as tick:
        settings = sizes.settings, FULL_SETTINGS
        servers = [stack.enter_context(_serving(sizes, device, s, *compiled)) for s in settings]
        for server in servers:  # kernels and caches as in a running server
            all_good(_asking(server, lambda c: c.replay(traffic.take(8, 4.0, 0))))
        bound, start = _bound(servers[1], traffic, sizes)
        for turn in range(sizes.rounds):
            searches = [Search(bound, start, sizes.halvings) for _ in servers]

            def trial(number: int, rate: float, turn: int = turn) -> TraceReplay:
                arrivals = traffic.take(sizes.requests, rate, turn)
                return TraceReplay.of(rate, _asking(servers[number], lambda c: c.replay(arrivals)))

            in_turns(searches, trial)
            for number, search in enumerate(searches):
                best[number].append(search.best)
                bits[number].append(np.mean([t.bits for t in search.trials]))
            tick()
    ours, theirs = (Timing.of(rates) for rates in best)
    size = f"{sizes.model}, {sizes.trace} / {sizes.shrink:g}"
    case = (
        f"{PART:.0%} of answers: first token within {bound.first_s * 1e3:,.0f} ms, later ones within "
        f"{bound.per_token_s * 1e3:,.0f} ms each"
    )
    note = (
        f"the bound is {sizes.slack:g} times the median of answers of the same trace that are alone, at 16 bits; "
        f"{sizes.requests} requests a trial, arrivals as in the trace at another pace, tiers "
        + ", ".join(f"{name} {part:.0%}" for name, part in sizes.shares.items())
    )
    return [Row("requests", size, case, f"{np.mean(bits[0]):.2f}", ours, ALL_FULL, theirs, "requests/s", None, note)]


def _bound(server: RunningServer, traffic: Traffic, sizes: ServeSizes) -> tuple[Bound, float]:
    """The bound, and a rate to begin with: that of answers one after the other."""
    alone = all_good(_asking(server, lambda c: _one_by_one(c, traffic.take(max(6, sizes.requests // 4), 1.0, 1))))
    first, each = (quantile([getattr(a, f) for a in alone], 0.5) for f in ("first_s", "per_token_s"))
    return Bound(sizes.slack * first, sizes.slack * each), len(alone) / sum(a.seconds for a in alone)


async def _one_by_one(clients: Clients, arrivals: Sequence[Arrival]) -> list[Answered]:
    return [await clients.ask(a.body()) for a in arrivals]


def overhead(device: torch.device, sizes: ServeSizes, progress: bool) -> list[Row]:
    """A batch of streams over HTTP beside the same batch in the engine, in turns."""
    wall: tuple[list[float], list[float]] = [], []
    cpu: tuple[list[float], list[float]] = [], []
    environment = {"OMP_NUM_THREADS": str(sizes.threads)} if sizes.threads else {}
    before, rounds = torch.get_num_threads(), 2 * sizes.rounds + 1
    try:
        if sizes.threads:
            torch.set_num_threads(sizes.threads)
        with (
            Engine(sizes.model, policy=sizes.policy, device=device.type, records=False) as engine,
            _serving(sizes, device, "", **environment) as server,
            bar("overhead", rounds, progress) as tick,
        ):
            for turn in range(rounds):
                prompts = [f"{turn}, {i}: what is this number good for?" for i in range(sizes.batch)]
                over_http = _asking(server, lambda c, p=prompts: _streamed(c, p, sizes.tokens))  # type: ignore[misc]
                bare = _bare(engine, prompts, sizes.tokens)
                for kept, values in ((wall, (over_http[0], bare[0])), (cpu, (over_http[1], bare[1]))):
                    for side, value in zip(kept, values, strict=True):
                        side.extend([value] if turn else [])
                tick()
    finally:
        torch.set_num_threads(before)
    steps = sizes.tokens
    note = f"{sizes.tokens} tokens an answer at 6 bits, streamed; threads: {sizes.threads or before}"
    return [
        Row("a step over HTTP", f"{sizes.model}, batch {sizes.batch}", clock, 6,
            Timing.of(values[0]).times(1e3 / steps), "the engine alone", Timing.of(values[1]).times(1e3 / steps),
            "ms", None, note)
        for clock, values in (("wall clock", wall), ("CPU time of the process", cpu))
    ]  # fmt: skip


async def _streamed(clients: Clients, prompts: Sequence[str], tokens: int) -> tuple[float, float]:
    """Seconds of the wall clock and of the server's CPU time for a batch of streams."""
    body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, "qbe": {"bits": 6}}
    used = (await clients.metrics()).get("process_cpu_seconds_total", float("nan"))
    begun = time.perf_counter()
    all_good(await asyncio.gather(*(clients.ask({**body, "prompt": prompt}) for prompt in prompts)))
    seconds = time.perf_counter() - begun
    return seconds, (await clients.metrics()).get("process_cpu_seconds_total", float("nan")) - used


def _bare(engine: Engine, prompts: Sequence[str], tokens: int) -> tuple[float, float]:
    """The same without a server; choosing the blueprints included."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    begun, used = time.perf_counter(), time.process_time()
    ids = [engine.submit(Request(prompt, params, Budget(bits=6.0))) for prompt in prompts]
    while not all(map(engine.finished, ids)):
        engine.step()
        for key in ids:
            engine.take_pieces(key)
    seconds = time.perf_counter() - begun, time.process_time() - used
    for key in ids:
        engine.take_result(key)
    return seconds


def priority(device: torch.device, sizes: ServeSizes, progress: bool) -> list[Row]:
    """Time to first token of priority requests, one at a time, while nobody and while a flood of flex is there."""
    traffic, blocks = _traffic(sizes), 5
    each = -(-sizes.probes // blocks)
    first: dict[bool, list[float]] = {False: [], True: []}
    with _serving(sizes, device, sizes.settings) as server, bar("priority", 2 * blocks, progress) as tick:
        all_good(_asking(server, lambda c: c.replay(traffic.take(8, 4.0, 0))))
        for block in range(blocks):
            for flooded in (False, True):
                probes = traffic.take(each, 1.0, block, "priority")
                flood = sizes.flood if flooded else 0
                first[flooded] += _asking(server, lambda c, f=flood, p=probes: _probe(c, p, f, traffic))  # type: ignore[misc]
                tick()
    case = f"beside {sizes.flood} flex requests that are always there"
    note = f"{each * blocks} requests each way in {blocks} turns; spread: quartiles of 200 resamples"
    return [
        Row(f"first token, {name}", f"{sizes.model}, {sizes.trace} / {sizes.shrink:g}", case, "any",
            _resampled(first[True], part), "unloaded", _resampled(first[False], part), "ms", None, note)
        for name, part in (("p50", 0.5), ("p99", 0.99))
    ]  # fmt: skip


async def _probe(clients: Clients, probes: Sequence[Arrival], flood: int, traffic: Traffic) -> list[float]:
    """Seconds to the first token of each, while so many flex requests are kept going."""
    flex = traffic.endless(len(probes), "flex")

    async def keep_going() -> None:
        while True:
            all_good([await clients.ask(next(flex).body())])

    tasks = [asyncio.create_task(keep_going()) for _ in range(flood)]
    try:
        if flood:
            await asyncio.wait_for(_flooded(clients, tasks), LIMIT_S)
        answers = all_good([await clients.ask({**probe.body(), "max_tokens": 4}) for probe in probes])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [a.first_s for a in answers]


async def _flooded(clients: Clients, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until all of them are in the server."""
    inside = 0.0
    while inside < len(tasks):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.1)
        known = await clients.metrics()
        inside = known["vllm:num_requests_running"] + known["vllm:num_requests_waiting"]


def _resampled(values: Sequence[float], part: float) -> Timing:
    """Milliseconds: a quantile, with the quartiles that drawing the values anew gives."""
    draws = np.random.default_rng(0).choice(values, (200, len(values)))
    low, high = np.quantile([quantile(d, part) for d in draws.tolist()], (0.25, 0.75)) * 1e3
    return Timing(quantile(values, part) * 1e3, float(low), float(high), len(values))


def structured(device: torch.device, sizes: ServeSizes, progress: bool) -> list[Row]:
    """Real JSON schemas through the engine: do finished answers match, and what does a constrained token cost?"""
    chosen = schemas.read(sizes.data, sizes.schemas)
    with (
        Engine(sizes.model, policy=sizes.policy, device=device.type, records=False) as engine,
        bar("schemas", len(chosen), progress) as tick,
    ):
        result = schemas.measure(engine, chosen, sizes.schema_tokens, sizes.batch, tick)
    size, ended = f"{sizes.model}, batch {sizes.batch}", len(result.ended)
    with_it, without = result.each
    said = "; ".join(f"{name}: {why}" for name, why in (result.refused | result.invalid).items())
    note = (
        f"of {len(chosen)} schemas {len(result.refused)} are refused, {ended} answers ended, {len(result.cut)} reached "
        f"{sizes.schema_tokens} tokens; a schema is compiled in {np.median(result.compile_ms):.0f} ms (median), "
        f"{max(result.compile_ms):.0f} ms (most){'; ' if said else ''}{said}"
    )
    valid = float(ended - len(result.invalid))
    count = Timing(valid, valid, valid, 1)
    return [
        Row("valid answers", size, "JSON schemas", 6, count, "finished ones", Timing(ended, ended, ended, 1),
            "answers", None, note),
        Row("a token", size, "JSON schemas, CPU time", 6, with_it, "without a schema", without, "ms", None,
            "the same batch twice, answers of the same lengths"),
    ]  # fmt: skip


def soaked(device: torch.device, sizes: ServeSizes, progress: bool) -> list[Row]:
    """Connections of which a part hang up: who was answered, and what the server has more of than before."""
    traffic = Traffic(sizes.data, sizes.trace, sizes.soak_shrink, sizes.shares)
    count = -(-sizes.connections // SOAK_PARTS)
    settings = f"[limits]\nqueue = {4 * sizes.connections}\nconnections = {4 * sizes.connections}\n"
    with _serving(sizes, device, settings) as server, bar("soak", SOAK_PARTS, progress) as tick:
        rate = sizes.connections / sizes.soak_s
        _asking(server, lambda c: c.replay(traffic.take(min(64, count), rate, 0)))
        parts = [traffic.take(count, rate, turn) for turn in range(SOAK_PARTS)]
        soaking = _asking(server, lambda c: soak.soak(c, parts, sizes.hang_up, server.ledger, tick))
    stayed, answered = soaking.stayed
    memory = " ".join(f"{s.memory / 1e6:.0f}" for s in soaking.states)
    note = (
        f"{soaking.hung_up} hung up; an hour of the trace in {soaking.seconds:.0f} s, at most {soaking.most} "
        f"connections at once; resident MB before and after each part: {memory}; KV pages in use at the end: "
        f"{soaking.states[-1].pages:.0%}; ledger rows left open: {soaking.open_rows}"
    ) + "".join(f"; {e}" for e in soaking.errors)
    size, case = f"{sizes.model}, {sizes.trace} / {sizes.soak_shrink:g}", f"{count * SOAK_PARTS} connections"

    def once(value: float) -> Timing:
        return Timing(value, value, value, 1)

    first, half, last = soaking.states[0], soaking.states[SOAK_PARTS // 2], soaking.states[-1]
    return [
        Row("answered", size, case, "any", once(answered), "of those that stayed", once(stayed), "answers", None, note),
        Row("open files", size, case, "any", once(last.files), "before", once(first.files), "files"),
        Row("memory", size, case, "any", once(last.memory / 1e6), "halfway", once(half.memory / 1e6), "MB"),
    ]
