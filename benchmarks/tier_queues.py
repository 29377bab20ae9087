"""Do batches of one tier pay, where the rows of a batch may differ? One model, one backlog, both ways.

    python benchmarks/tier_queues.py [--model M] [--places N] [--answers N] [--tokens N] [--runs N] [--json FILE]

A backlog of answers, half of them flex and half priority, is there at once; then priority answers come one by one while
a backlog of flex is written. Without HTTP: the engine's scheduler with `qbe.server.queues`. Runs alternate. On a CPU
seconds are the process's own, which a busy host changes little: run it with OMP_NUM_THREADS=1.

    tokens/s   of all answers of the backlog
    first      seconds from asking to the first token of the priority answers that came one by one, median and worst
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from qbe.budget import Budget
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.server.queues import TierQueues
from qbe.server.settings import Settings, TierName

BITS: dict[str, float] = {"flex": 4.5, "priority": 7.5}
WAYS = {"shared": Settings.model_validate({}), "apart": Settings.model_validate({"queues": {"apart": True}})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {way: {"tokens/s": [], "first": []} for way in WAYS}
    with Engine(args.model, max_sequences=args.places, records=False) as engine:
        for run in range(args.runs + 1):  # the first one is thrown away
            for way in list(WAYS)[:: 1 if run % 2 else -1]:
                scheduler = engine.core.scheduler
                queues = TierQueues(lambda way=WAYS[way]: way, args.places, scheduler.max_batch_tokens)
                queues.guide(scheduler)
                speed = backlog(engine, queues, args.answers, args.tokens, run)
                first = one_by_one(engine, queues, args.answers, args.tokens, run)
                if run:
                    found[way]["tokens/s"].append(speed)
                    found[way]["first"] += first
    for way, numbers in found.items():
        speed, first = numbers["tokens/s"], numbers["first"]
        print(
            f"{way:7} {statistics.median(speed):7.1f} tokens/s ({min(speed):.1f} to {max(speed):.1f}), "
            f"priority's first token {statistics.median(first):.2f} s, worst {max(first):.2f} s"
        )
    if args.json:
        args.json.write_text(json.dumps(found))


def clock(engine: Engine) -> Callable[[], float]:
    """Seconds: the process's own where it computes itself."""
    return time.perf_counter if engine.core.device.type == "cuda" else time.process_time


def ask(engine: Engine, queues: TierQueues, tier: TierName, tokens: int, seed: str) -> str:
    """One answer; no prompt is like another, so that the cache plays no part."""
    prompt = f"{seed}: tell me what this number is good for."
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return engine.submit(Request(prompt, params, Budget(bits=BITS[tier], tier=tier), priority=queues.priority(tier)))


def backlog(engine: Engine, queues: TierQueues, answers: int, tokens: int, run: int) -> float:
    """Tokens a second of a backlog of both tiers."""
    tiers: list[TierName] = ["flex", "priority"]
    ids = [ask(engine, queues, tiers[i % 2], tokens, f"backlog {run} {i}") for i in range(answers)]
    start = clock(engine)()
    while not all(map(engine.finished, ids)):
        engine.step()
    seconds = clock(engine)() - start
    return sum(len(engine.take_result(i).token_ids) for i in ids) / seconds


def one_by_one(engine: Engine, queues: TierQueues, answers: int, tokens: int, run: int) -> list[float]:
    """Seconds to the first token of priority answers, one at a time, under a backlog of flex."""
    ids = [ask(engine, queues, "flex", tokens, f"flood {run} {i}") for i in range(answers)]
    first = []
    for _ in range(tokens // 2):  # the batch is in the midst of it
        engine.step()
    for i in range(answers // 8):
        asked = clock(engine)()
        ids.append(ask(engine, queues, "priority", tokens, f"one {run} {i}"))
        while not engine.started(ids[-1]):
            engine.step()
        first.append(clock(engine)() - asked)
        while not engine.finished(ids[-1]):
            engine.step()
    while not all(map(engine.finished, ids)):
        engine.step()
    for i in ids:
        engine.take_result(i)
    return first


if __name__ == "__main__":
    main()
