"""The proxy scorer: features -> blueprint by small networks, and the real policy where they are unsure.

They were trained on what a policy chose for past requests (`qbe train proxy`), whose blueprints were put into clusters
by their average bits, each with one of them for its centre: the nearest centre is the answer. A query is left to the
policy when the caller asked for more than a tier, when its features are unlike those of training, and when the networks
disagree by more than proved harmless on other requests.
"""

from __future__ import annotations

from bisect import bisect_left
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
from qbe.policies.base import Policy
from qbe.policies.learned import Array
from qbe.sites import SiteTable

AGREEMENT = 0.1  # bits of the average within which two blueprints count as the same
FAR = 6.0  # deviations from the mean of training, beyond which a feature is unlike what was learned
NAMES = {1: MARKS, 2: (*LOGARITHMIC, *(f for f in FEATURES if f not in LOGARITHMIC))}
COUNTS = {1: 0, 2: len(LOGARITHMIC)}  # how many of these, from the first on, count as log(1 + x)


def nearest(averages: list[float], wanted: float) -> int:
    """The place of the number nearest to `wanted` in an ascending list."""
    index = bisect_left(averages, wanted)
    if index == len(averages) or (index and wanted - averages[index - 1] <= averages[index] - wanted):
        index -= 1
    return index


class ProxyPolicy(Policy):
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
        choice = scorer.choose(profile, budget) if plain(budget) and not profile.least_bits else None
        if choice is None:
            self.passed += 1
            return scorer.policy.blueprint(profile, budget, table)
        self.handled += 1
        return scorer.blueprint(choice, profile, budget)


def plain(budget: Budget) -> bool:
    """Whether a budget leaves everything to tier and score, but for the bits of activations."""
    return budget.bits is None and budget.within is None and budget.kv_bits is None


class Net:
    """Several small networks side by side, for the features of one analysis tier: each has a layer of rectified units
    and says how many bits on average the policy would give. Where they say different things, they do not know.

    Args:
        tensors: float32 `mean` and `scale` [inputs], `w1` [inputs, hidden], `b1`, `w2` [hidden, networks], `b2`;
            `most` [1]: the largest spread of the networks, in bits, at which their mean proved right often enough.
    """

    def __init__(self, tier: int, tensors: dict[str, Array]) -> None:
        self.read, self.counts = itemgetter(*NAMES[tier]), COUNTS[tier]
        self.mean, self.scale = tensors["mean"], 1 / tensors["scale"]
        self.w1, self.b1, self.w2, self.b2 = (tensors[k] for k in ("w1", "b1", "w2", "b2"))
        self.most = float(tensors["most"][0])

    def inputs(self, profile: QueryProfile, budget: Budget) -> Array:
        """Standardised features and the range that the tier leaves to the score, float32 [inputs]."""
        x = np.array((*self.read(profile.features), budget.bits_for(0.0), budget.bits_for(1.0)), np.float32)
        counts = x[: self.counts]
        np.log1p(counts, out=counts)
        x -= self.mean
        x *= self.scale
        return x

    def averages(self, z: Array) -> Array:
        """What each network says, bits [..., networks], for inputs [..., inputs]."""
        hidden = z @ self.w1
        hidden += self.b1
        np.maximum(hidden, 0, out=hidden)
        return hidden @ self.w2 + self.b2


class Scorer:
    """The networks and blueprints of one model. See `ProxyPolicy`."""

    def __init__(self, fitted: learned.Learned, table: SiteTable) -> None:
        self.policy = policies.load(str(fitted.about["policy"]))
        self.table, tensors = table, fitted.tensors
        self.nets = {
            tier: Net(tier, {k.partition(".")[2]: v for k, v in tensors.items() if k.startswith(f"{tier}.")})
            for tier in NAMES
            if f"{tier}.w1" in tensors
        }
        self.budgets = {(float(low), float(high)) for low, high in tensors["budgets"]}
        self._gears = [tuple(map(int, row)) for row in tensors["blueprints"]]
        self._averages = tensors["averages"].tolist()  # ascending
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
        said = net.averages(z).tolist()
        low, high = min(said), max(said)
        return None if high - low > net.most else nearest(self._averages, sum(said) / len(said))

    def blueprint(self, choice: int, profile: QueryProfile, budget: Budget) -> Blueprint:
        """The blueprint of that number, with the budget's activations and the KV bits for the context."""
        known = self._known.get((choice, budget.activation_bits))
        if known is None:
            activations = self.table.activations(budget.activation_bits)
            blueprint = Blueprint.of("proxy", self.table, self._gears[choice], activations)
            known = self._known[choice, budget.activation_bits] = blueprint, blueprint.bytes_per_token(self.table)
        average = kv.average_bits(profile, budget, self.table, known[1])
        key = choice, budget.activation_bits, average
        if key not in self._with_kv:  # of budgets that leave the KV cache to the policy
            self._with_kv[key] = kv.with_cache(known[0], budget, self.table, average)
        return self._with_kv[key]


# Versions that differ from today's in nothing but their averages: a proxy chooses among those that it learned.
_AS_GOOD = {"tiered": ("3",)}


@lru_cache(maxsize=8)
def _scorer(table: SiteTable) -> Scorer:
    fitted = learned.read("proxy", table)
    policy = policies.load(str(fitted.about["policy"]))
    if fitted.about["policy_version"] not in (policy.cache_version, *_AS_GOOD.get(policy.name, ())):
        raise QBEError(
            f"the proxy of {table.model_name} was trained on another version of the policy '{policy.name}': "
            f"run 'qbe train proxy --model {table.model_name}' again"
        )
    return Scorer(fitted, table)
