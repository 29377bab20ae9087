"""From the drift of recurrent states over a short text to a floor of bits for the model's whole context.

A state that forgets nothing gathers the errors of all its roundings. Independent ones add up to a divergence that grows
with the number of tokens, errors that all point the same way to one that grows with its square. A text that is shorter
than a state's memory does not show where growth ends, so none slower than that of independent errors is relied on:

    predicted = MARGIN * c * context ^ exponent

The exponent is the slope of the typical token (the geometric mean over stretches that double in length, least squares
in logarithms), from 1 to 2. c is the sum of the divergences over the sum of the tokens' positions to the exponent, and
two standard errors, from blocks of the text: few tokens make up most of a mean, above all where another expert is
chosen. A gear that showed none of these takes from each lower gear the divergence in proportion to their errors: how
often an expert changes is in proportion, and what else a small error does goes by its square, which is less.

**The floor** of a layer is the fewest bits at which that stays within the layer's share of `STATE_LOSS`. Layers round
independently, so that their divergences add up, and all of them at their floors together stay within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qbe.sites import STATE_FULL_BITS, SiteTable
from qbe.store.state_drift import Drift

MARGIN = 1.5
# Nats per token that all states at their floors may cost together, at the end of the context; perplexity grows by about
# that share. As much as 8-bit activations may cost (`qbe.sites.ACTIVATION_LOSS`), and what is asked of 10 bits.
STATE_LOSS = 1e-3
SHORTEST = 16  # tokens of a stretch
BLOCKS = 16  # of the text, for standard errors
LEAST = 1e-15  # nats, in place of what float32 rounds to nothing
EXPONENTS = (1.0, 2.0)


@dataclass(frozen=True)
class Stretches:
    """Means over the windows and the tokens of each stretch, of one gear of one layer.

    Attributes:
        kl: nats per token.
        error: norm of what states are off by, over that of the states.
    """

    kl: tuple[float, ...]
    error: tuple[float, ...]


@dataclass(frozen=True)
class StateProfile:
    """One layer's recurrent state.

    Attributes:
        name: of its site.
        layer: its number.
        gears: state bits -> what was measured.
        predicted: state bits -> KL at the model's context, nats per token, the margin included.
        floor: state bits that it has at least.
    """

    name: str
    layer: int
    gears: Mapping[int, Stretches]
    predicted: Mapping[int, float]
    floor: int


@dataclass(frozen=True)
class Profile:
    """All recurrent states of a model.

    Attributes:
        context: tokens that floors are for.
        windows: of the text that was read.
        ends: of the stretches, tokens.
        bound: what a layer's predicted KL stays below at its floor.
        states: by layer.
    """

    context: int
    windows: int
    ends: tuple[int, ...]
    bound: float
    states: tuple[StateProfile, ...]

    @classmethod
    def of(cls, table: SiteTable, drifts: Mapping[str, Drift], context: int) -> Profile:
        """The profile of what was measured, for so many tokens."""
        windows, tokens = next(iter(next(iter(drifts.values())).kl.values())).shape
        ends = stretch_ends(tokens)
        bound, states = STATE_LOSS / len(drifts), []
        for site in (s for s in table.states if s.name in drifts):
            drift = drifts[site.name]
            gears = {g: Stretches(means(drift.kl[g], ends), means(drift.error[g], ends)) for g in drift.kl}
            predicted = predict(drift, context)
            states.append(StateProfile(site.name, int(site.layer or 0), gears, predicted, floor(predicted, bound)))
        return cls(context, windows, ends, bound, tuple(states))


def stretch_ends(tokens: int) -> tuple[int, ...]:
    """Where the stretches of a text of so many tokens end, ascending."""
    ends = [tokens]
    while ends[0] // 2 >= SHORTEST:
        ends.insert(0, ends[0] // 2)
    return tuple(ends)


def means(values: torch.Tensor, ends: Sequence[int]) -> tuple[float, ...]:
    """Over the stretches of [windows, tokens]."""
    starts = (0, *ends)
    return tuple(float(values[:, a:b].double().mean()) for a, b in zip(starts, ends, strict=False))


def predict(drift: Drift, position: int) -> dict[int, float]:
    """For each gear the KL at a position beyond the text, nats per token, the margin included."""
    found = {gear: MARGIN * _ahead(kl.double(), position) for gear, kl in drift.kl.items()}
    error = {gear: float(e.double().mean()) for gear, e in drift.error.items()}
    return {
        gear: max(found[lower] * error[gear] / error[lower] for lower in found if lower <= gear and error[lower] > 0)
        if error[gear] > 0 else found[gear]
        for gear in found
    }  # fmt: skip


def _ahead(kl: torch.Tensor, position: int) -> float:
    """Of one gear, without the margin: what float64 [windows, tokens] come to at a position."""
    weights = torch.arange(1, kl.shape[1] + 1, dtype=torch.float64) ** (exponent := growth(kl))
    sums = torch.stack([part.sum() for part in kl.chunk(BLOCKS, 1)])
    sizes = torch.stack([part.sum() for part in weights.chunk(BLOCKS)]) * len(kl)
    level = sums.sum() / sizes.sum()
    deviation = (sums - level * sizes).square().sum().sqrt() / sizes.sum()
    return float(level + 2 * deviation) * position**exponent


def growth(kl: torch.Tensor) -> float:
    """The power of the position with which the typical token's KL grows, float64 [windows, tokens]."""
    ends = stretch_ends(kl.shape[1])
    pairs = [(a, b) for a, b in zip((0, *ends), ends, strict=False) if a >= SHORTEST]
    if len(pairs) < 2:
        return EXPONENTS[0]
    x = torch.tensor([math.log((a + b) / 2) for a, b in pairs], dtype=torch.float64)
    y = torch.stack([kl[:, a:b].clamp_min(LEAST).log().mean() for a, b in pairs])
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    return min(EXPONENTS[1], max(EXPONENTS[0], slope))


def floor(predicted: Mapping[int, float], bound: float) -> int:
    """The fewest bits from which on every gear is predicted to stay below the bound."""
    found = STATE_FULL_BITS
    for gear in sorted(predicted, reverse=True):
        if not predicted[gear] <= bound:
            break
        found = gear
    return found
