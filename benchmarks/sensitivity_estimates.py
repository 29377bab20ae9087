"""How close sensitivities from gradients come to measured ones: rank correlation of every column, and what static
assignments made of either cost on another text.

    python benchmarks/sensitivity_estimates.py --model smollm2-135m-instruct --text README.md --json estimates.json

Both are made in float32 of the same store. The last rows are the divergence of whole assignments (`static` policy) from
the 16-bit model on the text, in nats per token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from scipy.stats import spearmanr

from qbe.engine.devices import pick_device
from qbe.errors import QBEError
from qbe.policies.allocate import allocate
from qbe.sites import FULL_BITS, SiteTable
from qbe.store import sensitivity
from qbe.store.estimating import estimate_model
from qbe.store.measure import measure_kv, measure_model, with_measured
from qbe.store.prepare import PreparedModel, prepare

BITS = (4.5, 5.0, 6.0)


def columns(table: SiteTable) -> dict[str, list[float]]:
    """Column -> a number for every site, or key head, that has it."""
    found: dict[str, list[float]] = {}
    for site in table.nested:
        told = {f"weights {g}": kl for g, kl in site.sensitivity.items() if g < FULL_BITS}
        told |= {f"activations {g}": kl for g, kl in site.activation_sensitivity.items() if g < FULL_BITS}
        for of, kl in (told | dict(site.native_sensitivity)).items():
            found.setdefault(of, []).append(kl)
    for head in table.kv:
        for bits in (4, 2):
            found.setdefault(f"KV {bits}", []).append(head.sensitivity[bits])
    return found


def windows(prepared: PreparedModel, text: Path, count: int, tokens: int) -> torch.Tensor:
    """int64 [count, tokens], spread over the text."""
    ids = prepared.tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    if len(ids) < count * tokens:
        raise QBEError(f"{text} has {len(ids)} tokens; give a text of at least {count * tokens}")
    step = len(ids) // count
    return torch.tensor([ids[i * step : i * step + tokens] for i in range(count)])


@torch.inference_mode()
def cost(
    prepared: PreparedModel, table: SiteTable, tokens: torch.Tensor, assignments: list[tuple[int, ...]]
) -> list[float]:
    """Divergence of each assignment from 16 bits."""
    totals = [0.0] * len(assignments)
    with sensitivity.full_bits(prepared.model, table) as weights:
        for window in tokens:
            row = window[None]
            for weight in weights.values():
                weight.set_bits(FULL_BITS)
            reference = sensitivity.logits_of(prepared.model, row).float()
            p = reference.softmax(-1)
            for i, gears in enumerate(assignments):
                for site, gear in zip(table.nested, gears, strict=True):
                    weights[site.name].set_bits(gear)
                totals[i] += sensitivity.divergence(reference, p, sensitivity.logits_of(prepared.model, row))
    return [t / len(tokens) for t in totals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--measured", action="store_true", help="measure anew, and say how long that takes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prepared = prepare(args.model, dtype="float32", device=pick_device("cpu"))
    model, tokenizer, table = prepared.model, prepared.tokenizer, prepared.table
    out: dict[str, object] = {"model": args.model}
    if args.measured or not table.measured or not table.kv_measured:
        began = time.perf_counter()
        found = measure_model(model, tokenizer, table, progress=sys.stderr.isatty())
        table = with_measured(table, found)
        out["seconds_measuring"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        table = table.with_kv(measure_kv(model, tokenizer, table, progress=sys.stderr.isatty()))
        out["seconds_measuring_kv"] = round(time.perf_counter() - began, 1)
    began = time.perf_counter()
    guess, kv = estimate_model(model, tokenizer, table, pick_device("cpu"), progress=sys.stderr.isatty())
    out["seconds_estimating"] = round(time.perf_counter() - began, 1)
    guessed = with_measured(table, guess).with_kv(kv)
    known, new = columns(table), columns(guessed)
    out["spearman"] = {c: round(float(spearmanr(known[c], new[c])[0]), 4) for c in known if c in new}
    out["sum_over_measured"] = {c: round(sum(new[c]) / sum(known[c]), 3) for c in known if c in new}
    out["difficult_entropy"] = [table.difficult_entropy, guessed.difficult_entropy]
    tokens = windows(prepared, args.text, args.windows, args.tokens)
    pairs = [allocate(t, bits, {}) for bits in BITS for t in (table, guessed)]
    kls = cost(prepared, table, tokens, pairs)
    out["static"] = {
        str(bits): {"measured": kls[2 * i], "estimated": kls[2 * i + 1], "ratio": round(kls[2 * i + 1] / kls[2 * i], 4)}
        for i, bits in enumerate(BITS)
    }
    print(json.dumps(out, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
