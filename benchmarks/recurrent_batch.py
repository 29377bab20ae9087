"""Requests of a model with recurrent layers: all at once over one after the other, tokens a second on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/recurrent_batch.py MODEL [--requests 8] [--prompt 32] [--tokens 64]
                                                           [--rounds 5] [--bits 4 6 16] [--json FILE]

The clock is the CPU time of this process, with one thread: others may use the machine, but for its memory. The two ways
take turns in each round; medians with quartiles. Prompts are counted, so that this is what users get, and answers are
compared: with `--dtype float32` they have to be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import qbe


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Of random tokens, each of its own length around this one."""
    generator = torch.Generator().manual_seed(0)
    lengths = [max(1, length + i - count // 2) for i in range(count)]
    return [torch.randint(10, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def answers(engine: qbe.Engine, requests: Sequence[qbe.Request], together: bool) -> tuple[float, list[list[int]]]:
    """CPU seconds until all are answered, and the answers."""
    began, found = time.process_time(), dict[str, list[int]]()
    for waiting in [list(requests)] if together else [[r] for r in requests]:
        keys = [engine.submit(r) for r in waiting]
        while not all(map(engine.finished, keys)):
            engine.step()
        found |= {key: engine.take_result(key).token_ids for key in keys}
    return time.process_time() - began, list(found.values())


def measure(engine: qbe.Engine, requests: Sequence[qbe.Request], tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of both ways, their ratio, and how many answers are the same."""
    answers(engine, requests, True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        found = {}
        for together in (False, True):
            seconds, found[together] = answers(engine, requests, together)
            rates[together].append(len(requests) * tokens / seconds)
    ratios = [at_once / one for at_once, one in zip(rates[True], rates[False], strict=True)]
    return {
        "at once": quartiles(rates[True]), "one after the other": quartiles(rates[False]), "ratio": quartiles(ratios),
        "same answers": sum(a == b for a, b in zip(found[True], found[False], strict=True)),
    }  # fmt: skip


def quartiles(numbers: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(q, 3) for q in statistics.quantiles(numbers, n=4, method="inclusive")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 6, 16])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine = qbe.Engine(given.model, device="cpu", dtype=given.dtype, records=False, policy="uniform")
    params = qbe.SamplingParams(max_tokens=given.tokens, ignore_eos=True, temperature=0)
    texts = prompts(given.requests, given.prompt, engine.core.vocabulary)
    found = {}
    for bits in given.bits:
        requests = [qbe.Request(text, params, qbe.Budget(bits=bits)) for text in texts]
        found[f"{bits} bits"] = measure(engine, requests, given.tokens, given.rounds)
        print(f"{bits} bits", found[f"{bits} bits"], flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
