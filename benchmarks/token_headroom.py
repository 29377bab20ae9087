"""How much bits chosen for each token could save over the best ones for all tokens, and how much of that routers find.

    python benchmarks/token_headroom.py [--model M] [--data DIR] [--limit N] [--draws N] [--bits 4.5,5,6] [--json FILE]

For every token and nested site within the layers, and every width, the divergence that this token's reading this weight
at that width alone makes is estimated from gradients of the 16-bit model (`qbe.learning.sensitivities`). Assignments
are chosen by half of the backward passes and judged by the other half, by sums over tokens and sites:

    site        the same bits for every token: the best assignment for this very text
    scale       every token's damage taken as its own number times the site's: who suffers, not where
    token       every token by itself: what an oracle could reach, were it not for the noise of its half of the passes
    mobi, tokenwise   what `qbe train` has learned for this model, where it has, of the 16-bit model's hidden states

Sums over tokens leave out that errors of several tokens add up or cancel; `together` is what lowering all tokens of
a site makes, over the sum of its tokens, at the lowest width. Texts are those of `qbe eval` (the test files): the last
tokens of a prompt and the first ones of its reference answer; all tokens count. Float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from qbe.datasets.items import read
from qbe.engine.devices import pick_device
from qbe.errors import QBEError
from qbe.kernels.ops.routing import worths_of
from qbe.learning.distil import Batch, batches, watched
from qbe.learning.sensitivities import lowered
from qbe.policies import load
from qbe.policies.routers import blocks_of, gear_bits
from qbe.progress import bar
from qbe.store.prepare import PreparedModel, prepare

POLICIES = ("mobi", "tokenwise")


class Damages:
    """Of the tokens of some texts.

    Attributes:
        halves: float64 [2, tokens, sites, widths], nats, each by half of the draws.
        together: float64 [sites], of all tokens lowered to the lowest width, summed over the texts.
        worths: for each policy that was trained float32 [tokens, sites, slices], what its routers gave.
    """

    def __init__(self, prepared: PreparedModel, texts: list[Batch], draws: int, seed: int, tick) -> None:
        self.table, self.model = prepared.table, prepared.model
        self.blocks, self.widths = blocks_of(self.table), gear_bits(self.table)
        self.sites = [s for b in self.blocks for s in b.sites]
        self.sizes = np.array([self.table.nested[s].parameters for s in self.sites], np.float64)
        routers = {policy: trained for policy in POLICIES if (trained := self._routers(policy)) is not None}
        generator = torch.Generator().manual_seed(seed)
        halves, worths, self.together = [], {name: [] for name in routers}, np.zeros(len(self.sites))
        seen = {}
        with (
            lowered(self.model, self.table, self.widths, self.sites) as run,
            watched(self.model, self.blocks, lambda block, x: seen.update({block: x.detach().double()})),
        ):
            for batch in texts:
                found = self._of(batch, run, draws, generator)
                self.together += (found[..., 0].sum(2).square().mean(0) / 2).sum(0).double().numpy()
                squares = found[:, batch.routed].double().square() / 2
                halves.append(torch.stack([squares[::2].mean(0), squares[1::2].mean(0)]).numpy())
                for name, networks in routers.items():
                    of_blocks = [self._worths(n, seen[i], i) for i, n in enumerate(networks)]
                    worths[name].append(torch.cat(of_blocks, 2)[batch.routed].numpy())
                tick()
        self.halves = np.concatenate(halves, 1)
        self.worths = {name: np.concatenate(found) for name, found in worths.items()}

    def _routers(self, policy):
        try:
            return load(policy).routers(self.table).networks
        except QBEError:
            return None

    def _of(self, batch: Batch, run, draws: int, generator: torch.Generator) -> torch.Tensor:
        """[draws, texts, tokens, sites, widths]: gradient times error."""
        found = torch.zeros(draws, *batch.tokens.shape, len(self.sites), len(self.widths))
        places, passes = {site: i for i, site in enumerate(self.sites)}, dict.fromkeys(self.sites, 0)

        def note(at, _x, product):
            found[passes[at], :, :, places[at]] = product
            passes[at] += 1

        run(batch.tokens, batch.predicted, draws, generator, note)
        return found

    def _worths(self, network, x: torch.Tensor, block: int) -> torch.Tensor:
        scores = torch.from_numpy(network.scores(x.numpy()))
        return worths_of(scores.unflatten(-1, (len(self.blocks[block].sites), -1))).float()

    def judged(self, bits: float) -> dict[str, float]:
        """Divergence of each assignment at that average over these sites, over that of `site`; nats for `site`."""
        chosen_by, judge = self.halves
        tokens = len(judge)
        by_site = chosen_by.sum(0)
        scale = chosen_by[..., 0].sum(1, keepdims=True)[..., None] / chosen_by[..., 0].sum() * by_site
        picks = {"site": np.broadcast_to(self._cheapest(by_site[None], bits), (tokens, len(self.sites)))}
        picks["scale"], picks["token"] = self._cheapest(scale, bits), self._cheapest(chosen_by, bits)
        picks |= {name: self._over(worths, bits) for name, worths in self.worths.items()}
        cost = {name: float(np.take_along_axis(judge, at[..., None], 2).sum()) for name, at in picks.items()}
        got = {f"{name}_bits": self._average(at) for name, at in picks.items()}
        ratios = {name: value / cost["site"] for name, value in cost.items() if name != "site"}
        return {"bits": bits, "site_kl": cost["site"] / tokens, **ratios, **got}

    def _average(self, at: np.ndarray) -> float:
        return float((np.array(self.widths)[at] @ self.sizes).mean() / self.sizes.sum())

    def _cheapest(self, costs: np.ndarray, bits: float) -> np.ndarray:
        """Places of widths [rows, sites] of the least cost [rows, sites, widths] at an average: one price for all."""
        taken = np.array(self.widths) * self.sizes[:, None]
        low, high = -40.0, 0.0  # logarithm of the price of a weight's bit
        for _ in range(40):
            middle = (low + high) / 2
            at = (costs + np.exp(middle) * taken).argmin(-1)
            low, high = (middle, high) if self._average(at) > bits else (low, middle)
        return (costs + np.exp(high) * taken).argmin(-1)

    def _over(self, worths: np.ndarray, bits: float) -> np.ndarray:
        low, high = -200.0, 200.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if self._average((worths > middle).sum(-1)) > bits else (low, middle)
        return (worths > high).sum(-1)

    def agreement(self, worths: np.ndarray) -> float:
        """Rank correlation of the routers' worth of the second slice with its damage, over tokens, mean over sites."""
        gains = (self.halves[..., 0] - self.halves[..., 1]).mean(0)
        ranks = [np.argsort(np.argsort(x, 0), 0) for x in (gains, worths[..., 0])]
        return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(ranks[0].T, ranks[1].T, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--datasets", default="text,gsm8k,humaneval")
    parser.add_argument("--limit", type=int, default=4, help="texts of each data set")
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--bits", default="4.5,5,6", help="averages over the sites within layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    items = read(tuple(args.datasets.split(",")), args.data, args.limit)
    prepared = prepare(args.model, dtype="float32", device=pick_device("cpu"), progress=sys.stderr.isatty())
    texts = batches(items, prepared.tokenizer, torch.device("cpu"))
    with bar("texts", len(texts), sys.stderr.isatty()) as tick:
        found = Damages(prepared, texts, args.draws, args.seed, tick)
    lowest = found.halves[..., 0].mean(0).sum(0)
    share = found.halves[..., 0].mean(0).sum(1)
    described = {
        "model": args.model, "texts": len(items), "tokens": len(share), "draws": args.draws,
        "together": float(found.together.sum() / lowest.sum()),
        "token_deviation": float(np.log(share[share > 0]).std()),
        "agreement": {name: found.agreement(worths) for name, worths in found.worths.items()},
        "rows": [found.judged(float(b)) for b in args.bits.split(",")],
    }  # fmt: skip
    print(json.dumps(described, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
