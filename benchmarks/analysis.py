"""Time of the query analysis on one core: `python benchmarks/analysis.py [--json FILE]`.

The prompts mix prose, numbers and code at 4.5 characters a token; their tokens are random ids of a random embedding
of the default model's size (49 152 x 576), because the time does not depend on what the numbers are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from qbe.analysis import Analyzer

VOCABULARY, HIDDEN = 49152, 576
CHARS_PER_TOKEN = 4.5
TEXT = (
    "Summarize how the committee, after 3 years and $1,250,000, came to its decision. Who voted against it?\n"
    "def total(xs):\n    return sum(x * 2 for x in xs if x != 0)\n"
    "The river rises in the northern hills and flows through two countries before it reaches the sea. "
)


def measure(analyzer: Analyzer, tokens: int, tier: int, runs: int) -> dict[str, float]:
    """Microseconds of `analyze` over `runs` calls with different prompts of this length.

    Wall time includes the moments when a busy machine runs something else; the thread's own CPU time does not.
    """
    rng = random.Random(tokens)
    source = TEXT * (2 + int(tokens * CHARS_PER_TOKEN) // len(TEXT))
    times, cpu = [], []
    for _ in range(runs):
        start = rng.randrange(len(TEXT))
        text = source[start : start + int(tokens * CHARS_PER_TOKEN)]
        ids = [rng.randrange(VOCABULARY) for _ in range(tokens)]
        wall, own = time.perf_counter_ns(), time.thread_time_ns()
        analyzer.analyze(text, ids, tier=tier)
        cpu.append((time.thread_time_ns() - own) / 1e3)
        times.append((time.perf_counter_ns() - wall) / 1e3)
    row: dict[str, float] = {"tier": tier, "tokens": tokens, "runs": runs}
    for name, values in (("wall", times), ("cpu", cpu)):
        p50, p99 = np.percentile(values[runs // 10 :], [50, 99])  # the first calls warm the caches
        row |= {f"{name}_p50_us": round(float(p50), 1), f"{name}_p99_us": round(float(p99), 1)}
    return row


def main() -> None:
    """Measures the tiers from 8 to 100 000 tokens and the analyser's construction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # one core for every library, BLAS included
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    embedding = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    start = time.perf_counter()
    analyzer = Analyzer(embedding)
    construction = time.perf_counter() - start

    plan = [(1, 8), (1, 20), (1, 31), (1, 512)]
    plan += [(2, 20), (2, 32), (2, 128), (2, 512), (2, 4096), (2, 100_000), (3, 32), (3, 512), (3, 4096)]
    rows = [measure(analyzer, tokens, tier, 100 if tokens > 10_000 else 1500) for tier, tokens in plan]
    columns = ("tier", "tokens", "wall_p50_us", "wall_p99_us", "cpu_p50_us", "cpu_p99_us")
    table = Table(*columns, title=f"query analysis, one core; construction {construction:.2f} s")
    for r in rows:
        table.add_row(*(str(r[c]) for c in columns))
    Console().print(table)
    if args.json:
        temporary = args.json.with_name(args.json.name + ".part")
        temporary.write_text(json.dumps({"construction_s": round(construction, 3), "rows": rows}, indent=1) + "\n")
        os.replace(temporary, args.json)


if __name__ == "__main__":
    main()
