"""How much an allocation of bits made for one query can save over the best one made for all of them.

    python benchmarks/headroom.py [--model M] [--data DIR] [--limit N] [--lowered 4,6] [--prompt N] [--answer N]
                                  [--keep FILE] [--json FILE]

Every nested site is lowered alone, to the widths of `--lowered`, and the divergence from the 16-bit model is taken for
each query by itself; wider ones count as the last of these times the ratio that the model's sensitivities give. From
these the exact allocation makes an assignment at an average, and the assignment is run: what is reported is the
measured divergence of the whole model.

    static      from the model's own sensitivities, measured on the built-in text: what the policy does
    others      from the mean over the other queries: the best fixed assignment for this traffic
    prompt      from the query's own prompt: the best that a predictor which sees the prompt can hope for
    oracle      from the very tokens that are counted: an upper bound, which no policy can reach
    mixed       `others`, but queries share the average: those that suffer more get more bits
    both        `oracle` with a shared average
    random      drawn, of the same average

Queries: passages of WikiText-2, GSM8K and HumanEval, the last tokens of the prompt and the first ones of the reference
answer, on which divergences are counted. Float32. Sensitivities stay in `--keep`, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from qbe.datasets.intervals import interval, ratio
from qbe.datasets.items import encode, read
from qbe.engine.devices import pick_device
from qbe.policies.allocate import TOLERANCE, solve
from qbe.policies.random import _draw
from qbe.progress import bar
from qbe.sites import SiteTable
from qbe.store.prepare import prepare
from qbe.store.sensitivity import decoder_layers, divergence_of_rows, full_bits, recorded_outputs, replay

ROWS = 64  # of logits at a time


class Queries:
    """Token ids int64 [queries, tokens], padded at the right, and which rows of logits tell of what.

    Args:
        most: tokens of a prompt, and of an answer.
    """

    def __init__(self, items: list, tokenizer: object, most: tuple[int, int]) -> None:
        self.sets = [item.dataset for item in items]
        encoded = [encode(item, tokenizer) for item in items]
        ids = [(e.prompt_ids[-most[0] :], e.reference_ids[: most[1]]) for e in encoded]
        longest = max(len(p) + len(a) for p, a in ids)
        self.tokens = torch.zeros(len(ids), longest, dtype=torch.int64)
        self.parts = torch.zeros(2, *self.tokens.shape, dtype=torch.bool)  # rows of the prompt, of the answer
        for i, (prompt, answer) in enumerate(ids):
            self.tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            self.parts[0, i, : len(prompt) - 1] = True
            self.parts[1, i, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
        self.counts = self.parts.sum(-1).double().numpy()  # [2, queries]

    def split(self, rows: torch.Tensor) -> np.ndarray:
        """Sums over prompt and answer, float64 [2, queries], of numbers for every row."""
        values = rows.view(self.tokens.shape).double()
        return torch.stack([torch.where(part, values, 0.0).sum(-1) for part in self.parts]).numpy()


def divergences(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    found = torch.empty(len(logits))
    for i in range(0, len(logits), ROWS):
        at = slice(i, i + ROWS)
        found[at] = divergence_of_rows(reference[at], reference[at].softmax(-1), logits[at].float())
    return found


@torch.inference_mode()
def sensitivities(
    model: torch.nn.Module, table: SiteTable, queries: Queries, lowered: tuple[int, ...], keep: Path | None
) -> np.ndarray:
    """Divergence summed over the tokens, float64 [sites, gears of `lowered`, 2, queries]."""
    known: dict[str, list] = json.loads(keep.read_text()) if keep and keep.exists() else {}
    with full_bits(model, table) as weights, bar("sites", len(table.nested), sys.stderr.isatty()) as tick:
        layers = decoder_layers(model, table)
        outputs, reference = recorded_outputs(model, layers, queries.tokens)
        for site in table.nested:
            tick()
            if site.name in known:
                continue
            with ExitStack() as stack:
                stack.enter_context(replay(layers[: len(layers) if site.layer is None else site.layer], outputs))
                found = []
                for gear in lowered:
                    weights[site.name].bits = torch.tensor([gear], dtype=torch.int32)
                    logits = model(input_ids=queries.tokens, use_cache=False).logits.flatten(0, 1)
                    found.append(queries.split(divergences(reference, logits)).tolist())
            weights[site.name].bits = torch.tensor([16], dtype=torch.int32)
            known[site.name] = found
            if keep:
                keep.write_text(json.dumps(known))
    return np.array([known[s.name] for s in table.nested])


@torch.inference_mode()
def run(model: torch.nn.Module, table: SiteTable, queries: Queries, reference: torch.Tensor, gears: np.ndarray):
    """Divergence of the answers, float64 [queries], with gears int [sites, queries]."""
    tokens = queries.tokens.shape[1]
    with full_bits(model, table) as weights:
        for site, row in zip(table.nested, gears, strict=True):
            weights[site.name].bits = torch.tensor(row, dtype=torch.int32).repeat_interleave(tokens)
        logits = model(input_ids=queries.tokens, use_cache=False).logits.flatten(0, 1)
        return queries.split(divergences(reference, logits))[1]


def patterns(prompt: np.ndarray, answer: np.ndarray) -> dict[str, float]:
    """How sensitivities [queries, sites] differ between queries, as deviations of logarithms: `of_a_query`, in all, and
    `of_a_site`, its share of a query's; and how alike the latter are for a query's prompt and its answer.
    """

    def parts(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logs = np.log(np.maximum(sums, 1e-30) / sums.mean(0))
        return logs.mean(1), logs - logs.mean(1, keepdims=True)

    (_, shown), (whole, own) = parts(prompt), parts(answer)
    alike = float(np.corrcoef(shown.ravel(), own.ravel())[0, 1])
    return {"of_a_query": float(whole.std()), "of_a_site": float(own.std()), "prompt_and_answer": alike}


def best(costs: np.ndarray, gears: tuple[int, ...], sizes: list[int], bits: float) -> tuple[int, ...]:
    """The exact allocation of costs [sites, gears]."""
    rows = [dict(zip(gears, row, strict=True)) for row in costs]
    found = solve(rows, sizes, bits, bits - TOLERANCE) or solve(rows, sizes, bits)
    assert found is not None
    return found


def shared(costs: np.ndarray, gears: tuple[int, ...], sizes: np.ndarray, tokens: np.ndarray, bits: float) -> np.ndarray:
    """Gears [sites, queries] of least total cost whose average over sites and tokens is at most `bits`.

    Args:
        costs: [queries, sites, gears], summed over each query's tokens.
    """
    widths, weight = np.array(gears), sizes / sizes.sum()

    def at(price: float) -> tuple[np.ndarray, float]:
        paid = price * tokens[:, None, None] * (weight[:, None] * widths)[None]
        chosen = widths[(costs + paid).argmin(-1)]
        return chosen.T, float((chosen @ weight) @ tokens / tokens.sum())

    low, high = -30.0, 10.0  # logarithms of the price of a bit
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(np.exp(middle))[1] > bits else (low, middle)
    return at(np.exp(high))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("QBE_DATA", "../shared/data")))
    parser.add_argument("--limit", type=int, default=8, help="queries of each data set")
    parser.add_argument("--bits", default="4.5,5,6")
    parser.add_argument("--lowered", default="4,6", help="widths at which sites are lowered alone")
    parser.add_argument("--prompt", type=int, default=96, help="tokens")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    prepared = prepare(args.model, dtype="float32", device=pick_device("cpu"), progress=True)
    model, table = prepared.model.eval(), prepared.table
    queries = Queries(read(("text", "gsm8k", "humaneval"), args.data, args.limit), prepared.tokenizer,
                      (args.prompt, args.answer))  # fmt: skip
    lowered = tuple(map(int, args.lowered.split(",")))
    measured = sensitivities(model, table, queries, lowered, args.keep)

    gears = tuple(g for g in table.gears() if g < 16)
    own = np.array([[max(s.sensitivity[g], 0.0) for g in gears] for s in table.nested])  # [sites, gears]
    last = len(lowered) - 1
    wider = own[:, last + 1 :] / np.maximum(own[:, last : last + 1], 1e-12)
    whole = np.concatenate([measured, measured[:, -1:] * wider[:, :, None, None]], 1)  # every gear below 16
    prompt, answer = whole.transpose(2, 3, 0, 1)  # each [queries, sites, gears]
    tokens = queries.counts[1]
    n = len(tokens)
    per_token = answer / tokens[:, None, None]
    differ = patterns(prompt[..., 0] / queries.counts[0][:, None], per_token[..., 0])
    print("deviations between queries:", {k: round(v, 3) for k, v in differ.items()}, flush=True)
    sizes = np.array([s.parameters for s in table.nested])
    others = [answer[np.arange(n) != q].sum(0) / tokens[np.arange(n) != q].sum() for q in range(n)]
    with torch.inference_mode(), full_bits(model, table):
        reference = model(input_ids=queries.tokens, use_cache=False).logits.flatten(0, 1).float()

    def each(costs: Callable[[int], np.ndarray], bits: float) -> np.ndarray:
        return np.array([best(costs(q), gears, list(sizes), bits) for q in range(n)]).T

    def mixed(bits: float) -> np.ndarray:
        """Of the assignments of `others` at a ladder of averages, one for each query under a shared average."""
        ladder = [a for a in np.arange(gears[0], gears[-1] + 0.01, 0.25) if a >= gears[0]]
        rungs = np.array([each(lambda q: others[q], a) for a in ladder])  # [rungs, sites, queries]
        at = np.array(gears).searchsorted(rungs)
        cost = np.array([[answer[q, np.arange(len(sizes)), at[r, :, q]].sum() for r in range(len(ladder))]
                         for q in range(n)])  # fmt: skip
        averages = np.einsum("rsq,s->qr", rungs, sizes / sizes.sum())
        low, high = -30.0, 10.0
        for _ in range(60):
            middle = (low + high) / 2
            chosen = (cost + np.exp(middle) * tokens[:, None] * averages).argmin(-1)
            over = averages[np.arange(n), chosen] @ tokens / tokens.sum() > bits
            low, high = (middle, high) if over else (low, middle)
        chosen = (cost + np.exp(high) * tokens[:, None] * averages).argmin(-1)
        return np.array([rungs[chosen[q], :, q] for q in range(n)]).T

    rows = []
    draw = np.random.default_rng(0)
    for bits in map(float, args.bits.split(",")):
        ways = {
            "static": each(lambda _: own, bits),
            "others": each(lambda q: others[q], bits),
            "prompt": each(lambda q: prompt[q], bits),
            "oracle": each(lambda q: per_token[q], bits),
            "mixed": mixed(bits),
            "both": shared(answer, gears, sizes, tokens, bits),
            "random": np.array([_draw(table, bits, draw) for _ in range(n)]).T,
        }
        kl = {way: run(model, table, queries, reference, chosen) for way, chosen in ways.items()}
        for way, chosen in ways.items():
            average = float((sizes / sizes.sum()) @ chosen @ tokens / tokens.sum())
            at = np.array(gears).searchsorted(chosen)[..., None]
            linear = np.take_along_axis(per_token.transpose(1, 0, 2), at, 2).sum((0, 2))  # by query
            row = {
                "bits": bits, "way": way, "average_bits": average, "n": n, "tokens": int(tokens.sum()),
                "kl": float(kl[way].sum() / tokens.sum()), "summed": float((linear * tokens).sum() / tokens.sum()),
                "over_others": float(ratio(kl[way], kl["others"])), "interval": interval(kl[way], kl["others"]),
                "over_static": float(ratio(kl[way], kl["static"])), "interval_static": interval(kl[way], kl["static"]),
            }  # fmt: skip
            for name in dict.fromkeys(queries.sets):
                of = np.array([s == name for s in queries.sets])
                row[f"over_others_{name}"] = float(ratio(kl[way][of], kl["others"][of]))
            rows.append(row)
            low, high = row["interval"] or (0, 0)
            print(
                f"{bits:4g} {way:8s} {average:6.3f} bits  KL {row['kl']:.5f} (sites' sum {row['summed']:.5f})  "
                f"{row['over_others']:.3f} of `others` ({low:.3f} to {high:.3f})  {row['over_static']:.3f} of `static`",
                flush=True,
            )
        if args.json:
            about = {"model": args.model, "datasets": queries.sets, "prompt": args.prompt, "answer": args.answer,
                     "lowered": lowered, "deviations": differ}  # fmt: skip
            args.json.write_text(json.dumps({"conditions": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
