"""What 8-bit activations cost in perplexity, with an interval: much text, each window with and without.

    python benchmarks/activation_perplexity.py [--model NAME] [--data DIR] [--tokens N] [--bits 16,5] [--json FILE]

Text: WikiText-2's test split from `--data` (default $QBE_DATA or ../shared/data), windows of 1024 tokens, float32, on a
CPU. Forms and sites are those of `benchmarks/perplexity.py`: `int8/group` where a blueprint gives 8 bits, `e4m3/row`
and `int8/row` where a GPU multiplies a long prompt so. Intervals are of 95 %, from the windows' differences.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path

import torch
from perplexity import NATIVE, WINDOW, eight_bit_activations

from qbe import Budget, policies
from qbe.analysis.profile import QueryProfile
from qbe.kernels.reference.activations import EIGHT
from qbe.progress import bar
from qbe.sites import FULL_BITS
from qbe.store.nested_linears import nested_linears
from qbe.store.prepare import prepare

FORMS = ("int8/group", *NATIVE)


@torch.inference_mode()
def loss(model: torch.nn.Module, row: torch.Tensor) -> float:
    """Nats per token of a window's tokens 1.., int64 [1024]."""
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, row[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--tokens", type=int, default=40960)
    parser.add_argument("--bits", default="16,5", help="of the weights: 16, or an average that `tiered` gives")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    prepared = prepare(args.model, dtype="float32", device=torch.device("cpu"))
    model, table = prepared.model, prepared.table
    ids = prepared.tokenizer((args.data / "wikitext2_test.txt").read_text()[: 8 * args.tokens])["input_ids"]
    windows = torch.tensor(ids[: args.tokens // WINDOW * WINDOW]).view(-1, WINDOW)
    nested = nested_linears(model)
    eight = {s.name for s, bits in zip(table.nested, table.activations(EIGHT), strict=True) if bits == EIGHT}
    sites = {"int8/group": eight} | {
        form: {s.name for s, native in zip(table.nested, table.native(name), strict=True) if native}
        for form, name in NATIVE.items()
    }
    rows = []
    for bits in map(float, args.bits.split(",")):
        if bits == FULL_BITS:
            gears: tuple[int, ...] = (FULL_BITS,) * len(nested)
        else:
            profile = QueryProfile(0.5, "question_answering", 2)
            gears = policies.load("tiered").blueprint(profile, Budget(bits=bits), table).weight_bits
        for (_, _, weight), gear in zip(nested, gears, strict=True):
            weight.bits = torch.tensor([gear], dtype=torch.int32)
        plain: list[float] = []
        differences: dict[str, list[float]] = {form: [] for form in FORMS}
        with bar(f"{bits:g} bits", len(windows), True) as tick:
            for row in windows:
                plain.append(loss(model, row))
                for form in FORMS:
                    with eight_bit_activations(nested, form, sites[form].__contains__):
                        differences[form].append(loss(model, row) - plain[-1])
                tick()
        for form, found in differences.items():
            mean, half = statistics.mean(found), 1.96 * statistics.stdev(found) / math.sqrt(len(found))
            low, middle, high = (math.expm1(x) for x in (mean - half, mean, mean + half))
            rows.append({
                "weights": bits, "form": form, "sites": len(sites[form]), "tokens": windows.numel(),
                "perplexity": math.exp(statistics.mean(plain)), "excess": middle, "interval": [low, high],
            })  # fmt: skip
            line = f"{bits:4g} bits  {form:10s} at {len(sites[form]):3d} sites  {middle:+.3%}"
            print(f"{line}  ({low:+.3%} to {high:+.3%})", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
