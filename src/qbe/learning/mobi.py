"""Trains MoBiQuant's routers: per-token gates of slices, distilled from 16 bits at averages drawn anew in each step.
`tokenwise` ends with the same, its routers being wider.

A gate's temperature falls from step to step. The threshold of a step is the one at which lately seen tokens had the
average that was drawn, so one set of routers learns all averages. Divergence is counted for prompts, too: else routers
save bits where nobody looks, at the tokens of prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from qbe.learning import distil
from qbe.learning.distil import Batch, descend, sliced
from qbe.learning.gates import Gates, train_routers
from qbe.policies.routers import blocks_of
from qbe.store.prepare import PreparedModel

HIDDEN = 32  # units of a router
TEMPERATURES = (1.0, 0.25)  # of the gates, in the first and in the last step
SEEN = 8  # steps whose tokens say where the threshold lies


def _distil(
    prepared: PreparedModel, gates: Gates, kept: Sequence[Batch], steps: int, seed: int, tick: Callable[[], None]
) -> dict[str, float | None]:
    return {"price_of_a_bit": distilled(prepared, gates, kept, steps, seed, tick)}


def distilled(
    prepared: PreparedModel, gates: Gates, kept: Sequence[Batch], steps: int, seed: int, tick: Callable[[], None]
) -> float | None:  # fmt: skip
    """Trains the gates' routers by the divergence from 16 bits that all gates together cause.

    Returns:
        What a bit was worth in the last steps, nats; None without steps.
    """
    with sliced(prepared, gates.blocks) as gates.student:
        return _descended(gates, kept, steps, seed, tick)


def _descended(
    gates: Gates, kept: Sequence[Batch], steps: int, seed: int, tick: Callable[[], None]
) -> float | None:  # fmt: skip
    rng, widths, device = np.random.default_rng(seed), gates.widths, gates.share.device
    optimiser = torch.optim.Adam(gates.routers.parameters(), lr=distil.RATE)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    seen: deque[torch.Tensor] = deque([gates.worths(kept[0])], maxlen=SEEN)
    prices = []
    for step in range(steps):
        batch = kept[int(rng.integers(len(kept)))]
        bits = widths[0] + (widths[-1] - widths[0]) * float(rng.uniform(*distil.RANGE))
        done = step / max(1, steps - 1)
        gates.temperature = TEMPERATURES[0] * (TEMPERATURES[1] / TEMPERATURES[0]) ** done
        price = gates.price(torch.cat(tuple(seen)), bits)
        gates.threshold = torch.tensor(price, device=device, requires_grad=True)
        teacher = gates.student.teacher(batch.tokens, batch.predicted)
        divergence = gates.divergence(batch, teacher)
        prices.append(descend(gates.routers, optimiser, divergence, gates.bits(), gates.threshold))
        rates.step()
        seen.append(gates.seen())
        tick()
    return float(np.mean(prices[-SEEN:])) if prices else None


train = partial(train_routers, _distil, blocks_of, HIDDEN)
