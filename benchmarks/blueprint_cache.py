"""The blueprint cache: time of a look-up, and hits on a replay of traffic.

    python benchmarks/blueprint_cache.py [--data DIR] [--json FILE]

Look-ups on one core among 100 000 entries of made-up features (normal deviates, with the mean and the deviations of the
classifier's training prompts), the fingerprint included. With `--data` a replay as well: prompts of gsm8k and Alpaca,
each the last message of a conversation whose length, and that of the answer, are those of Azure's conversation trace.
The cache is warmed with 3 000 prompts of gsm8k's training file, two thirds of Alpaca's tasks and the first half of the
trace; what is replayed is the rest of that file, gsm8k's test file, the other tasks and the second half. Every prompt
comes once. On each hit the policy is asked as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from qbe import policies
from qbe.analysis import CLASSES, Analyzer, QueryProfile
from qbe.analysis.classifier import default_classifier
from qbe.analysis.features import FEATURES, LOGARITHMIC
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.cache import BlueprintCache
from qbe.cache.fingerprint import Fingerprint
from qbe.cache.memory import CachedBlueprint, Memory
from qbe.cache.traffic import LoggedRequest, read_lengths, with_lengths
from qbe.engine.engine import Engine
from qbe.files import write_text

ENTRIES, ROUNDS, ROUND = 100_000, 20, 2000
TIERS = tuple(Budget(tier=t) for t in ("flex", "default", "priority"))
BUDGETS = tuple(replace(b, activation_bits=a) for b in TIERS for a in (8, 16))
CONTEXT = 1000
WARM = 3000


def made_up(rng: np.random.Generator) -> Iterator[QueryProfile]:
    """Profiles with the mean and the deviations of the classifier's training prompts."""
    c = default_classifier()
    while True:
        x = np.maximum(rng.standard_normal((1000, len(FEATURES))) * c.scale + c.mean, 0)
        raw = np.where(np.isin(FEATURES, LOGARITHMIC), np.expm1(x), x)
        z = c.standardise(raw)
        p = c.probabilities(z)
        for values, score, chances in zip(raw.tolist(), c.score(z, p).tolist(), p.tolist(), strict=True):
            features = dict(zip(FEATURES, values, strict=True))
            features.update((f"p_{k}", v) for k, v in zip(CLASSES, chances, strict=True))
            yield QueryProfile(score, CLASSES[chances.index(max(chances))], 2, features, CONTEXT)


