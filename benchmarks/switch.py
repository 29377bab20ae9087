"""Time to change the blueprint between two steps: what `Plan.write` takes when every row changes.

`new`: blueprints that the plan has not seen; `seen`: their columns are on the device already.

    PYTHONPATH=src python benchmarks/switch.py [--device cpu|cuda] [--json FILE]

The sites are those of SmolLM2 (211) and of Llama-3.1-8B (225); no model is loaded, since none is touched.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from qbe.blueprint import Blueprint
from qbe.engine.plan import Plan
from qbe.sites import Role, Site, SiteTable

LAYER = (
    Role.ATTENTION_Q, Role.ATTENTION_K, Role.ATTENTION_V, Role.ATTENTION_O, Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN
)  # fmt: skip


def sites(layers: int) -> SiteTable:
    """A dense model's nested sites."""
    gears = (4, 6, 8, 16)
    found = [Site(f"layers.{i}.{r}", r, i, (64, 64), True, gears) for i in range(layers) for r in LAYER]
    return SiteTable((*found, Site("head", Role.OUTPUT_HEAD, None, (64, 64), True, gears)), "shape", layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rng, rows = torch.device(args.device), random.Random(0), []
    for layers, batch in ((30, 1), (30, 16), (32, 1), (32, 16)):
        table = sites(layers)
        plan = Plan(table, 512, device)
        base = Blueprint.of("b", table, (4,) * len(table.nested))
        times = {"new": [], "seen": []}  # type: dict[str, list[float]]
        for _ in range(200):
            new = [
                Blueprint.of("b", table, tuple(rng.choices((4, 6, 8, 16), k=len(table.nested)))) for _ in range(batch)
            ]
            for kind in ("new", "seen"):
                plan.write([(base, batch)], [base] * batch)  # so that the next write is a change
                start = time.perf_counter()
                plan.write([(b, 1) for b in new], new)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times[kind].append((time.perf_counter() - start) * 1e6)
        for kind, values in times.items():
            median, worst = statistics.median(values), sorted(values)[int(0.99 * len(values))]
            rows.append({"what": f"{len(table.nested)} sites, {batch} rows, {kind}", "us_p50": median, "us_p99": worst})
            print(f"{rows[-1]['what']:32s} p50 {median:7.1f} us   p99 {worst:7.1f} us")
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
