"""Perplexity over the KV cache's bits, through the engine's own pages, and the memory that they take.

    python benchmarks/kv_perplexity.py [--model NAME] [--data DIR] [--windows N] [--bits 16,8,4.8,4.8-,u4] [--json FILE]

Text: WikiText-2's test split from `--data` (default $QBE_DATA or ../shared/data), windows of 4096 tokens; weights and
activations in float32. A token sees its own page of 64 tokens at 16 bits, all but those of every eighth page the one
before, too, and the others as they are quantised. A number is an average that the policy allocates from the measured
sensitivities, the text's first page at 8 bits at least; `4.4-` without that page, `u4` every page at 4 bits. Printed
are perplexity and how far it is over 16 bits, the KL divergence from 16 bits at every eighth token with its standard
error (nats), and how many times smaller than in bfloat16 the cache of a whole window is, scales and the open page
included; then the same if its last full page waited to be quantised, as seven of eight do.
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
from qbe.engine.sampling.scoring import Scored, score
from qbe.format.kv_blocks import FULL_BITS, PAGE_SIZE, head_layout
from qbe.kvcache.pages import PagePool
from qbe.models import load_model, pull
from qbe.policies.kv import FIRST_PAGE_BITS, allocate_kv
from qbe.sites import SiteTable
from qbe.store import kv_table
from qbe.store.prepare import prepare, store_folder

WINDOW = 4096
EVERY = 8  # tokens, of which one is compared


def page(pool: PagePool, bits: tuple[Any, ...]) -> int:
    """Bytes of a page in bfloat16 at these bits."""
    total = 0
    for shape, of_layer in zip(pool.shapes, bits, strict=True):
        if shape is not None:
            heads = of_layer if isinstance(of_layer, tuple) else (of_layer,) * shape.kv_heads
            total += sum(head_layout(b, shape.key_dim, shape.value_dim, 2).nbytes for b in heads)
    return total


def smaller(pool: PagePool, blueprint: Blueprint, tokens: int, staging_pages: int) -> float:
    """Memory of so many tokens in bfloat16 over that at a blueprint's bits, with so many staging pages beside quantised
    pages."""
    full, first, low = (page(pool, bits) for bits in (
        (FULL_BITS,) * len(blueprint.kv_bits), blueprint.kv_bits_of(0), blueprint.kv_bits
    ))  # fmt: skip
    pages = tokens // PAGE_SIZE
    return pages * full / (first + (pages - 1) * low + (staging_pages * full if low < full else 0))


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
    exact: dict[tuple[int, int], torch.Tensor] = {}
    for what in args.bits.split(","):
        average = float(what.removeprefix("u").removesuffix("-"))
        bits = (int(average),) * table.layers if what.startswith("u") else allocate_kv(table, average)
        first = None if what.startswith("u") or what.endswith("-") else FIRST_PAGE_BITS
        blueprint = Blueprint("kv", (), (), bits, first_kv_bits=first)
        divergences: list[torch.Tensor] = []
        losses = torch.zeros(len(windows), WINDOW - 1)
        for number, (row, of_row) in enumerate(zip(windows, losses, strict=True)):

            def add(
                at: int, logits: torch.Tensor, labels: torch.Tensor = row[1:], out: torch.Tensor = of_row,
                number: int = number, found: list[torch.Tensor] = divergences,
            ) -> None:  # fmt: skip
                own = labels[at : at + len(logits)]
                out[at : at + len(own)] = cross_entropy(logits[: len(own)], own, reduction="none")
                some = logits[-at % EVERY :: EVERY].log_softmax(-1)
                reference = exact.setdefault((number, at), some)
                found.append((reference.exp() * (reference - some)).sum(-1).double())

            score(core, [Scored(row.tolist(), blueprint, 0, add)])
        value, divergence = math.exp(float(losses.double().mean())), torch.cat(divergences)
        rows.append({"bits": what, "average": round(blueprint.average_kv_bits(table), 3), "perplexity": round(value, 4),
                     "excess": round(value / rows[0]["perplexity"] - 1, 6) if rows else 0.0,
                     "kl": float(divergence.mean()), "kl_error": float(divergence.std() / len(divergence) ** 0.5),
                     "smaller": round(smaller(core.pool, blueprint, WINDOW, 1), 3),
                     "smaller_waiting": round(smaller(core.pool, blueprint, WINDOW, 2), 3)})  # fmt: skip
        line = (
            "{bits:>5s} {average:6.2f} bits {perplexity:9.4f} {excess:+9.3%} {kl:9.5f} ±{kl_error:.5f} {smaller:6.2f}x "
            "{smaller_waiting:6.2f}x"
        )
        print(line.format(**rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "windows": len(windows), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
