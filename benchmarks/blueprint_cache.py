"""The blueprint cache: time of a look-up, and hits on a replay of traffic.

    python benchmarks/blueprint_cache.py [--data DIR] [--json FILE]

Look-ups, on one core: 100 000 entries of made-up features (normal deviates in the classifier's own standardisation), the
features of each look-up computed anew. With `--data` a replay as well: prompts of gsm8k and Alpaca with the context
and answer lengths of Azure's conversation trace, each prompt as the last message of a conversation of that length.
The cache is warmed with gsm8k's training file, two thirds of Alpaca's tasks and the first half of the trace; what is
replayed is gsm8k's test file, the other tasks and the second half. On each hit the policy is asked as well.
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
from qbe.cache.fingerprint import fingerprint
from qbe.cache.memory import Entry, Memory
from qbe.cache.traffic import Asked, read_traffic

ENTRIES, LOOKUPS = 100_000, 20_000
TIERS = tuple(Budget(tier=t) for t in ("flex", "default", "priority"))
CONTEXT = 1000


def made_up(n: int, rng: np.random.Generator) -> Iterator[QueryProfile]:
    """Profiles with the mean and the deviations of the classifier's training prompts."""
    c = default_classifier()
    logarithmic = np.isin(FEATURES, LOGARITHMIC)
    for _ in range(n):
        x = np.maximum(rng.standard_normal(len(FEATURES)) * c.scale + c.mean, 0)
        raw = np.where(logarithmic, np.expm1(x), x)
        z = c.standardise(raw)
        p = c.probabilities(z)
        features = dict(zip(FEATURES, raw.tolist(), strict=True))
        features.update((f"p_{k}", v) for k, v in zip(CLASSES, p.tolist(), strict=True))
        yield QueryProfile(float(c.score(z, p)), CLASSES[int(p.argmax())], 2, features, CONTEXT)


def lookups() -> list[dict[str, Any]]:
    """Microseconds of a look-up, fingerprint included, of queries that are in the cache and of others like them."""
    rng, draw = np.random.default_rng(0), random.Random(0)
    memory, blueprint = Memory(2 * ENTRIES), Blueprint("made up", (), (), ())
    kept: list[tuple[QueryProfile, Budget]] = []
    for profile in made_up(10 * ENTRIES, rng):
        budget = draw.choice(TIERS)
        found = fingerprint(profile, budget)
        memory.open(found.cell, [Entry(found.cell, found.digest, found.bits, 0, sys.maxsize, blueprint)])
        if len(kept) < LOOKUPS:
            kept.append((profile, budget))
        if memory.entries == ENTRIES:
            break
    rows = []
    others = ((p, draw.choice(TIERS)) for p in made_up(LOOKUPS, rng))
    for name, queries in (("seen before", kept), ("new", others)):
        wall, cpu, kinds = [], [], {"exact": 0, "near": 0, "miss": 0}
        for profile, budget in queries:
            profile = replace(profile, features=dict(profile.features))  # as warm as the analysis leaves it
            began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
            hit = memory.get(fingerprint(profile, budget), CONTEXT)
            cpu.append((time.thread_time_ns() - began_cpu) / 1e3)
            wall.append((time.perf_counter_ns() - began) / 1e3)
            kinds[hit[1] if hit else "miss"] += 1
        row: dict[str, Any] = {"queries": name, "entries": memory.entries, **kinds}
        for of, times in (("wall", wall), ("cpu", cpu)):
            p50, p99 = np.percentile(times[LOOKUPS // 10 :], [50, 99])
            row |= {f"{of}_p50_us": round(float(p50), 1), f"{of}_p99_us": round(float(p99), 1)}
        rows.append(row)
    return rows