def lookups() -> list[dict[str, Any]]:
    """Microseconds of a look-up, fingerprint included, of queries that are in the cache and of others like them.

    The look-ups of a round come one after another. Percentiles of all of them, and of those of the quietest tenth of
    the rounds: where a machine has other work, the tail is that work's.
    """
    draw, made = random.Random(0), made_up(np.random.default_rng(0))
    memory, blueprint = Memory(2 * ENTRIES), Blueprint("made up", (), (), ())
    kept: list[tuple[QueryProfile, Budget]] = []
    while memory.entries < ENTRIES:
        profile, budget = next(made), draw.choice(BUDGETS)
        query = Fingerprint(profile, budget)
        memory.open(query.cell, [CachedBlueprint(query.cell, query.digest, query.bits, 0, sys.maxsize, blueprint)])
        if len(kept) < ROUNDS * ROUND:
            kept.append((profile, budget))
    rows = []
    for name in ("seen before", "new"):
        wall, cpu, kinds = [], [], {"exact": 0, "near": 0, "miss": 0}
        for at in range(0, ROUNDS * ROUND, ROUND):
            if name == "new":
                queries = [(next(made), draw.choice(BUDGETS)) for _ in range(ROUND)]
            else:  # profiles that have just been made, as the analysis leaves them
                queries = [(replace(p, features=dict(p.features)), b) for p, b in kept[at : at + ROUND]]
            for profile, budget in queries:
                began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
                hit = memory.get(Fingerprint(profile, budget), CONTEXT)
                cpu.append((time.thread_time_ns() - began_cpu) / 1e3)
                wall.append((time.perf_counter_ns() - began) / 1e3)
                kinds[hit[1] if hit else "miss"] += 1
        row: dict[str, Any] = {"queries": name, "entries": memory.entries, **kinds}
        rounds = np.reshape(wall, (ROUNDS, ROUND))[1:]  # the first one warms up
        quiet = rounds[np.argsort(rounds.sum(1))[: ROUNDS // 10]]
        for of, times in (("wall", rounds), ("cpu", cpu[ROUND:]), ("quiet_wall", quiet)):
            p50, p99 = np.percentile(times, [50, 99])
            row |= {f"{of}_p50_us": round(float(p50), 1), f"{of}_p99_us": round(float(p99), 1)}
        rows.append(row)
    return rows


def read_prompts(data: Path, first: bool) -> list[LoggedRequest]:
    """Prompts to warm the cache with (`first`), or to replay; each once."""
    rows = [
        json.loads(line)["question"]
        for name in ("gsm8k_train4000", "gsm8k_test500")
        for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    found = rows[:WARM] if first else rows[WARM:]
    for i, line in enumerate((data / "alpaca_seed_tasks.jsonl").read_text(encoding="utf-8").splitlines()):
        if (i % 3 != 0) == first:
            task = json.loads(line)
            found += [f"{task['instruction']}\n{case['input']}".strip() for case in task["instances"]]
    prompts = [LoggedRequest(text) for text in dict.fromkeys(found)]
    random.Random(0).shuffle(prompts)
    return prompts


def profiles(engine: Engine, traffic: Sequence[LoggedRequest], tier: int | None) -> list[QueryProfile]:
    """The profiles of these requests."""
    analyzer = Analyzer(engine.model.get_input_embeddings().weight, tier=tier)
    texts = [a.text or "" for a in traffic]
    found = [analyzer.analyze(t, engine.tokenizer(t)["input_ids"]) for t in texts]
    return [replace(p, context=a.context or 0) for p, a in zip(found, traffic, strict=True)]


def replay(engine: Engine, data: Path, tier: int | None, budgets: Sequence[Budget]) -> dict[str, Any]:
    """Hits of a replay, and how far what is served lies from what the policy says anew.

    Args:
        tier: of the analysis; None the default.
        budgets: of which each request has one, at random.
    """
    lengths = read_lengths(data / "azure_llm_trace_conv_6000.csv")
    half = len(lengths) // 2
    policy, table, draw = policies.load("tiered"), engine.table, random.Random(0)
    cache = BlueprintCache(table, engine.name)
    prompts = read_prompts(data, True)
    log = profiles(engine, with_lengths(prompts, lengths[:half])[: len(prompts)], tier)
    for profile in log:
        cache.blueprint(policy, profile, draw.choice(budgets), near=False)
    entries, kinds, bits, kv_bits = cache.numbers.entries, {"exact": 0, "near": 0, "miss": 0}, [], []
    prompts = read_prompts(data, False)
    for profile in profiles(engine, with_lengths(prompts, lengths[half:])[: len(prompts)], tier):
        budget = draw.choice(budgets)
        served, kind = cache.blueprint(policy, profile, budget)
        kinds[kind or "miss"] += 1
        if kind != "miss":
            fresh = policy.blueprint(profile, budget, table)
            bits.append(abs(served.average_weight_bits(table) - fresh.average_weight_bits(table)))
            kv_bits.append(abs(served.average_kv_bits(table) - fresh.average_kv_bits(table)))
    return {
        "analysis_tier": "default" if tier is None else tier, "budgets": len(budgets), "warmed_with": len(log),
        "entries": entries, "replayed": sum(kinds.values()), **kinds,
        "hits": round(1 - kinds["miss"] / sum(kinds.values()), 4),
        "largest_change_of_weight_bits": max(bits), "largest_change_of_kv_bits": max(kv_bits),
    }  # fmt: skip


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def main() -> None:
    """Measures look-ups, then, where there are data, the replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with gsm8k, Alpaca's tasks and Azure's trace")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # one core for every library
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = {"lookups": lookups()}
    show("look-ups, one core", found["lookups"])
    if args.data is not None:
        with Engine(device="cpu", kv_tokens=1024, records=False, blueprint_cache=False) as engine:
            settings = ((None, 1), (None, 3), (3, 1))
            found["replay"] = [replay(engine, args.data, tier, TIERS[1:2] if n == 1 else TIERS) for tier, n in settings]
        show("replay", found["replay"])
    if args.json:
        write_text(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
