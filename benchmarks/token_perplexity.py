"""Perplexity of WikiText-2 when every token chooses its bits, beside one assignment for all at the same average.

    python benchmarks/token_perplexity.py [--model M] [--data DIR] [--policies tokenwise] [--bits 6] [--tokens N]
                                          [--device cuda] [--json FILE]

Windows of 1024 tokens of the test split through the engine's own pages, float32, KV cache at 16 bits, against the
16-bit model on the same windows. The average is over all tokens of all windows as they were read (the output head
included), and `static` is measured at that very average. Intervals: 95 %, bootstrap over windows, paired. Routers
(`qbe train`) are trained on other text; what they meet as an average is met over traffic like training's, so give a
`--bits` at which the average comes out as wanted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from qbe import Budget, policies
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.datasets.intervals import interval
from qbe.engine.engine import Engine
from qbe.eval.fidelity import Fidelity, Teacher
from qbe.models.load import quiet
from qbe.progress import bar
from qbe.sites import FULL_BITS

WINDOW = 1024


def change(found: list[Fidelity], full: list[Fidelity]) -> tuple[float, float, float]:
    """Perplexity over that of 16 bits, less one, with its interval."""
    loss = np.array([f.loss - t.loss for f, t in zip(found, full, strict=True)])
    tokens = np.array([f.tokens for f in found])
    low, high = interval(loss, tokens) or (math.nan, math.nan)  # of a single window nothing is known
    return math.expm1(loss.sum() / tokens.sum()), math.expm1(low), math.expm1(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--policies", default="tokenwise")
    parser.add_argument("--bits", default="6")
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = (args.data / "wikitext2_test.txt").read_text()[: 8 * args.tokens]
    rows = []
    with (
        quiet(),
        Engine(args.model, dtype="float32", device=args.device, records=False, progress=sys.stderr.isatty()) as engine,
    ):
        table, ids = engine.table, engine.tokenizer(text)["input_ids"]
        windows = [ids[i : i + WINDOW] for i in range(0, args.tokens // WINDOW * WINDOW, WINDOW)]
        full = Blueprint.of("uniform", table, (FULL_BITS,) * len(table.nested))
        teachers = [Teacher(engine.core, full, w[:1], w[1:], table) for w in windows]
        with bar("windows at 16 bits", len(windows), sys.stderr.isatty()) as tick:
            exact = []
            for teacher in teachers:
                exact.append(teacher.compare(full))
                tick()

        def measured(policy: str, bits: float) -> list[Fidelity]:
            engine.make_ready(policy)
            budget = Budget(bits=bits, kv_bits=FULL_BITS)
            blueprint = policies.load(policy).blueprint(QueryProfile(0.5, "other", WINDOW), budget, table)
            found = []
            with bar(f"{policy} at {bits:g}", len(teachers), sys.stderr.isatty()) as tick:
                for teacher in teachers:
                    found.append(teacher.compare(blueprint))
                    tick()
            return found

        for asked in map(float, args.bits.split(",")):
            for policy in args.policies.split(","):
                found = measured(policy, asked)
                average = round(float(np.mean([f.bits if f.bits is not None else asked for f in found])), 3)
                for name, of in ((policy, found), ("static", measured("static", average))):
                    kl = sum(f.kl for f in of) / sum(f.tokens for f in of)
                    value, *between = change(of, exact)
                    row = {
                        "policy": name,
                        "asked": asked,
                        "bits": average,
                        "kl": kl,
                        "change": value,
                        "interval": between,
                    }
                    rows.append({**row, "windows": [asdict(f) for f in of]})
                    print(json.dumps(row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
