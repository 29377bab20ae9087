"""How long bits for thousands of experts take: allocation, blueprint, its keys, averages and column of the plan.

    python benchmarks/expert_allocation.py [--layers 48] [--experts 128] [--json FILE]

A random site table of the shape of Qwen3-30B-A3B: 4 attention matrices a layer and 2 of each expert. CPU time of this
process, the least of three runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qbe.allocation import knapsack as search
from qbe.blueprint import Blueprint
from qbe.policies.allocate import allocate
from qbe.sites import Role, Site, SiteTable
from qbe.store.plan import Plan

GEARS = (4, 6, 8, 16)
ATTENTION = {Role.ATTENTION_Q: (4096, 2048), Role.ATTENTION_K: (512, 2048), Role.ATTENTION_V: (512, 2048),
             Role.ATTENTION_O: (2048, 4096)}  # fmt: skip
EXPERTS = {"gate_up_proj": (1536, 2048), "down_proj": (2048, 768)}


def table_of(layers: int, experts: int, active: int = 8, seed: int = 0) -> SiteTable:
    """Sites with random sensitivities and use."""
    draw = np.random.default_rng(seed)

    def known(scale: float) -> dict[int, float]:
        damage = float(10 ** draw.normal(-4, 0.7)) * scale
        return {4: damage, 6: damage * float(10 ** draw.normal(-1.2, 0.2)),
                8: damage * float(10 ** draw.normal(-2.4, 0.2)), 16: 0.0}  # fmt: skip

    sites = []
    for i in range(layers):
        for role, shape in ATTENTION.items():
            sites.append(Site(f"layers.{i}.{role}", role, i, shape, True, GEARS, {}, known(1.0)))
        use = np.clip(draw.dirichlet(np.full(experts, 0.5)) * active, 1e-4, 1)
        for name, shape in EXPERTS.items():
            for e in range(experts):
                site = Site(f"layers.{i}.experts.{name}.{e}", Role.MOE_EXPERT, i, shape, False, GEARS, {},
                            known(float(use[e])), use=float(use[e]), expert=e)  # fmt: skip
                sites.append(site)
    return SiteTable(tuple(sites), "random", layers)


def least(work: Callable[[], Any]) -> float:
    """Milliseconds of CPU time."""
    found = []
    for _ in range(3):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return round(1e3 * min(found), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = table_of(args.layers, args.experts)
    numbers = iter(range(1000))

    def first() -> None:
        search._sensitivities.cache_clear()
        allocate(table_of(args.layers, args.experts), 4.5, {})

    made = least(lambda: table_of(args.layers, args.experts))
    gears = allocate(table, 4.5, {})
    activations = (16,) * len(gears)

    def blueprint() -> Blueprint:
        return Blueprint.of("bench", table, gears, activations)

    plan = Plan(table, 8, torch.device("cpu"))

    def column() -> None:
        changed = (GEARS[next(numbers) % 4], GEARS[next(numbers) % 4], *gears[2:])
        plan.columns([Blueprint.of("bench", table, changed, activations)])

    found = {
        "sites": len(table.nested),
        "allocate_first_ms": round(least(first) - made, 2),
        "allocate_ms": least(lambda: allocate(table, 4.5, {})),
        "blueprint_ms": least(blueprint),
        "keys_ms": least(lambda: (b := blueprint(), b.key, b.linear_key, b.computed_key)),
        "average_ms": least(lambda: blueprint().average_weight_bits(table)),
        "column_ms": least(column),
        "column_bytes": plan.expert_bytes.shape[1] + 4 * plan._columns.shape[1],
        "plan_bytes": plan.nbytes,
    }
    for name, value in found.items():
        print(f"{name:20} {value:>12,}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
