"""Policies: budgets are met, allocations are optimal, bad budgets get one line."""

from __future__ import annotations

import itertools
import operator
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe import policies
from qbe.allocation import knapsack as search
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import TIERS, Budget
from qbe.errors import QBEError
from qbe.policies.allocate import allocate
from qbe.sites import Role, Site, SiteTable

SHAPES = {
    Role.ATTENTION_Q: (576, 576), Role.ATTENTION_K: (192, 576), Role.ATTENTION_V: (192, 576),
    Role.ATTENTION_O: (576, 576), Role.FFN_GATE: (1536, 576), Role.FFN_UP: (1536, 576), Role.FFN_DOWN: (576, 1536),
}  # fmt: skip


def smollm2_like(layers: int = 30, seed: int = 0) -> SiteTable:
    rng = random.Random(seed)

    def site(name: str, role: Role, layer: int | None, shape: tuple[int, int]) -> Site:
        kl = rng.lognormvariate(-7, 1.5)
        return Site(name, role, layer, shape, True, (4, 6, 8, 16), {}, {4: kl, 6: kl / 14, 8: kl / 200, 16: 0.0})

    sites = [site(f"layers.{i}.{r}", r, i, s) for i in range(layers) for r, s in SHAPES.items()]
    return SiteTable((*sites, site("lm_head", Role.OUTPUT_HEAD, None, (49152, 576))), "like", layers)


TABLE = smollm2_like()


def profile(score: float) -> QueryProfile:
    return QueryProfile(score, "code", 2)


@settings(max_examples=25, deadline=None)
@given(bits=st.floats(4.0, 16.0))
def test_tiered_meets_a_budget_within_a_twentieth_of_a_bit(bits: float) -> None:
    blueprint = policies.load("tiered").blueprint(profile(0.3), Budget(bits=bits), TABLE)
    assert bits - 0.05 <= blueprint.average_weight_bits(TABLE) <= bits + 1e-6


def test_different_scores_get_different_blueprints_and_equal_ones_share() -> None:
    tiered = policies.load("tiered")
    found = [tiered.blueprint(profile(s), Budget(), TABLE) for s in (0.1, 0.5, 0.9)]
    assert len({b.key for b in found}) == 3
    averages = [b.average_weight_bits(TABLE) for b in found]
    assert averages == sorted(averages)
    assert tiered.blueprint(profile(0.101), Budget(), TABLE) is found[0]


@pytest.mark.parametrize("tier", TIERS)
def test_tiers_bound_the_average(tier: str) -> None:
    low = policies.load("tiered").blueprint(profile(0.0), Budget(tier=tier), TABLE).average_weight_bits(TABLE)
    high = policies.load("tiered").blueprint(profile(1.0), Budget(tier=tier), TABLE).average_weight_bits(TABLE)
    assert 4.0 <= low < high <= 8.0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.floats(4.2, 12))
def test_allocation_is_optimal_on_models_small_enough_to_enumerate(seed: int, bits: float) -> None:
    rng = random.Random(seed)
    sites = tuple(
        Site(f"s{i}", Role.FFN_UP, 0, (rng.randint(1, 40), 64), True, (4, 6, 8, 16), {},
             {4: (k := rng.random()), 6: k / rng.uniform(2, 20), 8: k / 100, 16: 0.0})
        for i in range(5)
    )  # fmt: skip
    table = SiteTable(sites, "small", 1)

    def cost(gears: tuple[int, ...]) -> float:
        return sum(s.sensitivity[g] for s, g in zip(sites, gears, strict=True))

    def average(gears: tuple[int, ...]) -> float:
        return Blueprint.of("x", table, gears).average_weight_bits(table)

    everything = [g for g in itertools.product((4, 6, 8, 16), repeat=5) if average(g) <= bits + 1e-9]
    near = [g for g in everything if average(g) >= bits - 0.05] or everything
    ours = allocate(table, bits, {})
    assert average(ours) <= bits + 1e-6
    assert cost(ours) <= min(map(cost, near)) * 1.002 + 1e-5


