"""A Qwen3-30B-A3B-shaped model of mixed experts through the engine's core: memory, decode by precision, residency.

    python benchmarks/expert_serving.py [--device cuda] [--only memory,decode,residency] [--rounds 5] [--steps 32]
                                        [--layers 48] [--resident-layers 12] [--resident-steps 100] [--folder DIR]

Random weights, made nested on the device. A JSON line is printed for each number as soon as it is known; `must` is what
it should reach. Rates are tokens a second of all sequences, medians of interleaved rounds; every sequence has a prompt
of its own and every step waits for its tokens.

    memory     bytes of a model that keeps 4 bits, and of its 16-bit form
    decode     batches of 1, 8 and 32 at 4, 6, 8 and 16 bits, and rows of 4, 6 and 8 bits in turn, each its own
    residency  a model of fewer layers whose store is written to --folder: rows of 8 bits with a part of the bytes of
               experts' codes on the device, over all of them there. A tenth of each layer's experts gets 80 % of the
               choices. Slices are (4, 2, 2): half of the bytes are all lowest slices. With a quarter some of these are
               read from host memory, or slices are (2, 2, 2, 2) and a quarter is all of the lowest. Beside rates: how
               long the slowest of the steps takes, what share of the wanted bits was read, and gigabytes fetched
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qbe.bench.engine import EngineSizes, MixedSteps
from qbe.bench.engines import STEP, random_prompt
from qbe.bench.expert_layers import ExpertShape
from qbe.bench.measure import take_turns
from qbe.bench.mixtures import HOT_EXPERTS, QWEN3_30B_A3B, MixtureShape, random_mixture, skew
from qbe.blueprint import Blueprint
from qbe.engine.bounded_memory import hold
from qbe.engine.core import Core
from qbe.engine.devices import pick_device
from qbe.engine.memory import of_engine
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.engine.scheduling.sequence import Sequence
from qbe.residency.residency import Residency
from qbe.sites import FULL_BITS
from qbe.store.checkpoint import write_nested
from qbe.store.nested_linears import NestedWeightConfig

WHAT = ("memory", "decode", "residency")
BATCHES = (1, 8, 32)
MUST = {1: 1.8, 8: 1.5, 32: 1.3}  # 4 bits over 16
MUST_MEMORY, MUST_MIXED = 0.31, 1.1
PARTS = (  # slices of the store; of its experts' codes so much on the device; over all of them there
    ((4, 2, 2), 0.5, 0.85), ((4, 2, 2), 0.25, 0.7), ((2, 2, 2, 2), 0.25, 0.7),
)  # fmt: skip
RESIDENT_BATCHES = (1, 8)
SETTLING_S = 15.0  # in which use may move slices before anything is measured
MIX = (4, 6, 8)
TINY = MixtureShape(ExpertShape("tiny", 8, 2, 64, 64), 2, 4, 2, 16, 320)  # to try the script on a CPU
_BEGAN = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=QWEN3_30B_A3B.layers)
    parser.add_argument("--resident-layers", type=int, default=12)
    parser.add_argument("--resident-steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="for the store; a temporary one in memory if left out")
    parser.add_argument("--only", default=",".join(WHAT))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes")
    args = parser.parse_args()
    device = pick_device(args.device)
    shape = TINY if args.tiny else replace(QWEN3_30B_A3B, layers=args.layers)
    say(device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", layers=shape.layers)
    sizes = EngineSizes(batches=BATCHES, rounds=args.rounds, steps=args.steps)
    fewer = replace(shape, layers=min(shape.layers, args.resident_layers))
    beside = Path("/dev/shm") if args.folder is None and Path("/dev/shm").is_dir() else args.folder
    parts: dict[str, list[Callable[[], None]]] = {
        "memory": [partial(memory, shape, device)],
        "decode": [partial(decode, shape, device, sizes)],
        "residency": [
            partial(
                residency,
                fewer,
                device,
                replace(sizes, batches=RESIDENT_BATCHES, steps=args.resident_steps),
                slices,
                beside,
            )
            for slices in dict.fromkeys(slices for slices, _, _ in PARTS)
        ],
    }
    failed = False
    for name in args.only.split(","):
        for part in parts[name]:
            try:
                part()
            except Exception as error:  # the other parts are worth their time
                failed = True
                say(what=name, error=f"{type(error).__name__}: {error}".splitlines()[0])
                traceback.print_exc()
                gc.collect()
    sys.exit(failed)


def say(**line: Any) -> None:
    """Prints one line of JSON, and how long the program has been running."""
    rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items()}
    print(json.dumps({**rounded, "at_s": round(time.perf_counter() - _BEGAN, 1)}), flush=True)


def core_of(shape: MixtureShape, device: torch.device, config: NestedWeightConfig, sizes: EngineSizes) -> Core:
    """A core of a random model with room for the largest batch."""
    began, most = time.perf_counter(), max(sizes.batches)
    model, table = random_mixture(shape, device, config)
    made = time.perf_counter()
    tokens = most * (sizes.prompt + sizes.steps + 64)
    core = Core(model, table, kv_tokens=tokens, max_sequences=most, device=device)
    say(what="ready", model_s=made - began, core_s=time.perf_counter() - made, memory=of_engine(core).describe())
    return core


def memory(shape: MixtureShape, device: torch.device) -> None:
    """What a model that keeps 4 bits takes of what it would take at 16."""
    core = core_of(shape, device, NestedWeightConfig(slices=(4,), keep_original=False), EngineSizes(batches=(8,)))
    found, full = of_engine(core), 2 * sum(site.parameters for site in core.table)
    beside = found.kv + found.graphs + found.workspace
    say(
        what="memory", bits=4, weights_mb=found.weights / 1e6, bf16_mb=full / 1e6, ratio=found.weights / full,
        with_kv_graphs_workspace=(found.weights + beside) / (full + beside), must=MUST_MEMORY,
    )  # fmt: skip
    release(core)


def decode(shape: MixtureShape, device: torch.device, sizes: EngineSizes) -> None:
    """Rates of whole decode steps at each precision."""
    core = core_of(shape, device, NestedWeightConfig(), sizes)
    for batch in sizes.batches:
        ways: dict[int | str, tuple[int, ...]] = {b: (b,) * batch for b in (4, 6, 8, FULL_BITS)}
        if batch >= len(MIX):
            ways["4+6+8"] = tuple(MIX[i % len(MIX)] for i in range(batch))
        found, _ = take_turns({w: MixedSteps(core, b, sizes).sample for w, b in ways.items()}, {}, sizes.rounds)
        rates = {way: parts[STEP].rate(batch) for way, parts in found.items()}
        for way, rate in rates.items():
            say(what="decode", batch=batch, bits=way, tokens_per_s=rate.median, low=rate.low, high=rate.high)
        say(what="4 bits over own 16", batch=batch, ratio=rates[4].median / rates[FULL_BITS].median, must=MUST[batch])
        if "4+6+8" in rates:
            must = {"must": MUST_MIXED} if batch == 8 else {}
            say(what="4+6+8 over all at 8", batch=batch, ratio=rates["4+6+8"].median / rates[8].median, **must)
    release(core)


def residency(
    shape: MixtureShape, device: torch.device, sizes: EngineSizes, slices: tuple[int, ...], beside: Path | None
) -> None:
    """Rates with a part of the store on the device over those with all of it."""
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        _residency(shape, device, sizes, slices, Path(folder))


def _residency(
    shape: MixtureShape, device: torch.device, sizes: EngineSizes, slices: tuple[int, ...], folder: Path
) -> None:
    config = NestedWeightConfig(slices=slices, keep_original=False)
    model, table = random_mixture(shape, device, config)
    skew(model, shape)
    write_nested(folder, model, "random")
    core = Core(model, table, kv_tokens=_tokens(sizes), max_sequences=max(sizes.batches), device=device)
    whole = {batch: steps_of(core, batch, sizes) for batch in sizes.batches}
    codes = sum(s.parameters for s in core.table.nested if s.expert is not None) * config_bits(config) // 8
    share = _hot_share(core, shape)
    say(what="all resident", slices=slices, layers=shape.layers, codes_gb=codes / 1e9, hot_choices=share)
    release(core)
    del model
    for part, must in [(part, must) for own, part, must in PARTS if own == slices]:
        core = bounded_core(shape, device, config, sizes, folder, round(part * codes))
        for batch in sizes.batches:
            settled_s = settle(core, batch, sizes)
            found, numbers = steps_of(core, batch, sizes), core.residency.numbers  # type: ignore[union-attr]
            say(
                what="residency", slices=slices, part=part, batch=batch, tokens_per_s=batch / found.median,
                ratio=whole[batch].median / found.median, must=must, slowest_ms=found.slowest * 1e3,
                slowest_all_resident_ms=whole[batch].slowest * 1e3, read_bits=found.read_bits, settled_s=settled_s,
                resident_gb=numbers.resident_bytes / 1e9, stored_gb=numbers.stored_bytes / 1e9,
                fetched_gb=numbers.fetched_bytes / 1e9, misses=numbers.misses, failure=numbers.failure,
            )  # fmt: skip
        core.residency.close()  # type: ignore[union-attr]
        release(core)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of decode steps: the median and the slowest; and average bits that their tokens read of experts."""

    median: float
    slowest: float
    read_bits: float


