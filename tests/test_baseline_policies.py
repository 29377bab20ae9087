"""The baselines `static` and `random`: averages are met, allocations are optimal, draws belong to query and seed."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe import policies
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import TIERS, Budget
from qbe.errors import QBEError
from qbe.policies.random import _most_entropy
from qbe.sites import KVSite, Role, Site, SiteTable
from test_policies import TABLE, profile, smollm2_like


def query(number: int) -> QueryProfile:
    return QueryProfile(0.5, "code", 2, {"tokens": float(number)})


@settings(max_examples=25, deadline=None)
@given(bits=st.floats(4.0, 16.0))
def test_static_meets_a_budget_within_a_twentieth_of_a_bit(bits: float) -> None:
    average = policies.load("static").blueprint(profile(0.3), Budget(bits=bits), TABLE).average_weight_bits(TABLE)
    assert bits - 0.05 <= average <= bits + 1e-6


@settings(max_examples=50, deadline=None)
@given(bits=st.floats(4.0, 16.0), seed=st.integers(0, 99), number=st.integers(0, 10_000))
def test_random_meets_a_budget_within_a_twentieth_of_a_bit(bits: float, seed: int, number: int) -> None:
    blueprint = policies.load(f"random:{seed}").blueprint(query(number), Budget(bits=bits), TABLE)
    average = blueprint.average_weight_bits(TABLE)
    assert bits - 0.05 <= average <= bits + 1e-6
    assert bits > 8 or max(blueprint.weight_bits) < 16, "16 bits would waste a small budget"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.floats(4.2, 12))
def test_static_is_the_best_of_all_assignments_that_can_be_enumerated(seed: int, bits: float) -> None:
    rng = random.Random(seed)
    sites = tuple(
        Site(f"s{i}", Role.OUTPUT_HEAD, 0, (rng.randint(1, 40), 64), True, (4, 6, 8, 16), {},
             {4: (k := rng.random()), 6: k / rng.uniform(2, 20), 8: k / 100, 16: 0.0})
        for i in range(5)
    )  # fmt: skip
    table = SiteTable(sites, "small", 1)

    def cost(gears: tuple[int, ...]) -> float:
        return sum(s.sensitivity[g] for s, g in zip(sites, gears, strict=True))

    def average(gears: tuple[int, ...]) -> float:
        return Blueprint.of("x", table, gears).average_weight_bits(table)

    allowed = [g for g in itertools.product((4, 6, 8, 16), repeat=5) if average(g) <= bits + 1e-9]
    near = [g for g in allowed if average(g) >= bits - 0.05] or allowed
    ours = policies.load("static").blueprint(profile(0.5), Budget(bits=bits), table).weight_bits
    assert cost(ours) <= min(map(cost, near)) * 1.002 + 1e-5, "and no floor of the head stands in the way"


def test_static_is_blind_and_random_belongs_to_query_and_seed() -> None:
    static, drawn, other = (policies.load(n) for n in ("static", "random", "random:1"))
    budget = Budget(bits=6)
    assert len({static.blueprint(profile(s), budget, TABLE).key for s in (0.0, 0.4, 1.0)}) == 1
    assert len({drawn.blueprint(query(i), budget, TABLE).key for i in range(20)}) == 20
    assert drawn.blueprint(query(3), budget, TABLE) == policies.load("random:0").blueprint(query(3), budget, TABLE)
    assert drawn.blueprint(query(3), budget, TABLE).key != other.blueprint(query(3), budget, TABLE).key
    assert (drawn.name, other.name) == ("random", "random:1")


def test_random_is_fair_to_every_site() -> None:
    table = SiteTable(smollm2_like(10).sites[:-1], "without a head", 10)
    blueprints = [policies.load("random").blueprint(query(i), Budget(bits=6), table).weight_bits for i in range(200)]
    for i, site in enumerate(table.nested):
        mean = sum(b[i] for b in blueprints) / len(blueprints)
        assert 5.4 < mean < 6.6, site.name
        assert {b[i] for b in blueprints} == {4, 6, 8}


@settings(max_examples=50, deadline=None)
@given(mean=st.floats(3.0, 8.0))
def test_the_distribution_of_most_entropy_has_its_mean(mean: float) -> None:
    import numpy as np

    gears = np.asarray([3, 4, 5, 6, 8])
    p = _most_entropy(gears, mean)
    assert p.sum() == pytest.approx(1)
    assert float(p @ gears) == pytest.approx(mean, abs=1e-6)
    other = np.zeros(5)  # a step that changes neither sum nor mean leads to less entropy
    other[[0, 1, 2]] = 1.0, -2.0, 1.0

    def entropy(q: np.ndarray) -> float:
        return float(-(q[q > 0] * np.log(q[q > 0])).sum())

    for step in (1e-3, -1e-3):
        if ((p + step * other) >= 0).all():
            assert entropy(p + step * other) < entropy(p) + 1e-12


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["static", "random"])
def test_tiers_and_kv_bits(name: str, tier: str) -> None:
    heads = tuple(KVSite(i, h, 3, 128, {2: 0.3, 4: 0.1, 8: 0.01, 16: 0.0}) for i in range(30) for h in range(3))
    table = TABLE.with_kv(heads)
    policy = policies.load(name)
    assert 4 <= policy.blueprint(profile(0.5), Budget(tier=tier), table).average_weight_bits(table) <= 8
    assert set(policy.blueprint(profile(0.5), Budget(tier=tier), table).kv_bits) == {16}
    kv = policy.blueprint(profile(0.5), Budget(tier=tier, kv_bits=5), table).average_kv_bits(table)
    assert 4.95 <= kv <= 5
    eight = policy.blueprint(profile(0.5), Budget(bits=6, activation_bits=8), table).activation_bits
    assert set(eight) == {8, 16}


def test_bad_budgets_and_seeds() -> None:
    for name in ("static", "random"):
        with pytest.raises(QBEError, match=r"3\.5 bits"):
            policies.load(name).blueprint(profile(0.5), Budget(bits=3.5), TABLE)
    for name, says in (("random:x", "'x' of policy 'random' is no whole number"), ("static:1", "takes no seed")):
        with pytest.raises(QBEError, match=says):
            policies.load(name)
    assert {"random", "static", "tiered", "uniform"} <= set(policies.available())
