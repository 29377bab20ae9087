"""A Qwen3-30B-A3B-shaped model of mixed experts through the engine's core: memory, decode by precision, residency.

    python benchmarks/expert_serving.py [--device cuda] [--layers 48] [--only memory,decode] [--rounds 5] [--steps 32]

Random weights, made nested on the device. A JSON line is printed for each number as soon as it is known; `must` is what
it should reach. Rates are tokens a second of all sequences, medians of interleaved rounds; every sequence has a prompt
of its own and every step waits for its tokens.

    memory     bytes of a model that keeps 4 bits, and of its 16-bit form
    decode     batches of 1, 8 and 32 at 4, 6, 8 and 16 bits, and rows of 4, 6 and 8 bits in turn, each its own
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from typing import Any

import torch

from qbe.bench.engine import EngineSizes, MixedSteps
from qbe.bench.engines import STEP
from qbe.bench.expert_layers import ExpertShape
from qbe.bench.measure import take_turns
from qbe.bench.mixtures import QWEN3_30B_A3B, MixtureShape, random_mixture
from qbe.engine.core import Core
from qbe.engine.devices import pick_device
from qbe.engine.memory import of_engine
from qbe.sites import FULL_BITS
from qbe.store.nested_linears import NestedWeightConfig

WHAT = ("memory", "decode")
BATCHES = (1, 8, 32)
MUST = {1: 1.8, 8: 1.5, 32: 1.3}  # 4 bits over 16
MUST_MEMORY, MUST_MIXED = 0.31, 1.1
MIX = (4, 6, 8)
TINY = MixtureShape(ExpertShape("tiny", 8, 2, 64, 64), 2, 4, 2, 16, 320)  # to try the script on a CPU
_BEGAN = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=QWEN3_30B_A3B.layers)
    parser.add_argument("--only", default=",".join(WHAT))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes")
    args = parser.parse_args()
    device = pick_device(args.device)
    shape = TINY if args.tiny else replace(QWEN3_30B_A3B, layers=args.layers)
    say(device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", layers=shape.layers)
    sizes = EngineSizes(batches=BATCHES, rounds=args.rounds, steps=args.steps)
    only = args.only.split(",")
    if "memory" in only:
        memory(shape, device)
    if "decode" in only:
        decode(shape, device, sizes)


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


def release(core: Core) -> None:
    """Gives the model's memory back before the next one is made."""
    vars(core).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
