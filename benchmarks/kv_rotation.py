"""What the KV cache's precisions cost: perplexity and divergence from 16 bits, with and without rotation.

    python benchmarks/kv_rotation.py [--model NAME] [--data DIR] [--window N] [--tokens N] [--kinds ...] [--json FILE]

Text: WikiText-2's test split from `--data` (default $QBE_DATA or ../shared/data), float32, weights at 16 bits. Every
token sees its own page at 16 bits and the pages before it as they are quantised, as in the engine; pages are quantised
and read by the reference (`qbe.kernels.reference.kv_pages`). `keys` and `values` say which of the two are quantised.
Without rotation the same format holds the numbers as they are; no kernel reads that, it is here for comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from qbe.format.kv_blocks import PAGE_SIZE
from qbe.kernels.reference import kv_pages as reference
from qbe.kernels.reference.rotation import rotate
from qbe.models import load_model
from qbe.sites import TURBO, TURBO_KINDS, kv_number_bits

ROWS = 256  # queries at a time


def quantised_keys(keys: torch.Tensor, kind: int, rotated: bool) -> torch.Tensor:
    """Keys `[heads, n, dim]`, n a number of full pages, as they come back from quantised pages."""
    out = torch.empty_like(keys)
    for page, to in zip(_pages(keys), _pages(out), strict=True):
        x, bits = rotate(page) if rotated else page, kv_number_bits(kind)
        if kind > TURBO:
            codes, *scales = reference.turbo_keys(x, bits)
            x = reference.turbo_numbers(codes, *scales, bits)
        else:
            codes, scale, low = reference.quantise(x.T, bits)
            x = (codes * scale.float()[:, None] + low.float()[:, None]).T
        to.copy_(rotate(x) if rotated else x)
    return out


def quantised_values(values: torch.Tensor, kind: int, rotated: bool) -> torch.Tensor:
    """The same for values."""
    x = rotate(values) if rotated else values
    codes, scale, low = reference.quantise(x.flatten(0, 1), kv_number_bits(kind))
    x = (codes * scale.float()[:, None] + low.float()[:, None]).view_as(values)
    return rotate(x) if rotated else x


def _pages(x: torch.Tensor) -> list[torch.Tensor]:
    return [page for head in x for page in head.split(PAGE_SIZE)]


class Cache:
    """An attention function of transformers that sees earlier pages quantised."""

    def __init__(self) -> None:
        self.kind, self.parts, self.rotated = 16, "", True

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        scaling: float, dropout: float = 0.0, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """query `[1, heads, n, dim]`, causal."""
        keys, values, n = key[0], value[0], key.shape[2]
        full = n // PAGE_SIZE * PAGE_SIZE
        seen = [keys, values]
        for i, (part, quantise) in enumerate((("keys", quantised_keys), ("values", quantised_values))):
            if self.kind != 16 and part in self.parts:
                seen[i] = torch.cat([quantise(seen[i][:, :full], self.kind, self.rotated), seen[i][:, full:]], 1)
        group = query.shape[1] // keys.shape[0]
        rows = query[0].view(keys.shape[0], group, n, -1) * scaling
        out = []
        for begin in range(0, n, ROWS):
            end = min(n, begin + ROWS)
            q, at, to = rows[:, :, begin:end].flatten(1, 2), torch.arange(begin, end), torch.arange(end)
            own = (at[:, None] // PAGE_SIZE == to // PAGE_SIZE)[:, begin:].repeat(group, 1)
            scores = q @ seen[0][:, :end].transpose(1, 2)
            scores[:, :, begin:] = torch.where(own, q @ keys[:, begin:end].transpose(1, 2), scores[:, :, begin:])
            weights = scores.masked_fill_((to > at[:, None]).repeat(group, 1), -math.inf).softmax(-1)
            near = torch.where(own, weights[:, :, begin:], 0.0)
            weights[:, :, begin:] -= near
            y = weights @ seen[1][:, :end] + near @ values[:, begin:end]
            out.append(y.view(keys.shape[0], group, end - begin, -1).flatten(0, 1))
        return torch.cat(out, 1).transpose(0, 1)[None], None


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kinds", nargs="+", default=["4", "2", "turbo4", "turbo2"])
    parser.add_argument("--parts", nargs="+", default=["keys", "values", "keys and values"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    loaded, cache = load_model(args.model, dtype="float32"), Cache()
    model = loaded.model
    AttentionInterface.register("quantised", cache)
    model.config._attn_implementation = "quantised"
    ids = loaded.tokenizer((args.data / "wikitext2_test.txt").read_text()[: 8 * args.tokens])["input_ids"]
    windows = torch.tensor(ids[: args.tokens // args.window * args.window]).view(-1, args.window)
    full, rows = [], []

    def report(what: str) -> None:
        loss = divergence = 0.0
        for i, row in enumerate(windows):
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            loss -= float(logits.gather(1, row[1:, None]).sum())
            if len(full) == i:
                full.append(logits)
            for own, other in zip(full[i].split(ROWS), logits.split(ROWS), strict=True):
                divergence += float((own.exp() * (own - other)).sum())
        count = windows.numel() - len(windows)
        rows.append({"what": what, "perplexity": round(math.exp(loss / count), 4), "kl": round(divergence / count, 6)})
        print(f"{what:36s} perplexity {rows[-1]['perplexity']:9.3f}  KL {rows[-1]['kl']:.5f} nats a token", flush=True)

    report("16")
    for parts in args.parts:
        for name in args.kinds:
            cache.kind, cache.parts = TURBO_KINDS.get(name) or int(name), parts
            for cache.rotated in (False, True):
                if cache.rotated or cache.kind < TURBO:
                    report(f"{parts}, {name}{'' if cache.rotated else ', not rotated'}")
    if args.json:
        found = {"model": args.model, "window": args.window, "tokens": windows.numel(), "rows": rows}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
