"""Perplexity and divergence of a mixture of experts at average bits over all weights, policies side by side.

    python benchmarks/expert_quality.py --text FILE --skip N --beginning OUT
    python benchmarks/expert_quality.py --model FOLDER --text FILE [--skip N] [--policies tiered,by_use] [--bits 4.5]
                                        [--tokens N] [--json FILE]

The first form writes the first N documents, for `qbe quantize --calibrate`; FOLDER is what that wrote. The second
measures on the others. Windows of 1024 tokens, spread over the text, through steps of the engine in float32, KV cache
at 16 bits, against the 16-bit model on the same windows. The last policy is what the others are compared with.
Intervals: 95 %, bootstrap over windows, paired. `--policies sites` lowers each role alone to each of --bits instead.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from qbe import Budget, policies
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.datasets.intervals import interval
from qbe.engine.engine import Engine
from qbe.eval.fidelity import Fidelity, Teacher
from qbe.models.load import quiet
from qbe.progress import bar
from qbe.sites import FULL_BITS, SiteTable

WINDOW = 1024
BETWEEN = "\n\n\n"  # documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--skip", type=int, default=0, help="documents; each is ended by two blank lines")
    parser.add_argument("--beginning", type=Path, help="write these documents here, and end")
    parser.add_argument("--policies", default="tiered,by_use")
    parser.add_argument("--bits", default="4.5")
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    documents = args.text.read_text(encoding="utf-8").split(BETWEEN)
    if args.beginning is not None:
        args.beginning.write_text(BETWEEN.join(documents[: args.skip]) + "\n", encoding="utf-8")
        return
    if args.model is None:
        parser.error("--model is missing: a folder that 'qbe quantize --calibrate' wrote")
    text = BETWEEN.join(documents[args.skip :])
    with quiet(), Engine(args.model, dtype="float32", device="cpu", records=False, blueprint_cache=False,
                         max_sequences=1, progress=sys.stderr.isatty()) as engine:  # fmt: skip
        rows = measured(engine, windows(engine.tokenizer(text)["input_ids"], args.tokens), args)
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def windows(ids: list[int], tokens: int) -> list[list[int]]:
    """So many tokens in windows, spread over the text."""
    whole = [ids[i : i + WINDOW] for i in range(0, len(ids) // WINDOW * WINDOW, WINDOW)]
    wanted = min(tokens // WINDOW, len(whole))
    return [whole[i * len(whole) // wanted] for i in range(wanted)]


def measured(engine: Engine, texts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    table = engine.table
    full = Blueprint.of("uniform", table, (FULL_BITS,) * len(table.nested))
    teachers = [Teacher(engine.core, full, w[:1], w[1:], table) for w in texts]

    def run(name: str, blueprint: Blueprint) -> list[Fidelity]:
        with bar(name, len(teachers), sys.stderr.isatty()) as tick:
            found = []
            for teacher in teachers:
                found.append(teacher.compare(blueprint))
                tick()
        return found

    exact, rows = run("16 bits", full), []
    print(f"16 bits: perplexity {math.exp(_sum(exact, 'loss') / _sum(exact, 'tokens')):.3f}, "
          f"{int(_sum(exact, 'tokens'))} tokens in {len(texts)} windows", flush=True)  # fmt: skip
    for bits in map(float, args.bits.split(",")):
        found: dict[str, list[Fidelity]] = {}
        for name, blueprint in blueprints(args.policies, bits, table).items():
            found[name] = of = run(name, blueprint)
            row = {"policy": name, "asked": bits, "bits": round(blueprint.average_weight_bits(table), 3),
                   "bytes": blueprint.bytes_per_token(table), **against(of, exact)}  # fmt: skip
            rows.append({**row, "windows": [asdict(f) for f in of]})
            print(json.dumps(row), flush=True)
        *others, last = found
        for name in others if args.policies != "sites" else ():
            over, under = (np.array([f.kl for f in found[n]]) for n in (name, last))
            row = {"kl_of": name, "over": last, "asked": bits, "ratio": round(over.sum() / under.sum(), 4),
                   "interval": interval(over, under)}  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def blueprints(asked: str, bits: float, table: SiteTable) -> dict[str, Blueprint]:
    """Those of the policies at an average, or those that lower one role alone."""
    if asked == "sites":
        return {
            role: Blueprint.of("sites", table, tuple(int(bits) if s.role == role else FULL_BITS for s in table.nested))
            for role in dict.fromkeys(s.role for s in table.nested)
        }
    profile, budget = QueryProfile(0.5, "other", 2), Budget(bits=bits, kv_bits=FULL_BITS)
    return {name: policies.load(name).blueprint(profile, budget, table) for name in asked.split(",")}


def against(found: list[Fidelity], exact: list[Fidelity]) -> dict[str, Any]:
    """Perplexity over that of 16 bits, less one, with its interval, and KL per token."""
    loss = np.array([f.loss - e.loss for f, e in zip(found, exact, strict=True)])
    tokens = np.array([float(f.tokens) for f in found])
    bounds = interval(loss, tokens)
    return {"change": round(math.expm1(loss.sum() / tokens.sum()), 5), "kl": round(_sum(found, "kl") / tokens.sum(), 6),
            "interval": None if bounds is None else [round(math.expm1(b), 5) for b in bounds]}  # fmt: skip


def _sum(found: list[Fidelity], what: str) -> float:
    return float(sum(getattr(f, what) for f in found))


if __name__ == "__main__":
    main()
