"""Perplexity over the KV cache's bits, through the engine's own pages, and the memory that they take.

    python benchmarks/kv_perplexity.py [--model NAME] [--data DIR] [--windows N] [--bits 16,8,4.8,u4] [--json FILE]

Text: WikiText-2's test split from `--data` (default $QBE_DATA or ../shared/data), windows of 4096 tokens; weights and
activations in float32. A token sees its own page of 64 tokens as it is and all earlier ones as they are sealed. A
number is an average that the policy allocates from the measured sensitivities, `u4` every head at 4 bits. Printed are
perplexity, how far it is over 16 bits, and how many times smaller than in bfloat16 the cache of a whole window is,
scales and the open page included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from qbe.blueprint import Blueprint
from qbe.engine.core import Core
from qbe.engine.scoring import Scored, score
from qbe.kernels.kv_blocks import FULL_BITS, PAGE_SIZE, block
from qbe.kvcache.pages import PagePool
from qbe.models import load_model, pull
from qbe.policies.kv import allocate_kv
from qbe.sites import SiteTable
from qbe.store import kv_table
from qbe.store.prepare import prepare, store_folder

WINDOW = 4096


def smaller(pool: PagePool, bits: tuple[Any, ...], tokens: int) -> float:
    """Memory of so many tokens in bfloat16 over that at these bits."""
    low = full = 0
    for shape, of_layer in zip(pool.shapes, bits, strict=True):
        if shape is not None:
            heads = of_layer if isinstance(of_layer, tuple) else (of_layer,) * shape.kv_heads
            low += sum(block(b, shape.key_dim, shape.value_dim, 2).nbytes for b in heads)
            full += shape.kv_heads * block(FULL_BITS, shape.key_dim, shape.value_dim, 2).nbytes
    pages = tokens // PAGE_SIZE
    return pages * full / (pages * low + (full if low < full else 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--bits", default="16,8,6,4.8,4.4,u4")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    prepare(args.model, device=torch.device("cpu"))  # measures what is not measured yet
    heads = kv_table.read(store_folder(args.model, progress=False))
    loaded = load_model(pull(args.model), dtype="float32")
    table = SiteTable((), args.model, loaded.model.config.num_hidden_layers, heads)
    ids = loaded.tokenizer((args.data / "wikitext2_test.txt").read_text()[: 8 * args.windows * WINDOW])["input_ids"]
    windows = torch.tensor(ids[: args.windows * WINDOW]).view(-1, WINDOW)
    core = Core(loaded.model, table, max_sequences=1, kv_tokens=WINDOW + PAGE_SIZE)
    rows: list[dict[str, Any]] = []
    for what in args.bits.split(","):
        average = float(what.removeprefix("u"))
        bits = (int(average),) * table.layers if what.startswith("u") else allocate_kv(table, average)
        blueprint = Blueprint("kv", (), (), bits)
        losses = torch.zeros(len(windows), WINDOW - 1)
        for row, of_row in zip(windows, losses, strict=True):

            def add(at: int, logits: torch.Tensor, labels: torch.Tensor = row[1:], out: torch.Tensor = of_row) -> None:
                own = labels[at : at + len(logits)]
                out[at : at + len(own)] = cross_entropy(logits[: len(own)], own, reduction="none")

            score(core, [Scored(row.tolist(), blueprint, 0, add)])
        value = math.exp(float(losses.double().mean()))
        rows.append({"bits": what, "average": round(blueprint.average_kv_bits(table), 3), "perplexity": round(value, 4),
                     "excess": round(value / rows[0]["perplexity"] - 1, 6) if rows else 0.0,
                     "smaller": round(smaller(core.pool, blueprint.kv_bits, WINDOW), 3)})  # fmt: skip
        print("{bits:>5s} {average:6.2f} bits {perplexity:9.4f} {excess:+9.3%} {smaller:6.2f}x".format(**rows[-1]),
              flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "windows": len(windows), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
