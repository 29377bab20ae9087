"""Bounded mode: pages read again, bytes from host memory and what is left of the error, against the threshold.

    python benchmarks/bounded_kv.py [--model NAME] [--data DIR] [--context N] [--tokens N] [--bits 8,4] [--json FILE]

Text: WikiText-2's test split from `--data` (default $QBE_DATA or ../shared/data). Its first `--context` tokens are a
prompt, read with nothing left to error (threshold 0). The next `--tokens` are decoded one by one at the threshold,
always the text's own; they are what is counted. Weights at 16 bits, float32, on a CPU. `divergence` is the mean KL
divergence of the logits from those with a KV cache of 16 bits, in nats.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from qbe import Engine, SamplingParams
from qbe.blueprint import Blueprint
from qbe.engine.sampling.sampler import Scores
from qbe.engine.scheduling.sequence import Sequence

THRESHOLDS = (None, 100.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.0)


def decode(engine: Engine, ids: list[int], context: int, blueprint: Blueprint) -> tuple[torch.Tensor, list[int]]:
    """Logits after each of the tokens from `context` on, and what bounded mode counted meanwhile."""
    core, found = engine.core, []
    params = SamplingParams(max_tokens=len(ids) - context, ignore_eos=True)
    # All thresholds share the prompt's pages: they are found by their tokens and blueprint.
    sequence = Sequence("text", ids[:context], params, replace(blueprint, kv_error=0.0))

    def own(scores: Scores, sequences: list[Sequence], guesses: object) -> list[int | None]:
        found.append(scores.logits[0].clone())
        return [ids[len(sequence.token_ids)]]

    def counts() -> tuple[int, int, int]:
        return sequence.pages_read, sequence.pages_raised, sequence.host_bytes

    core.add(sequence)
    before = counts()
    with mock.patch("qbe.engine.speculation.accept_tokens.sample", own):
        while core.has_work():
            core.step()
            if len(found) == 1:
                before, sequence.blueprint = counts(), blueprint
    return torch.stack(found), [a - b for a, b in zip(counts(), before, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bits", default="8,4")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    room = args.context + args.tokens
    engine = Engine(args.model, policy="uniform", dtype="float32", device="cpu", max_sequences=1, kv_tokens=3 * room,
                    records=False)  # fmt: skip
    ids = engine.tokenizer((args.data / "wikitext2_test.txt").read_text()[: 8 * room])["input_ids"][: room + 1]
    plain = Blueprint.of("bench", engine.table, tuple(s.gears[-1] for s in engine.table.nested))
    target = torch.tensor(ids[args.context :])
    wanted, _ = decode(engine, ids, args.context, plain)
    rows = []

    def report(bits: int, threshold: float | None, logits: torch.Tensor, counted: Iterable[int]) -> None:
        read, raised, moved = counted
        own = log_softmax(wanted, -1)
        rows.append({
            "bits": bits, "threshold": threshold, "raised": raised / read if read else 0.0,
            "host_bytes_per_token": moved / (len(logits) - 1),
            "divergence": float(kl_div(log_softmax(logits, -1), own, log_target=True, reduction="batchmean")),
            "largest_logit_change": float((logits - wanted).abs().max()),
            "perplexity": math.exp(float(cross_entropy(logits, target))),
        })  # fmt: skip
        r = rows[-1]
        print(f"{bits:2d} bits  threshold {'none' if threshold is None else f'{threshold:g}':>5s}  "
              f"read again {r['raised']:7.2%}  {r['host_bytes_per_token'] / 1e6:8.2f} MB a token  "
              f"divergence {r['divergence']:.2e}  logits {r['largest_logit_change']:.2e}  "
              f"perplexity {r['perplexity']:.3f}", flush=True)  # fmt: skip

    report(16, None, wanted, (0, 0, 0))
    for bits in map(int, args.bits.split(",")):
        for threshold in THRESHOLDS:
            blueprint = replace(plain.with_kv_bits((bits,) * len(plain.kv_bits)), kv_error=threshold)
            logits, counted = decode(engine, ids, args.context, blueprint)
            report(bits, threshold, logits, counted)
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "data": None, "json": None, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