def steps_of(core: Core, batch: int, sizes: EngineSizes, times_as_many: int = 1) -> StepTimes:
    """Decodes with a batch at the widest gear of the store."""
    steps = sizes.steps * times_as_many
    gear = max(g for g in core.table.gears() if g < FULL_BITS)
    blueprint = Blueprint.of("bench", core.table, (gear,) * len(core.table.nested))
    params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
    prompts = [random_prompt(sizes.prompt, core.vocabulary, row) for row in range(batch)]
    running = [Sequence(f"bench {i}", prompt, params, blueprint) for i, prompt in enumerate(prompts)]
    for sequence in running:
        core.add(sequence)
    while not all(s.output_ids for s in running):
        core.step()
    core.step()
    before = [(s.missed_reads.tokens, s.missed_reads.bits) for s in running]
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
    tokens = sum(s.missed_reads.tokens - n for s, (n, _) in zip(running, before, strict=True))
    bits = sum(s.missed_reads.bits - n for s, (_, n) in zip(running, before, strict=True))
    for sequence in running:
        core.cancel(sequence.request_id)
    return StepTimes(statistics.median(times), max(times), gear - bits / max(1, tokens))


def bounded_core(
    shape: MixtureShape, device: torch.device, config: NestedWeightConfig, sizes: EngineSizes, folder: Path, codes: int
) -> Core:
    """A core with so many bytes of experts' codes on the device."""
    began = time.perf_counter()
    model, table = random_mixture(shape, device, config, paged=device.type == "cuda")
    skew(model, shape)
    held = Residency(model, table, folder, device, "lower", progress=False)
    core = Core(model, table, kv_tokens=_tokens(sizes), max_sequences=max(sizes.batches), device=device)
    core.residency = held
    floors = held.numbers.resident_bytes - sum(s.parameters for s in table.nested if s.expert is None)
    hold(core, held, of_engine(core).describe()["total"] + max(0, codes - max(0, floors)))
    say(what="bounded", ready_s=time.perf_counter() - began, memory=of_engine(core).describe())
    return core


def settle(core: Core, batch: int, sizes: EngineSizes) -> float:
    """Decodes until use moves nothing more; seconds."""
    began, moved = time.perf_counter(), -1
    while time.perf_counter() - began < SETTLING_S:
        steps_of(core, batch, sizes, 2)
        if (now := core.residency.numbers.fetched_bytes) == moved:  # type: ignore[union-attr]
            break
        moved = now
    return time.perf_counter() - began


def config_bits(config: NestedWeightConfig) -> int:
    return sum(config.slices)


def _tokens(sizes: EngineSizes) -> int:
    return max(sizes.batches) * 512


def _hot_share(core: Core, shape: MixtureShape) -> float:
    """The share of all choices that the most-chosen tenth of each layer's experts got."""
    assert core.plan.use is not None
    hot = max(1, round(HOT_EXPERTS * shape.experts.experts))
    chosen = list(core.plan.use.read().chosen.values())
    return float(sum(np.sort(c)[::-1][:hot].sum() for c in chosen) / sum(c.sum() for c in chosen))


def release(core: Core) -> None:
    """Gives the model's memory back before the next one is made."""
    vars(core).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
