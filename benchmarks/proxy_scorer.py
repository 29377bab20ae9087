"""The proxy scorer on traffic it has not seen: how much it answers, how near the policy, and in what time.

    python benchmarks/proxy_scorer.py [--data DIR] [--model M] [--json FILE]

Traffic as in benchmarks/blueprint_cache.py: prompts of gsm8k and Alpaca with the lengths of Azure's conversation trace,
each once, under the three tiers in turn of a die. The policy `tiered` gives each its blueprint; the proxy learns from
the records of the older three quarters and is judged by the newest. Times of `ProxyPolicy.blueprint` on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blueprint_cache import TIERS, profiles, read_prompts

from qbe import policies
from qbe.budget import Budget
from qbe.cache.traffic import read_lengths, with_lengths
from qbe.engine.engine import Engine
from qbe.learning import proxy
from qbe.policies import learned
from qbe.records import Record

ROUNDS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)
    with Engine(args.model, device="cpu", kv_tokens=1024, records=False, blueprint_cache=False) as engine:
        table, tiered = engine.table, policies.load("tiered")
        lengths = read_lengths(args.data / "azure_llm_trace_conv_6000.csv")
        prompts = read_prompts(args.data, True) + read_prompts(args.data, False)
        asked = [
            (profile, draw.choice(TIERS))
            for profile in profiles(engine, with_lengths(prompts, lengths)[: len(prompts)], None)
        ]
    records = []
    for profile, budget in asked:
        chosen = tiered.blueprint(profile, budget, table)
        records.append(Record(
            model=table.model_name, policy="tiered", tier=budget.tier, prompt_tokens=profile.context,
            finish_reason="stop", score=profile.score, prompt_class=profile.prompt_class,
            analysis_tier=profile.tier, features=profile.features, weight_bits=chosen.weight_bits,
            activation_bits=chosen.activation_bits, kv_bits=chosen.kv_bits,
        ))  # fmt: skip
    began = time.perf_counter()
    found = proxy.train(records, "tiered", table)
    trained_in = time.perf_counter() - began
    learned.write("proxy", table, found)
    if hasattr(os, "sched_setaffinity"):  # one core
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    held = asked[round(len(asked) * (1 - proxy.HELD_OUT)) :]
    result: dict[str, Any] = {"prompts": len(asked), "train_s": round(trained_in, 1), **found.about}
    proxied = policies.load("proxy")
    answered = []
    for profile, budget in held:
        before = proxied.handled
        proxied.blueprint(profile, budget, table)
        answered += [(profile, budget)] * (proxied.handled - before)
    for name, policy, of in (
        ("proxy_us", "proxy", held), ("proxy_answered_us", "proxy", answered), ("tiered_us", "tiered", held)
    ):  # fmt: skip
        result[name] = timed(policy, of, table)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def timed(name: str, held: list[tuple[Any, Budget]], table: Any) -> dict[str, float]:
    """Microseconds of a request: on the clock, and of processor time, which other programs on this machine add to less.

    The first round, in which everything is made, does not count. `request` is of each request's median over the rounds,
    so that its tail is that of slow requests, not of moments in which another program had the core.
    """
    policy, wall, cpu = policies.load(name), [], []
    for _ in range(ROUNDS):
        rows = []
        for profile, budget in held:
            began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
            policy.blueprint(profile, budget, table)
            rows.append((time.perf_counter_ns() - began, time.thread_time_ns() - began_cpu))
        wall.append([w / 1e3 for w, _ in rows])
        cpu.append([c / 1e3 for _, c in rows])
    found = {}
    for of, times in (("wall", wall[1:]), ("cpu", cpu[1:]), ("request", np.median(wall[1:], 0))):
        p50, p99 = np.percentile(times, [50, 99])
        found |= {f"{of}_p50": round(float(p50), 1), f"{of}_p99": round(float(p99), 1)}
    return found


if __name__ == "__main__":
    main()
