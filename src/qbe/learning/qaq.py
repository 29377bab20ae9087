"""Trains QAQ's routers: widths for each block from the prompt's hidden states, distilled from 16 bits.

As in the paper the student multiplies expected weights, sum_b p(b) W_b, where p is a softmax of a router's scores with
a temperature, sharper towards the end, and is told the divergence from the 16-bit model's distributions, at a
temperature of its own. The average is drawn anew in each step: a price per bit is taken from the scores so that the
step's queries have it, and serves as the penalty that holds it. So one router learns all averages. It begins with what
the measured sensitivities say, the same for every query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qbe.datasets.items import Item
from qbe.learning import distil
from qbe.learning.distil import Batch, RouterNetworks, Student, batches, descend, sliced, solve, split, worth
from qbe.policies.learned import Learned
from qbe.policies.routers import Numbers, blocks_of, gear_bits, named
from qbe.sites import SiteTable
from qbe.store.prepare import PreparedModel

HIDDEN = 32  # units of a router
SHARPNESS = (0.5, 4.0)  # of the softmax, in the first and in the last step
TEMPERATURE = 2.0  # of both models' distributions
DECAY = 0.1  # of weights: there are a few hundred queries


def train(
    prepared: PreparedModel, items: Sequence[Item], steps: int, seed: int = 0, tick: Callable[[], None] = lambda: None
) -> Learned:
    """Routers of all blocks.

    Args:
        prepared: not yet served by an engine; on its device everything runs.
        items: three quarters are trained on; what is reported is of the others.
        tick: called after each of `steps` steps.

    Raises:
        QBEError: too few items, or a model without its 16-bit weights.
    """
    table, device = prepared.table, next(prepared.model.parameters()).device
    kept, held = (batches(some, prepared.tokenizer, device) for some in split(items, seed))
    rng = np.random.default_rng(seed)
    widths = gear_bits(table)
    with sliced(prepared) as student:
        queries = _Queries(table, student, kept, seed)
        at_start = queries.held_out(held, kept)
        optimiser = torch.optim.AdamW(queries.routers.parameters(), lr=distil.RATE, weight_decay=DECAY)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
        prices = []
        for step in range(steps):
            batch = kept[int(rng.integers(len(kept)))]
            bits = widths[0] + (widths[-1] - widths[0]) * float(rng.uniform(*distil.RANGE))
            queries.sharpness = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** (step / max(1, steps - 1))
            teacher, means = queries.read(batch)
            scores = queries.scores(means)
            price = torch.tensor(queries.price(scores, bits), device=device, requires_grad=True)
            queries.gate(queries.shares(scores, price))
            divergence = student.divergence(batch.tokens, batch.answer, teacher, TEMPERATURE)
            prices.append(descend(queries.routers, optimiser, divergence, queries.bits(scores, price), price))
            rates.step()
            tick()
        after, sample = queries.held_out(held, kept), queries.sample(kept)
    blocks = blocks_of(table)
    tensors: dict[str, npt.NDArray[Any]] = {**named(queries.routers.networks(len(blocks))), "sample": sample.numpy()}
    for i, (centre, scale) in enumerate(zip(queries.centres, queries.scales, strict=True)):
        tensors[f"{i}.centre"], tensors[f"{i}.scale"] = centre.cpu().numpy(), scale.cpu().numpy()
    count = sum(p.numel() for p in queries.routers.parameters())
    about = {
        "texts": len(items), "steps": steps, "seed": seed, "parameters": count, "before": at_start, "after": after,
        "price_of_a_bit": float(np.mean(prices[-8:])) if prices else None,
    }  # fmt: skip
    return Learned(tensors, about)


def _begin(table: SiteTable, sites: Sequence[int]) -> Numbers:
    """Scores at which a width is likelier than the one below it as long as its bits are worth more than their price."""
    return np.concatenate([[0.0], (worth(table, sites) * np.diff(gear_bits(table))).cumsum()])


class _Queries:
    """Queries of a student, and the routers that give them gates.

    Attributes:
        routers: see `qbe.learning.distil`.
        centres, scales: for each block of the means that its router reads, over the queries, float32 [inputs].
        sharpness: of the softmax over widths; None takes the likeliest width.
    """

    def __init__(self, table: SiteTable, student: Student, kept: Sequence[Batch], seed: int) -> None:
        self.student, self.blocks = student, blocks_of(table)
        self.sharpness: float | None = SHARPNESS[0]
        device = kept[0].tokens.device
        self._widths = torch.tensor(gear_bits(table), dtype=torch.float32, device=device)
        sizes = torch.tensor([sum(table.nested[s].parameters for s in b.sites) for b in self.blocks], device=device)
        self._share = sizes / sizes.sum()
        # Of the 16-bit model: what a query is about differs more between queries than between precisions.
        self._known: dict[int, list[torch.Tensor]] = {id(b): self._means(b)[1] for b in kept}
        of_all = [torch.cat(parts) for parts in zip(*self._known.values(), strict=True)]
        self.centres = [x.mean(0) for x in of_all]
        self.scales = [x.std(0).clamp(min=1e-3) for x in of_all]
        self.routers = RouterNetworks(
            [x.shape[1] for x in of_all], [_begin(table, b.sites) for b in self.blocks], HIDDEN, seed
        )
        self.routers.to(device)

    @torch.no_grad()
    def _means(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        means: list[torch.Tensor] = [torch.empty(0)] * len(self.blocks)
        weight = (batch.prompt / batch.prompt.sum(1, keepdim=True))[..., None]

        def note(block: int, x: torch.Tensor) -> None:
            if self.student.full:
                means[block] = (x.float() * weight).sum(1)

        self.student.on_block = note
        return self.student.teacher(batch.tokens, batch.answer), means

    def read(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The teacher's log probabilities and, for each block, means of its inputs over the prompts [texts, inputs]."""
        return self._means(batch)

    def scores(self, means: Sequence[torch.Tensor]) -> torch.Tensor:
        """[texts, blocks, widths]"""
        parts = zip(means, self.centres, self.scales, strict=True)
        return torch.stack([self.routers.scores(i, (m - c) / s) for i, (m, c, s) in enumerate(parts)], 1)

    def shares(self, scores: torch.Tensor, price: torch.Tensor | float) -> torch.Tensor:
        """How much of each width [texts, blocks, widths]."""
        priced = scores - price * self._widths
        if self.sharpness is None:
            return torch.nn.functional.one_hot(priced.argmax(-1), len(self._widths)).float()
        return (self.sharpness * priced).softmax(-1)

    def bits(self, scores: torch.Tensor, price: torch.Tensor | float) -> torch.Tensor:
        """The average over the blocks' weights and the texts []."""
        return ((self.shares(scores, price) @ self._widths) @ self._share).mean()

    @torch.no_grad()
    def price(self, scores: torch.Tensor, bits: float) -> float:
        """Of a bit, at which that is the average."""
        return solve(lambda price: float(self.bits(scores, price)), bits)

    def gate(self, shares: torch.Tensor) -> None:
        """Let the student multiply the expected weights: a slice as far as widths that have it."""
        gates = shares.flip(-1).cumsum(-1).flip(-1)[..., 1:]
        for block, of in zip(self.blocks, gates.unbind(1), strict=True):
            for site in block.sites:
                self.student.gates[site] = of[:, None]

    @torch.no_grad()
    def sample(self, kept: Sequence[Batch]) -> torch.Tensor:
        """Scores of all of training's queries, float32 [queries, blocks, widths]."""
        return torch.cat([self.scores(self._known[id(b)]) for b in kept]).cpu()

    @torch.no_grad()
    def held_out(self, held: Sequence[Batch], kept: Sequence[Batch]) -> list[dict[str, float]]:
        """Bits that held-out texts get at prices for `distil.HELD_AT`, and their divergence, nats per token."""
        before, self.sharpness = self.sharpness, None
        known = self.sample(kept).to(self._widths.device)
        entries = [{"asked": asked, "bits": 0.0, "kl": 0.0} for asked in distil.HELD_AT]
        counted = texts = 0
        for batch in held[:: -(-len(held) // distil.HELD)]:
            (teacher, means), n = self.read(batch), int(batch.answer.sum())
            scores = self.scores(means)
            for entry in entries:
                price = self.price(known, entry["asked"])
                self.gate(self.shares(scores, price))
                entry["kl"] += float(self.student.divergence(batch.tokens, batch.answer, teacher)) * n
                entry["bits"] += float(self.bits(scores, price)) * len(scores)
            counted, texts = counted + n, texts + len(scores)
        self.sharpness = before
        return [{"asked": e["asked"], "bits": e["bits"] / texts, "kl": e["kl"] / counted} for e in entries]
