"""PAQ (Jimenez et al., 2026): each prompt runs at one width, the smallest that a router expects to be enough for it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies import learned
from qbe.policies.base import Policy
from qbe.policies.kv import allocate_kv
from qbe.sites import FULL_BITS, SiteTable

# How much perplexity may grow: the paper's conservative, medium and aggressive thresholds, by the budget's tier.
THRESHOLDS = {"priority": 1.07, "default": 1.13, "flex": 1.21}
LEAST = 1e-9  # probability of a width, where logarithms are taken


class PAQPolicy(Policy):
    """A linear classifier of the sentence encoder's vector says how likely each of the store's widths is the smallest
    one whose perplexity stays within the threshold of 16 bits' (`qbe train paq` makes it). Every nested site gets the
    likeliest width; the KV cache has the budget's bits, else 16.

    The tier says which threshold. A budget in bits holds for the traffic, not for a query: the medium threshold's
    widths are then made cheaper or dearer by one price per bit, at which the prompts of training had that average.
    """

    name = "paq"
    reads_score = False
    needs_sensitivity = True
    analysis_tier = 3

    def prepare(self, table: SiteTable) -> None:
        """Raises QBEError where no router was trained for this model."""
        _router(table)

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError without a trained router, or for bits below the store's lowest width."""
        widths, heads, sample = _router(table)
        if profile.vector is None:
            said = "the policy 'paq' needs analysis tier 3: start the engine without a lower --analysis-tier"
            raise QBEError(said, field="policy")
        if budget.bits is None:
            weight, bias = heads[budget.plain_tier]
            choice = int((profile.vector @ weight + bias).argmax())
        else:
            weight, bias = heads["default"]
            chances = logarithms(profile.vector @ weight + bias)
            choice = int((chances - price(sample, widths, float(budget.bits)) * np.array(widths)).argmax())
        kv_bits = FULL_BITS if budget.kv_bits is None else float(budget.kv_bits)
        return Blueprint.of(
            self.name, table, (widths[choice],) * len(table.nested), table.activations(budget.activation_bits),
            allocate_kv(table, kv_bits),
        )  # fmt: skip


class _Sample:
    """Logarithms of probabilities of the medium threshold, float32 [prompts, widths]; equal only to itself."""

    def __init__(self, values: learned.Array) -> None:
        self.values = values


Router = tuple[tuple[int, ...], dict[str, tuple[learned.Array, learned.Array]], _Sample]


@lru_cache(maxsize=8)
def _router(table: SiteTable) -> Router:
    tensors = learned.read("paq", table).tensors
    widths = tuple(map(int, tensors["widths"]))
    return widths, {t: (tensors[f"{t}.weight"], tensors[f"{t}.bias"]) for t in THRESHOLDS}, _Sample(tensors["sample"])


def logarithms(logits: learned.Array) -> learned.Array:
    """Logarithms of the probabilities [..., widths]; none is below that of `LEAST`."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.log(np.maximum(p / p.sum(-1, keepdims=True), LEAST))


@lru_cache(maxsize=256)
def price(sample: _Sample, widths: tuple[int, ...], bits: float) -> float:
    """The price of a bit, in logarithms of probability, at which the sample's widths are `bits` on average at most;
    negative for more bits than the likeliest widths have.

    Raises:
        QBEError: fewer bits than the lowest width has.
    """
    of = np.array(widths)
    if bits < widths[0]:
        raise QBEError(f"the policy 'paq' cannot meet {bits:g} bits: the store's lowest width is {widths[0]}")
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        average = of[(sample.values - middle * of).argmax(-1)].mean()
        low, high = (middle, high) if average > bits + 1e-9 else (low, middle)
    return high
