"""The proxy scorer: features -> blueprint in one small network, and the real policy where that is unsure.

It was trained on what a policy chose for past requests (`qbe train proxy`). Its classes are clusters of blueprints, each
stood for by one that the policy itself has given: the nearest cluster's blueprint is the answer. It leaves a query to
the policy when the caller asked for more than a tier, when the features are unlike those of training, and when the
network's confidence that the answer is within a tenth of a bit is lower than what proved right on other requests.
"""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter

import numpy as np

from qbe import policies
from qbe.analysis.features import FEATURES, LOGARITHMIC
from qbe.analysis.profile import QueryProfile
from qbe.analysis.thresholds import MARKS
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies import kv, learned
from qbe.policies.learned import Array
from qbe.sites import SiteTable

AGREEMENT = 0.1  # bits of the average within which two blueprints count as the same
FAR = 6.0  # deviations from the mean of training, beyond which a feature is unlike what was learned
NAMES = {1: MARKS, 2: (*LOGARITHMIC, *(f for f in FEATURES if f not in LOGARITHMIC))}
COUNTS = {1: 0, 2: len(LOGARITHMIC)}  # how many of these, from the first on, count as log(1 + x)


class ProxyPolicy:
    """What `qbe train proxy` learned of another policy; bits of the KV cache by `qbe.policies.kv`.

    Attributes:
        handled, passed: requests answered by the network, and left to the policy it was learned from.
    """

    name = "proxy"
    needs_sensitivity = True

    def __init__(self) -> None:
        self.handled = self.passed = 0

    def prepare(self, table: SiteTable) -> None:
        """Raises QBEError where nothing was trained for this model."""
        _scorer(table)

    def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
        """Raises QBEError without a trained network, and what the policy raises that it was learned from."""
        scorer = _scorer(table)
        at = scorer.choose(profile, budget) if plain(budget) else None
        if at is None:
            self.passed += 1
            return scorer.policy.blueprint(profile, budget, table)
        self.handled += 1
        return scorer.blueprint(at, profile, budget)


def plain(budget: Budget) -> bool:
    """Whether a budget leaves everything to tier and score, but for the bits of activations."""
    return budget.bits is None and budget.within is None and budget.kv_bits is None


class Net:
    """A layer of rectified units and a softmax, for the features of one analysis tier.

    Args:
        tensors: `mean` and `scale` [inputs], `w1` [inputs, hidden], `b1`, `w2` [hidden, blueprints], `b2`, float32;
            `alike` float32 [blueprints, blueprints]: 1 where two averages are within `AGREEMENT`; `least`: the
            confidence that is enough.
    """

    def __init__(self, tier: int, tensors: dict[str, Array]) -> None:
        self.read, self.counts = itemgetter(*NAMES[tier]), COUNTS[tier]
        self.mean, self.scale = tensors["mean"], 1 / tensors["scale"]
        self.w1, self.b1, self.w2, self.b2 = (tensors[k] for k in ("w1", "b1", "w2", "b2"))
        self.alike, self.least = tensors["alike"], float(tensors["least"])

    def inputs(self, profile: QueryProfile, budget: Budget) -> Array:
        """Standardised features and the range that the tier leaves to the score, float32 [inputs]."""
        x = np.array((*self.read(profile.features), budget.bits_for(0.0), budget.bits_for(1.0)), np.float32)
        counts = x[: self.counts]
        np.log1p(counts, out=counts)
        x -= self.mean
        x *= self.scale
        return x

    def chances(self, z: Array) -> Array:
        """Probabilities [..., blueprints] for inputs [..., inputs]."""
        hidden = z @ self.w1
        hidden += self.b1
        np.maximum(hidden, 0, out=hidden)
        logits = hidden @ self.w2
        logits += self.b2
        logits -= logits.max(-1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(-1, keepdims=True)
        return logits

    def choose(self, z: Array) -> tuple[int, float]:
        """The likeliest blueprint for inputs [inputs], and the probability of one like it."""
        p = self.chances(z)
        at = int(p.argmax())
        return at, float(p @ self.alike[at])


class Scorer:
    """The networks and blueprints of one model. See `ProxyPolicy`."""

    def __init__(self, found: learned.Learned, table: SiteTable) -> None:
        self.policy = policies.load(str(found.about["policy"]))
        self.table, tensors = table, found.tensors
        self.nets = {
            tier: Net(tier, {k.partition(".")[2]: v for k, v in tensors.items() if k.startswith(f"{tier}.")})
            for tier in NAMES
            if f"{tier}.w1" in tensors
        }
        self.budgets = {(float(low), float(high)) for low, high in tensors["budgets"]}
        self._gears = [tuple(map(int, row)) for row in tensors["blueprints"]]
        self._known: dict[tuple[int, int], tuple[Blueprint, int]] = {}
        self._with_kv: dict[tuple[int, int, float], Blueprint] = {}

    def choose(self, profile: QueryProfile, budget: Budget) -> int | None:
        """The number of a blueprint; None where the policy should be asked."""
        net = self.nets.get(min(profile.tier, 2))
        if net is None or (budget.bits_for(0.0), budget.bits_for(1.0)) not in self.budgets:
            return None
        z = net.inputs(profile, budget)
        if max(z.max(), -z.min()) > FAR:
            return None
        at, confidence = net.choose(z)
        return at if confidence >= net.least else None

    def blueprint(self, at: int, profile: QueryProfile, budget: Budget) -> Blueprint:
        """The blueprint of that number, with the budget's activations and the KV bits for the context."""
        known = self._known.get((at, budget.activation_bits))
        if known is None:
            activations = self.table.activations(budget.activation_bits)
            found = Blueprint.of("proxy", self.table, self._gears[at], activations)
            known = self._known[at, budget.activation_bits] = found, found.bytes_per_token(self.table)
        average = kv.average_bits(profile, budget, self.table, known[1])
        key = at, budget.activation_bits, average
        if key not in self._with_kv:
            self._with_kv[key] = known[0].with_kv_bits(kv.allocate_kv(self.table, average))
        return self._with_kv[key]


@lru_cache(maxsize=8)
def _scorer(table: SiteTable) -> Scorer:
    found = learned.read("proxy", table)
    policy = policies.load(str(found.about["policy"]))
    if found.about["policy_version"] != getattr(policy, "cache_version", None):
        raise QBEError(
            f"the proxy of {table.model_name} was trained on another version of the policy '{policy.name}': "
            f"run 'qbe train proxy --model {table.model_name}' again"
        )
    return Scorer(found, table)
