"""The best fixed assignment over uniform bits of the same average, by sensitivities as they are estimated and as
`qbe quantize` corrects them.

    qbe quantize ZOO/dense-tiny -o dense-tiny-qbe
    python benchmarks/static_over_uniform.py --model dense-tiny-qbe --text ZOO/validation.txt --json dense-tiny.json

Ratios of divergences from 16 bits on passages of the text, which neither estimates nor the check have read, with 95 %
bootstrap intervals over the passages, in float32. Between two gears uniform bits are the mean of both, each by the
share of tokens that would run at it. `--plant` multiplies each site's sensitivities by a number from 1/100 to 100
before they are checked, so that one sees a bad table being corrected.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from qbe.allocation.knapsack import allocate
from qbe.engine.devices import pick_device
from qbe.errors import QBEError
from qbe.store.allocation_check import Measurements, checked, interval
from qbe.store.estimating import estimate_model
from qbe.store.measure import with_measured
from qbe.store.mixtures import Mixtures
from qbe.store.prepare import prepare
from qbe.store.sensitivity import Measured, Sensitivity

COLUMNS = "bits", "sensitivities", "divergence", "uniform", "ratio", "low", "high"


def passages(tokenizer: object, text: Path, count: int, tokens: int) -> torch.Tensor:
    """int64 [count, tokens], spread over the text."""
    ids = tokenizer(text.read_text(), add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[operator]
    if len(ids) < count * tokens:
        raise QBEError(f"{text} has {len(ids)} tokens; give a text of at least {count * tokens}")
    return torch.tensor([ids[i * (len(ids) // count) :][:tokens] for i in range(count)])


def planted(weights: Measured, seed: int) -> Measured:
    """The sensitivities, each site's multiplied by a number that is log-uniform from 1/100 to 100."""
    draw = np.random.default_rng(seed)
    return {
        name: {g: kl * f for g, kl in of.items()} for name, of in weights.items() for f in [10 ** draw.uniform(-2, 2)]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder that qbe quantize wrote, or a 16-bit model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", default="4,4.5,5,5.5,6,7,8", help="averages over nested sites")
    parser.add_argument("--passages", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--plant", type=int, help="seed of planted errors")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, shown = pick_device(args.device), sys.stderr.isatty()
    prepared = prepare(args.model, device=torch.device("cpu"))
    model, tokenizer, table = prepared.model, prepared.tokenizer, prepared.table
    raw, _, _ = estimate_model(model, tokenizer, table, device, progress=shown)
    if args.plant is not None:
        raw = replace(raw, weights=planted(raw.weights, args.plant))
    if args.plant is not None or prepared.folder is None or not _has_check(prepared.folder):
        found: Sensitivity = checked(model, tokenizer, table, raw, device, progress=shown)
        table = with_measured(table, found)
    tables = {"before": table.with_sensitivity(raw.weights), "after": table}
    sizes, fixed = float(table.reads.sizes.sum()), 16 * table.reads.fixed
    averages = [(float(b) * sizes + fixed) / table.reads.weights for b in args.bits.split(",")]
    assignments = {(b, n): allocate(t, b, {}) for b in averages for n, t in tables.items()}
    text = passages(tokenizer, args.text, args.passages, args.tokens)
    known = Measurements(table, Mixtures(model, table, text, device).divergences)
    known.add([*map(known.everywhere, known.gears), *assignments.values()])
    rows = []
    for (bits, name), assignment in assignments.items():
        uniform = known.uniform(table.reads.average_bits(assignment))
        low, high = interval(known.rows[assignment], uniform)
        own, other = float(known.rows[assignment].mean()), float(uniform.mean())
        rows.append(dict(zip(COLUMNS, (bits, name, own, other, own / other, low, high), strict=True)))
    shown_as = Table(box=None)
    for column in COLUMNS:
        shown_as.add_column(column)
    for row in rows:
        shown_as.add_row(*(v if isinstance(v, str) else f"{v:.4g}" for v in row.values()))
    Console().print(shown_as)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"model": args.model, "passages": list(text.shape), "rows": rows}, indent=1) + "\n"
        )


def _has_check(folder: Path) -> bool:
    from qbe.store import sensitivity_table

    found = sensitivity_table.read(folder)
    return found is not None and found.check is not None


if __name__ == "__main__":
    main()
