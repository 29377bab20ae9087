"""Trains routers to expect what each token's reading a weight at fewer bits does: the per-token policy `tokenwise`.

First by what each site does alone. Gradients of the 16-bit model estimate that damage for every token, site and width
of a text at once (`qbe.learning.sensitivities`). Damages of many sites and tokens add up, nearly, so the best bits
under an average are those that weigh each slice's expected damage against one price, and its expectation is all that a
router has to learn: a regression, where `mobi` learns by what all gates together do to the answer, whose gradients at a
token are mostly the others' noise. A damage is the square of a sum of many small errors and so spreads like a
chi-square about its mean; the likelihood of such numbers is what is fitted, which gives the mean, not the mean of
logarithms.

Then as `mobi`, from where the regression ended, by what all sites together do, since the sums are only nearly true
(docs/quality.md). The output head has a router, too: it is much of a small model, and what fewer bits of it do to a
token is mostly a matter of how sure the model is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from qbe.kernels.ops.routing import worths_of
from qbe.learning import distil
from qbe.learning.distil import Batch, watched
from qbe.learning.gates import Gates, train_routers
from qbe.learning.mobi import distilled
from qbe.learning.sensitivities import lowered
from qbe.policies.routers import blocks_of
from qbe.store.prepare import PreparedModel

LARGEST = 3e3  # a damage over its expectation counts as at most this: one such number says little, but moves much
LEAST = 1e-20  # nats
REGRESSED = 0.25  # of the steps
HIDDEN = 64  # units of a router


def fit(
    prepared: PreparedModel, gates: Gates, kept: Sequence[Batch], steps: int, seed: int, tick: Callable[[], None]
) -> dict[str, float | None]:
    """`qbe.learning.gates.Fit`: a part of the steps is regression, the others distillation."""
    first = round(steps * REGRESSED)
    loss = _regress(prepared, gates, kept, first, seed, tick)
    price = distilled(prepared, gates, kept, steps - first, seed, tick)
    return {"loss": loss, "price_of_a_bit": price}


def _regress(
    prepared: PreparedModel, gates: Gates, kept: Sequence[Batch], steps: int, seed: int, tick: Callable[[], None]
) -> float | None:
    """Returns the mean loss of the last tenth of the steps: of a damage over its expectation, less the logarithm."""
    rng, device = np.random.default_rng(seed), gates.share.device
    generator = torch.Generator(device).manual_seed(seed)
    expected = Expected(gates).to(device)
    optimiser = torch.optim.Adam(expected.parameters(), lr=distil.RATE)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    sites = {s for block in gates.blocks for s in block.sites}
    losses: list[float] = []
    damage: dict[int, torch.Tensor] = {}
    inputs: dict[int, torch.Tensor] = {}
    model = prepared.model
    with (
        lowered(model, gates.table, gates.widths[:-1], sites) as run,
        watched(model, gates.blocks, lambda block, x: inputs.update({block: gates.read(block, x.detach())})),
    ):
        for _ in range(steps):
            batch = kept[int(rng.integers(len(kept)))]
            run(batch.tokens, batch.predicted, 1, generator, lambda index, _, product: damage.update({index: product}))
            of_blocks = [
                _loss(
                    torch.stack([damage[s][batch.predicted].square() / 2 for s in block.sites], 1),
                    expected(number, inputs[number][batch.predicted]),
                )
                for number, block in enumerate(gates.blocks)
            ]
            loss = torch.stack(of_blocks).mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
            optimiser.step()
            rates.step()
            losses.append(float(loss.detach()))
            tick()
    return float(np.mean(losses[-max(1, steps // 10) :])) if losses else None


class Expected(nn.Module):
    """Damages by routers' scores, trained here: at each width but the widest what the slices above it are worth, and
    what the widest leaves, which is taken for what the last slice's worth says, as errors go with the square of a step.
    """

    def __init__(self, gates: Gates) -> None:
        super().__init__()
        self.routers, table = gates.routers, gates.table
        steps = torch.tensor(np.diff(gates.widths), dtype=torch.float32)
        left = -torch.log1p(-(4.0 ** -steps[-1]))  # what a slice takes away and leaves, over what it takes away
        for number, block in enumerate(gates.blocks):
            sizes = torch.tensor([table.nested[s].parameters for s in block.sites], dtype=torch.float32)
            bits = (sizes[:, None] * steps).log()
            bits[:, -1] += left
            self.register_buffer(f"bits{number}", bits)

    def forward(self, block: int, x: torch.Tensor) -> torch.Tensor:
        """Logarithms of nats, [tokens, sites, widths - 1], of what the block reads [tokens, inputs]."""
        bits = self.get_buffer(f"bits{block}")
        parts = worths_of(self.routers.scores(block, x).unflatten(-1, bits.shape)) + bits
        return torch.logcumsumexp(parts.flip(-1), -1).flip(-1)


def _loss(damage: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Minus the likelihood of damages [...] with these means, whose logarithms are given, up to a constant []."""
    ratio = (damage.clamp(min=LEAST).log() - expected).clamp(max=float(np.log(LARGEST)))
    return (ratio.exp() - ratio).mean()


train = partial(train_routers, fit, partial(blocks_of, head=True), HIDDEN)
