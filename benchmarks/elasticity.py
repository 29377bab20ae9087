"""What it costs to read many precisions from one store: calibrated nested codes against GPTQ at each width alone.

    python benchmarks/elasticity.py MODEL [--data DIR] [--peer DIR] [--keep DIR | --store DIR] [--windows N]
                                    [--calibration N] [--slices 3,1,1,1,2] [--only WHAT,...] [--json FILE]

MODEL is a folder in float32 or bf16 (benchmarks/rotated.py makes one of SmolLM2); `--peer` is what
benchmarks/gptq_peer.py wrote of the same folder. Calibration: the first windows of WikiText-2's validation split; the
numbers are of its test split, windows of 1024 tokens, float32, group 64. The output head keeps 16 bits everywhere,
because the peer leaves it alone. Results of single sites stay in `--keep`, so that an interrupted run goes on; with
`--store`, what `qbe quantize MODEL -o STORE --calibrate` made is measured as `calibrated`, and nothing is calibrated.

    rounded      each matrix on its own at that width, round to nearest
    gptq         the peer, on its own at that width
    nested       one store, plainly rounded, scales refitted: what a store without calibration reads
    smoothed     the same after smoothing, as `qbe quantize` makes it without a text
    calibrated   smoothed, codes and scales chosen on the text: `qbe quantize --calibrate`

Where the peer was measured at a width, what comes after it is held against it: its excess perplexity over the peer's,
its divergence over the peer's, and the 95 % interval (bootstrap over windows) of the difference of the logarithms of
the perplexities.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from perplexity import measure, rounded
from safetensors.torch import load_file

from qbe.models import load_model, pull
from qbe.sites import Role
from qbe.store.calibrate import calibrate
from qbe.store.checkpoint import attach
from qbe.store.nested_linears import NestedWeightConfig, nest, nested_linears
from qbe.store.nesting import nestable, smooth_model
from qbe.tagger import tag

WINDOW = 1024
WHAT = ("rounded", "gptq", "nested", "smoothed", "calibrated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--calibration", type=int, default=32)
    parser.add_argument("--slices", default="3,1,1,1,2")
    parser.add_argument("--only", default=",".join(WHAT))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = NestedWeightConfig(slices=tuple(map(int, args.slices.split(","))))
    widths = [sum(config.slices[: i + 1]) for i in range(len(config.slices))]
    path, references, rows, only = pull(args.model), [], [], args.only.split(",")
    by_window: dict[tuple[str, int], np.ndarray] = {}

    def text(tokenizer, split: str, windows: int) -> torch.Tensor:
        ids = tokenizer((args.data / f"wikitext2_{split}.txt").read_text()[: 8 * WINDOW * windows])["input_ids"]
        return torch.tensor(ids[: WINDOW * windows]).view(-1, WINDOW)

    def report(what: str, bits: int, model: torch.nn.Module) -> None:
        losses, divergence = [], 0.0
        for i, window in enumerate(test):
            if i == len(references):
                references.append([])
            value, kl = measure(model, window[None], references[i])
            losses.append(math.log(value))
            divergence += kl / len(test)
        by_window[what, bits] = np.array(losses)
        row = {"what": what, "bits": bits, "perplexity": math.exp(np.mean(losses)), "kl": divergence,
               "excess": excess(what, bits)}  # fmt: skip
        peer = next((r for r in rows if (r["what"], r["bits"]) == ("gptq", bits)), None)
        if peer is not None:
            apart = by_window[what, bits] - by_window["gptq", bits]
            drawn = np.random.default_rng(0).integers(0, len(apart), (4000, len(apart)))
            row["over_gptq"] = {
                "excess": row["excess"] / peer["excess"],
                "kl": divergence / peer["kl"],
                "difference": np.percentile(apart[drawn].mean(1), (2.5, 97.5)).tolist(),
            }
        rows.append(row)
        beside = "   over GPTQ's: excess {excess:.2f} ({difference[0]:+.2%} to {difference[1]:+.2%}), KL {kl:.3f}"
        print(f"{what:10s} {bits:2d} bits {row['perplexity']:9.3f} {row['excess']:+8.2%}  KL {divergence:.5f}"
              + (beside.format(**row["over_gptq"]) if peer else ""), flush=True)  # fmt: skip
        if args.json:
            args.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")

    def excess(what: str, bits: int) -> float:
        return math.expm1(np.mean(by_window[what, bits] - by_window["16 bits", 16]))

    def with_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        for name in names:
            model.get_submodule(name).weight.copy_(weights[name])

    loaded = load_model(path, dtype="float32")
    table = tag(loaded.model)
    heads = {s.name for s in table if s.role is Role.OUTPUT_HEAD}
    names = [n for n in nestable(table) if n not in heads]
    test = text(loaded.tokenizer, "test", args.windows)
    conditions = {"model": args.model, "test_tokens": test.numel(), "calibration_tokens": args.calibration * WINDOW,
                  "slices": config.slices, "group_size": config.group_size}  # fmt: skip
    with torch.inference_mode():
        report("16 bits", 16, loaded.model)
        own = {n: loaded.model.get_submodule(n).weight.clone() for n in names}
        for bits in widths:
            if "rounded" in only:
                with_weights(loaded.model, {n: rounded(w, bits) for n, w in own.items()})
                report("rounded", bits, loaded.model)
            if "gptq" in only and args.peer and (file := args.peer / f"{bits}.safetensors").is_file():
                with_weights(loaded.model, load_file(file))
                report("gptq", bits, loaded.model)
    for what in WHAT[2:]:
        if what not in only:
            continue
        loaded = load_model(path, dtype="float32")
        began = time.monotonic()
        stored = args.store is not None and what == "calibrated"
        if what != "nested" and not stored:
            smooth_model(loaded.model, loaded.tokenizer, config, progress=True)
        if stored:
            attach(loaded.model, args.store)
        elif what == "calibrated":
            tokens = text(loaded.tokenizer, "valid", args.calibration)
            calibrate(loaded.model, names, tokens, config, args.keep, progress=True)
        else:
            nest(loaded.model, names, config)
        print(f"{what}: made in {time.monotonic() - began:.0f} s", flush=True)
        for bits in widths:
            for name, _, weight in nested_linears(loaded.model):
                if name in names:
                    weight.bits = torch.tensor([bits], dtype=torch.int32)
            report(what, bits, loaded.model)


if __name__ == "__main__":
    main()
