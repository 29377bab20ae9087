"""Perplexity of a model read from its nested store, against 16 bits and against independent rounding.

    python benchmarks/perplexity.py [--model NAME] [--data DIR] [--tokens N] [--json FILE]

Text: WikiText-2's test split from `--data` (default $QBE_DATA or ../shared/data), windows of 1024 tokens, float32.
Beside the perplexity stands the KL divergence from the 16-bit model, which a few thousand tokens tell far more exactly.
`rounded` quantises each matrix on its own to that width (round to nearest, asymmetric, group 64), which is what a
nested read competes with. Mind that SmolLM2's GGUF lies on a 4-bit grid at group 32.

Activations of 8 bits are those of the references: `int8/group` is what every kernel does, `e4m3/row` and `int8/row`
(both sides of the product) are what a GPU can do with a long prompt. `chosen` sites are those that a blueprint gives 8,
`native` ones those where such a GPU multiplies that way; activations have 16 bits at the others. The second divergence
is from the same weights with 16-bit activations: what 8-bit ones cost.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from qbe import Budget, policies
from qbe.analysis.profile import QueryProfile
from qbe.kernels.reference.activations import EIGHT, eight_bits
from qbe.store.native_products import multiplied_in
from qbe.store.nested_linears import nested_linears
from qbe.store.nested_tensor import NestedTensor
from qbe.store.prepare import prepare

Nested = list[tuple[str, torch.nn.Linear, NestedTensor]]
WINDOW = 1024
HEAD = "lm_head"
NATIVE = {"e4m3/row": "fp8_e4m3", "int8/row": "int8"}


@torch.inference_mode()
def measure(model: torch.nn.Module, windows: torch.Tensor, *references: list[torch.Tensor]) -> tuple[float, ...]:
    """Perplexity on tokens 1.. of each window, and the mean KL divergence, nats per token, from each of `references`.

    A call fills those that are empty with its log probabilities, float32 [1023, vocabulary] a window.
    """
    loss, divergences = 0.0, [0.0] * len(references)
    for i, row in enumerate(windows):
        logs = model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        loss += float(torch.nn.functional.nll_loss(logs, row[1:], reduction="sum"))
        for at, reference in enumerate(references):
            if i == len(reference):
                reference.append(logs)
            for now, before in zip(logs.split(128), reference[i].split(128), strict=True):
                divergences[at] += float((before.exp() * (before - now)).sum())
    count = windows.numel() - len(windows)
    return math.exp(loss / count), *(d / count for d in divergences)


def rounded(weight: torch.Tensor, bits: int, group: int = 64) -> torch.Tensor:
    """Independent asymmetric round-to-nearest at one width."""
    n, k = weight.shape
    g = torch.nn.functional.pad(weight, (0, -k % group)).view(n, -1, group)
    low, high = g.amin(-1, True).clamp_max(0), g.amax(-1, True).clamp_min(0)
    scale = (high - low).clamp_min(1e-20) / (2**bits - 1)
    zero = (-low / scale).round()
    return ((((g / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale).view(n, -1)[:, :k]


@contextmanager
def eight_bit_activations(nested: Nested, form: str, at: Callable[[str], bool]) -> Iterator[None]:
    """Inside, the layers whose names `at` takes multiply 8-bit activations in this form."""

    with ExitStack() as changed:
        for name, layer, weight in nested:
            if at(name):
                rounded_in = multiplied_in(layer, NATIVE[form]) if form in NATIVE else _rounded_by_group(layer, weight)
                changed.enter_context(rounded_in)
        yield


@contextmanager
def _rounded_by_group(layer: torch.nn.Linear, weight: NestedTensor) -> Iterator[None]:
    def rounding(_layer: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        return eight_bits(args[0], weight.group_size)

    hook = layer.register_forward_pre_hook(rounding)
    try:
        yield
    finally:
        hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    prepared = prepare(args.model, dtype="float32", device=torch.device("cpu"))
    model, table = prepared.model, prepared.table
    ids = prepared.tokenizer((args.data / "wikitext2_test.txt").read_text()[: 8 * args.tokens])["input_ids"]
    windows = torch.tensor(ids[: args.tokens // WINDOW * WINDOW]).view(-1, WINDOW)
    nested = nested_linears(model)
    reference: list[torch.Tensor] = []
    own: list[torch.Tensor] = []  # the same of the last row with 16-bit activations
    rows: list[dict[str, Any]] = []

    def report(what: str, bits: float, activations: str = "16 bits") -> None:
        full = activations == "16 bits"
        if full:
            own.clear()
        value, divergence, eight = measure(model, windows, reference, own)
        row = {"what": what, "bits": round(bits, 3), "activations": activations, "perplexity": round(value, 4)}
        before = value if full else next(r["perplexity"] for r in reversed(rows) if r["activations"] == "16 bits")
        row |= {"excess": round(value / (rows[0]["perplexity"] if rows else value) - 1, 5), "kl": round(divergence, 6)}
        row |= {"activations_excess": round(value / before - 1, 5), "activations_kl": round(eight, 6)}
        rows.append(row)
        line = f"{what:10s} {bits:5.2f} bits  {activations:28s} {value:8.3f}  {row['excess']:+8.2%}  {divergence:.5f}"
        line += "" if full else f"  8 bits alone {row['activations_excess']:+8.2%}  {eight:.5f}"
        print(line, flush=True)

    def run_at(gears: tuple[int, ...]) -> None:
        for (_, _, weight), gear in zip(nested, gears, strict=True):
            weight.bits = torch.tensor([gear], dtype=torch.int32)

    def where(form: str) -> tuple[str, set[str]]:
        """What the sites are called that have this form in a model that runs, and their names."""
        if form in NATIVE:
            return "native", {s.name for s, n in zip(table.nested, table.native(NATIVE[form]), strict=True) if n}
        return "chosen", {s.name for s, b in zip(table.nested, table.activations(EIGHT), strict=True) if b == EIGHT}

    def report_eight(what: str, bits: float) -> None:
        for form in ("int8/group", *NATIVE):
            called, names = where(form)
            share = sum(s.parameters for s in table.nested if s.name in names) / table.nested_parameters
            places: dict[str, Callable[[str], bool]] = {
                "all but head": lambda name: name != HEAD, f"{called} {len(names)}, {share:.0%}": names.__contains__,
            }  # fmt: skip
            for place, at in places.items():
                with eight_bit_activations(nested, form, at):
                    report(what, bits, f"{form} {place}")

    run_at((16,) * len(nested))
    report("16 bits", 16)
    report_eight("16 bits", 16)
    with eight_bit_activations(nested, "int8/group", lambda name: name == HEAD):
        report("16 bits", 16, "int8/group head only")
    for bits in (8, 6, 4):
        run_at((bits,) * len(nested))
        report("nested", bits)
    tiered = policies.load("tiered")
    for bits in (6.0, 5.0, 4.5):
        blueprint = tiered.blueprint(QueryProfile(0.5, "question_answering", 2), Budget(bits=bits), table)
        run_at(blueprint.weight_bits)
        report("tiered", blueprint.average_weight_bits(table))
        report_eight("tiered", blueprint.average_weight_bits(table))
    run_at((16,) * len(nested))
    kept = {name: weight.original for name, _, weight in nested}
    for bits in (6, 4):
        for name, _, weight in nested:
            weight.original = rounded(kept[name], bits)
        report("rounded", bits)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "tokens": windows.numel(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
