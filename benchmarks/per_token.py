"""Policies that choose for each token against the best fixed bits at the very average that their tokens had.

    python benchmarks/per_token.py [--model M] [--data DIR] [--policies mobi,tokenwise] [--baselines static,fixed]
                                   [--bits 4.5,5,6] [--limit N] [--device cuda] [--json FILE]

Such a policy meets an average over traffic like that which its thresholds were taken from, not over the queries at
hand. So each is measured as `qbe eval` does, by teacher forcing on the test files, and then every baseline at the
average over the tokens that divergence was counted on; a baseline that meets an average over traffic, too, is asked
for others until it had that one. Ratios of divergence have the 95 % bootstrap interval over queries, paired. Float32,
KV cache at 16 bits. What `qbe eval` has measured for this model is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from qbe.datasets.intervals import interval, verdict
from qbe.datasets.items import Item, read
from qbe.datasets.results import Results, identity
from qbe.engine.engine import Engine
from qbe.eval.compare import Comparison, ComparisonResult, Setting
from qbe.models.load import quiet
from qbe.progress import bar

NEAR, ATTEMPTS = 0.005, 5  # bits


def measured(engine: Engine, items: list[Item], settings: list[Setting], results: Results) -> ComparisonResult:
    comparison = Comparison(engine, items, settings, results)
    if comparison.skipped:
        raise SystemExit(comparison.skipped[0])
    with bar("queries", comparison.steps, sys.stderr.isatty()) as tick:
        return comparison.run(tick)


def numbers(outcome: ComparisonResult, setting: Setting, dataset: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divergence summed over a query's tokens, their number and their bits, each [queries]."""
    of = [q.measured[setting] for q in outcome.queries if dataset in ("all", q.item.dataset)]
    columns = zip(*((m.fidelity.kl, m.fidelity.tokens, m.bits) for m in of), strict=True)
    kl, tokens, bits = (np.array(c, np.float64) for c in columns)
    return kl, tokens, bits


def at_average(
    engine: Engine, items: list[Item], results: Results, policy: str, average: float
) -> tuple[np.ndarray, float]:
    """Divergence of each query, [queries], where a policy's own average over the tokens is this, and that average.

    Levels of routers are 1/64 of a bit apart, so it is the nearest of some attempts.
    """
    asked, found = average, []
    for _ in range(ATTEMPTS):
        setting = Setting(policy, round(asked, 3))
        kl, tokens, bits = numbers(measured(engine, items, [setting], results), setting, "all")
        had = float(np.average(bits, weights=tokens))
        found.append((kl, had))
        if abs(had - average) <= NEAR:
            break
        asked += average - had
    return min(found, key=lambda f: abs(f[1] - average))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--policies", default="mobi,tokenwise")
    parser.add_argument("--baselines", default="static")
    parser.add_argument("--bits", default="4.5,5,6")
    parser.add_argument("--datasets", default="text,gsm8k,humaneval")
    parser.add_argument("--limit", type=int, default=8, help="queries of each data set")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    items = read(tuple(args.datasets.split(",")), args.data, args.limit)
    asked = [Setting(p, float(b)) for b in args.bits.split(",") for p in args.policies.split(",")]
    rows = []
    with (
        quiet(),
        Engine(args.model, dtype="float32", device=args.device, records=False, progress=sys.stderr.isatty()) as engine,
        closing(Results(identity(args.model, engine))) as results,
    ):
        routed = measured(engine, items, asked, results)
        for dataset in dict.fromkeys([*args.datasets.split(","), "all"]):
            for setting in asked:
                kl, tokens, bits = numbers(routed, setting, dataset)
                average = round(float(np.average(bits, weights=tokens)), 3)
                rows.append({
                    "dataset": dataset, "policy": setting.policy, "asked": setting.bits, "bits": average,
                    "tokens": int(tokens.sum()), "kl": float(kl.sum() / tokens.sum()),
                    "kl_interval": interval(kl, tokens),
                })  # fmt: skip
                if dataset != "all":
                    continue
                for baseline in args.baselines.split(","):
                    other, had = at_average(engine, items, results, baseline, average)
                    found = interval(kl, other)
                    rows[-1][baseline] = {
                        "bits": round(had, 3),
                        "kl": float(other.sum() / tokens.sum()), "ratio": float(kl.sum() / other.sum()),
                        "ratio_interval": found, "verdict": verdict(found, 1.0, True, len(kl)),
                    }  # fmt: skip
                    print(json.dumps(rows[-1]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
