"""What it costs that a tier has two or three averages: divergence and bytes beside averages in steps of 0.05 bits.

    python benchmarks/tier_averages.py --data DIR [--model MODEL] [--tiers flex,default] [--limit 12] [--json FILE]

For every query both averages that its score gives, allocated as the policy `tiered` does; the divergence from 16 bits
of the reference answer under each, by teacher forcing; and the bytes that a token reads. Intervals are over queries,
paired (`qbe.datasets.intervals`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from qbe import policies
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.datasets.intervals import interval, verdict
from qbe.datasets.items import encode, read
from qbe.engine.engine import Engine
from qbe.eval.compare import as_served
from qbe.eval.fidelity import Teacher
from qbe.files import write_text
from qbe.models.load import quiet
from qbe.sites import FULL_BITS

FINE = 0.05  # bits; the steps of version 0.1


def averages(tier: str, score: float, lowest: float) -> tuple[float, float]:
    """Bits in steps of 0.05, and as the policy has them."""
    budget = Budget(tier=tier)
    fine = round(round(budget.bits_for(score) / FINE) * FINE, 2)
    return max(lowest, fine), max(lowest, budget.average_for(score))


def main() -> None:
    """Measures and prints a row for each tier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tiers", default="flex,default,priority")
    parser.add_argument("--datasets", default="text,gsm8k,bbh,humaneval")
    parser.add_argument("--limit", type=int, default=12, help="queries of each data set")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    items, rows = read(tuple(args.datasets.split(",")), args.data, args.limit), list[dict[str, Any]]()
    tiers = args.tiers.split(",")
    with (
        quiet(),
        Engine(args.model, dtype="float32", device=args.device, records=False, blueprint_cache=False,
               progress=sys.stderr.isatty()) as engine,
    ):  # fmt: skip
        policy, table = policies.load("tiered"), engine.table
        served, lowest = as_served(table, engine.core.pool.dtype), float(table.gears()[0])
        full = Blueprint.of("full", table, [FULL_BITS] * len(table.nested))
        found: dict[str, list[tuple[float, ...]]] = {tier: [] for tier in tiers}
        used: dict[tuple[str, int], set[str]] = {}
        for item in items:
            encoded = encode(item, engine.tokenizer)
            if len(encoded.prompt_ids) + len(encoded.reference_ids) >= (engine.core.context or 1 << 40):
                continue
            score = engine.explain(encoded.prompt).profile.score
            teacher = Teacher(engine.core, full, encoded.prompt_ids, encoded.reference_ids, served)
            known: dict[float, tuple[float, float, float]] = {}
            for tier in tiers:
                row: list[float] = [len(encoded.reference_ids)]
                for which, bits in enumerate(averages(tier, score, lowest)):
                    budget = Budget(bits=bits, kv_bits=FULL_BITS)
                    blueprint = policy.blueprint(QueryProfile(score, "", 0), budget, table)
                    used.setdefault((tier, which), set()).add(blueprint.key)
                    if bits not in known:
                        kl = teacher.compare(blueprint).kl
                        had = blueprint.average_weight_bits(table)
                        known[bits] = kl, had, float(blueprint.bytes_per_token(served))
                    row += known[bits]
                found[tier].append(tuple(row))
    for tier in tiers:
        tokens, fine_kl, fine_bits, fine_bytes, kl, bits, nbytes = np.array(found[tier]).T
        changed = interval(kl, fine_kl)
        rows.append({
            "tier": tier, "queries": len(tokens), "blueprints": [len(used[tier, i]) for i in (0, 1)],
            "bits": [round(float(np.average(b, weights=tokens)), 3) for b in (fine_bits, bits)],
            "bytes_ratio": round(float((nbytes * tokens).sum() / (fine_bytes * tokens).sum()), 4),
            "divergence": [float(k.sum() / tokens.sum()) for k in (fine_kl, kl)],
            "divergence_ratio": float(kl.sum() / fine_kl.sum()), "interval": changed,
            "verdict": verdict(changed, 1.0, True, len(tokens)),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        write_text(args.json, json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