def test_a_search_ends_at_a_count_of_nodes_so_that_a_busy_machine_finds_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(3)  # whose search takes 109 nodes, unlike most
    sizes = [rng.choice((1, 4, 14, 16, 501)) for _ in range(60)]
    scales = [4.0**3 * 10 ** rng.uniform(-6, -1) for _ in sizes]
    costs = [{g: scale * 4.0**-g * rng.uniform(0.7, 1.3) for g in (3, 4, 5, 6, 8)} for scale in scales]

    def found() -> tuple[float, float]:
        gears = search.solve(costs, sizes, 5.03, 4.98)
        assert gears is not None
        return sum(c[g] for c, g in zip(costs, gears, strict=True)), sum(map(operator.mul, sizes, gears)) / sum(sizes)

    whole, _ = found()
    monkeypatch.setattr(search, "NODES", 1)
    cut, average = found()
    assert whole < cut < 1.05 * whole
    assert 4.98 <= average <= 5.03 + 1e-6


def test_floors_hold_until_the_budget_forbids_them() -> None:
    floors = {Role.OUTPUT_HEAD: 6}
    assert allocate(TABLE, 5.0, floors)[-1] >= 6
    assert allocate(TABLE, 4.0, floors) == (4,) * len(TABLE.nested)


def test_tiered_goes_by_what_is_measured_of_state_spaces_too() -> None:
    roles = {Role.ATTENTION_Q: Role.SSM_IN, Role.ATTENTION_O: Role.SSM_OUT}
    table = replace(TABLE, sites=tuple(replace(s, role=roles.get(s.role, s.role)) for s in TABLE))
    for bits in (4.5, 5.0, 6.0):
        budget = Budget(bits=bits)
        tiered, static = (policies.load(n).blueprint(profile(0.5), budget, table) for n in ("tiered", "static"))
        assert tiered.weight_bits == static.weight_bits
    low = [s.role for s, b in zip(table.nested, tiered.weight_bits, strict=True) if b == 4]
    assert Role.SSM_IN in low


def test_uniform_takes_only_the_stores_own_widths() -> None:
    uniform = policies.load("uniform")
    assert set(uniform.blueprint(profile(0.5), Budget(bits=6), TABLE).weight_bits) == {6}
    for tier, bits in {"flex": 4, "default": 6, "priority": 8}.items():
        assert set(uniform.blueprint(profile(0.5), Budget(tier=tier), TABLE).weight_bits) == {bits}
    with pytest.raises(QBEError, match=r"5 bits: the store has 4, 6, 8, 16"):
        uniform.blueprint(profile(0.5), Budget(bits=5), TABLE)


@pytest.mark.parametrize("name", ["tiered", "uniform"])
def test_activation_bits_reach_every_site_but_the_head(name: str) -> None:
    policy = policies.load(name)
    sixteen, eight = (policy.blueprint(profile(0.5), Budget(bits=6, activation_bits=a), TABLE) for a in (16, 8))
    assert set(sixteen.activation_bits) == {16}
    for site, bits in zip(TABLE.nested, eight.activation_bits, strict=True):
        assert bits == (16 if site.role is Role.OUTPUT_HEAD else 8)
    assert eight.weight_bits == sixteen.weight_bits
    assert eight.key != sixteen.key
    assert eight.bytes_per_token(TABLE) == sixteen.bytes_per_token(TABLE)
    described = eight.describe(TABLE)["sites"]
    assert [s["activation_bits"] for s in described] == list(eight.activation_bits)


