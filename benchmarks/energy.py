"""Joules per token at each precision: the machine's counter where it has one, else a model, marked so.

    python benchmarks/energy.py [--model M] [--bits 4,6,8,16] [--batch N] [--tokens N] [--runs N] [--device D]
                                [--json FILE]

Answers of N tokens in one batch, uniform bits, greedy; precisions alternate. The counter (NVML or RAPL) is read before
and after, so whatever else the chip does counts too. Without one 5 W a thread or 300 W for a GPU are assumed for as
long as it takes (`qbe.server.energy.spending`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from qbe.budget import Budget
from qbe.engine.engine import Engine
from qbe.engine.result import Request
from qbe.engine.sampling.sampling_params import SamplingParams
from qbe.server.energy.meter import find
from qbe.server.energy.spending import MODEL, assumed_watts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--bits", default="4,6,8,16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    widths = [float(b) for b in args.bits.split(",")]
    rows: list[dict[str, float | str]] = []
    with Engine(args.model, policy="uniform", device=args.device, max_sequences=args.batch, records=False) as engine:
        meter, assumed = find(engine.core.device), assumed_watts(engine.core.device)
        for run in range(args.runs + 1):  # the first one is thrown away
            for bits in widths:
                requests = [
                    Request(f"{i} {run} {bits}: once upon a time", SamplingParams(args.tokens, 0.0, ignore_eos=True),
                            Budget(bits=bits)) for i in range(args.batch)
                ]  # fmt: skip
                before, start = meter.joules() if meter else None, time.perf_counter()
                written = sum(len(r.token_ids) for r in engine.generate_batch(requests))
                seconds, after = time.perf_counter() - start, meter.joules() if meter else None
                measured = before is not None and after is not None
                joules = after - before if measured else assumed * seconds  # type: ignore[operator]
                source = meter.source if measured and meter else MODEL
                if run:
                    rows.append({"bits": bits, "joules_per_token": joules / written, "source": source,
                                 "tokens_per_s": written / seconds})  # fmt: skip
    for bits in widths:
        found = [float(r["joules_per_token"]) for r in rows if r["bits"] == bits]
        speed = statistics.median(float(r["tokens_per_s"]) for r in rows if r["bits"] == bits)
        sources = ",".join(sorted({str(r["source"]) for r in rows if r["bits"] == bits}))
        spread = f"{min(found):.4f} to {max(found):.4f}, {sources}"
        print(f"{bits:g} bits: {statistics.median(found):.4f} J a token ({spread}), {speed:.1f} tokens/s")
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