def test_bad_budgets_and_policies() -> None:
    with pytest.raises(QBEError, match=r"lowest average is 4\.00"):
        policies.load("tiered").blueprint(profile(0.5), Budget(bits=3.5), TABLE)
    bare = SiteTable(tuple(Site(s.name, s.role, s.layer, s.shape, True, s.gears) for s in TABLE), "bare", 30)
    with pytest.raises(QBEError, match="no sensitivity table"):
        policies.load("tiered").blueprint(profile(0.5), Budget(), bare)
    with pytest.raises(QBEError, match=r"^unknown policy 'a\\nb{62}: choose one of"):  # one line, no more of it
        policies.load("a\n" + "b" * 999)
    with pytest.raises(QBEError, match="unknown policy 'nope'"):
        policies.load("nope")
    with pytest.raises(QBEError, match="unknown tier"):
        Budget(tier="gold")
    for bits in (0, 17, float("nan")):
        with pytest.raises(QBEError, match="out of range"):
            Budget(bits=bits)
    for activations in (4, 9, 0, 8.0, "8", None):
        with pytest.raises(QBEError, match=r"activation_bits is .*, but must be 8 or 16"):
            Budget(activation_bits=activations)
    n = len(TABLE.nested)
    with pytest.raises(QBEError, match=r"8 bits are no width of lm_head's activations \(they have 16\)"):
        Blueprint.of("x", TABLE, (4,) * n, (8,) * n)
    with pytest.raises(QBEError, match=r"12 bits are no width of layers\.0\.attention_q's activations"):
        Blueprint.of("x", TABLE, (4,) * n, (12,) * n)
    with pytest.raises(QBEError, match="a blueprint for 3 sites does not fit"):
        Blueprint.of("x", TABLE, (4,) * n, (16,) * 3)
    with pytest.raises(QBEError, match="5 bits are not in the store"):
        Blueprint.of("x", TABLE, (5,) * len(TABLE.nested))


def test_a_plug_in_is_found_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "mine", "somewhere:Mine"

        def __init__(self, made: object) -> None:
            self.made = made

        def load(self) -> object:
            return lambda: self.made

    uniform = policies.load("uniform")
    monkeypatch.setattr(policies, "entry_points", lambda group: [Entry(uniform)])
    assert policies.load("mine") is uniform
    assert "mine" in policies.available()
    monkeypatch.setattr(policies, "entry_points", lambda group: [Entry(object())])
    with pytest.raises(QBEError, match="lacks name"):
        policies.load("mine")
    monkeypatch.setattr(policies, "entry_points", lambda group: [])
    with pytest.raises(QBEError, match="no policy is registered: install"):
        policies.load("mine")


def test_a_plug_in_of_version_0_1_need_not_be_a_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has three attributes; what it does not say of itself is the base class's default."""

    class Plain:
        name, needs_sensitivity, reads_prompt = "plain", False, True

        def blueprint(self, profile: QueryProfile, budget: Budget, table: SiteTable) -> Blueprint:
            return Blueprint.of("plain", table, (4,) * len(table.nested))

    class Entry:
        name, value = "plain", "somewhere:Plain"

        def load(self) -> type:
            return Plain

    monkeypatch.setattr(policies, "entry_points", lambda group: [Entry()])
    policy = policies.load("plain")
    assert (policy.name, policy.reads_prompt, policy.cache_version, policy.has_routers) == ("plain", True, None, False)
    policy.prepare(TABLE)
    assert policy.routers(TABLE) is None
    assert policy.blueprint(QueryProfile(0.5, "code", 2), Budget(), TABLE).policy == "plain"


@pytest.mark.parametrize("within", [5, (1,), ("a", "b"), (7.0, 5.0), (0.5, 4.0), (5.0, 10**400), (True, 4)])
def test_ranges_that_are_none_are_refused_in_one_short_line(within: Any) -> None:
    with pytest.raises(QBEError, match=r"within is .* must be two numbers of bits") as error:
        Budget(within=within)
    assert len(str(error.value)) < 160


def test_high_precision_tokens_is_yes_or_no() -> None:
    with pytest.raises(QBEError, match="high_precision_tokens is 'no', but must be true or false"):
        Budget(high_precision_tokens="no")  # type: ignore[arg-type]
    with pytest.raises(QBEError, match="high_precision_tokens is for activation_bits 8, and they are 16"):
        Budget(high_precision_tokens=True)


def test_careful_tokens_is_still_a_name_of_it() -> None:
    assert Budget(activation_bits=8, careful_tokens=True) == Budget(activation_bits=8, high_precision_tokens=True)
