"""The blueprint cache: what shares a blueprint, what never does, how much is kept."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_samples import TABLE, Counting, nudged, open_at, profile_of, profiles, small_table
from qbe import QBEError, policies
from qbe.analysis import Analyzer
from qbe.analysis.features import FEATURES
from qbe.blueprint import Blueprint
from qbe.budget import TIERS, Budget
from qbe.cache.fingerprint import BITS, Fingerprint
from qbe.cache.memory import GROUP_ENTRIES, NEAR_BITS, CachedBlueprint, Memory
from qbe.policies import kv
from qbe.sites import SiteTable

LIMITED = replace(TABLE, context=2048)
ANY = Blueprint("any", (), (), ())


class Query(NamedTuple):
    """A made-up fingerprint."""

    cell: tuple
    digest: bytes
    bits: int


def apart(a: int, b: int) -> int:
    return (a ^ b).bit_count()


def test_bits_that_differ_tell_the_angle() -> None:
    """SimHash: 64 a / pi of the bits differ, give or take, at an angle of a."""
    rng = np.random.default_rng(0)
    for wanted in (0.2, 0.8):
        found = []
        for _ in range(60):
            a, b = np.linalg.qr(rng.standard_normal((len(FEATURES), 2)))[0].T
            x, y = (profile_of(v) for v in (a, np.cos(wanted) * a + np.sin(wanted) * b))
            found.append(apart(Fingerprint(x, Budget()).bits, Fingerprint(y, Budget()).bits))
        assert np.mean(found) == pytest.approx(BITS * wanted / np.pi, abs=1.5)


def test_a_fingerprint_depends_on_the_features_alone_and_the_cell_on_the_rest() -> None:
    profile = profiles(1)[0]
    found = Fingerprint(profile, Budget())
    same = Fingerprint(replace(profile, context=999), Budget())
    assert (same.cell, same.digest, same.bits) == (found.cell, found.digest, found.bits)
    for other, budget in (
        (profile, Budget(bits=5)), (profile, Budget(tier="flex")), (profile, Budget(activation_bits=8)),
        (profile, Budget(kv_bits=4)), (profile, Budget(kv_error=0.1)),
        (replace(profile, tier=3, cluster=4), Budget()),
        (replace(profile, score=1 - round(profile.score)), Budget()),
    ):  # fmt: skip
        changed = Fingerprint(other, budget)
        assert changed.cell != found.cell
        assert (changed.digest, changed.bits) == (found.digest, found.bits)
    eight, full_activations = (
        Fingerprint(profile, Budget(activation_bits=8, high_precision_tokens=c)) for c in (False, True)
    )
    assert eight.cell != full_activations.cell


def test_tier_one_has_fingerprints_too() -> None:
    analyzer = Analyzer()
    a, b, c = (
        Fingerprint(analyzer.analyze(t, range(9)), Budget()) for t in ("Who is Ann?", "Who is Bob?", "Write code.")
    )
    assert (a.cell, a.digest, a.bits) == (b.cell, b.digest, b.bits)
    assert a.digest != c.digest


def test_a_repeated_query_is_an_exact_hit_and_one_like_it_a_near_one() -> None:
    cache, policy, profile = open_at(None), Counting(), profiles(1, context=20)[0]
    first, kind = cache.blueprint(policy, profile, Budget())
    assert (kind, policy.asked) == ("miss", 1)
    assert cache.blueprint(policy, profile, Budget()) == (first, "exact")
    assert cache.blueprint(policy, nudged(profile), Budget()) == (first, "near")
    assert policy.asked == 1
    assert cache.blueprint(policy, nudged(profile), Budget(), near=False) == (first, "miss")
    assert cache.blueprint(policy, nudged(profile), Budget()) == (first, "exact")
    numbers = cache.numbers
    assert (numbers.exact, numbers.near, numbers.misses, numbers.entries) == (2, 1, 2, 2)


def test_a_near_hit_is_bounded() -> None:
    memory, cell = Memory(100), ("cell",)
    memory.open(cell, [CachedBlueprint(cell, b"a", 0, 0, 9, ANY)])
    within, beyond = ((1 << n) - 1 for n in (NEAR_BITS, NEAR_BITS + 1))
    assert memory.get(Query(cell, b"b", within), 5) == (ANY, "near")
    assert memory.get(Query(cell, b"b", beyond), 5) is None
    assert memory.get(Query(cell, b"a", beyond), 9) == (ANY, "exact")
    assert memory.get(Query(cell, b"a", within), 10) is None


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 50), tier=st.sampled_from(TIERS), bits=st.none() | st.floats(4.2, 9), eight=st.booleans(),
    kv_bits=st.none() | st.floats(2, 16), contexts=st.lists(st.integers(0, 400), min_size=8, max_size=8),
)  # fmt: skip
def test_a_hit_is_what_the_policy_would_have_chosen(seed, tier, bits, eight, kv_bits, contexts) -> None:
    """The budget is met as by a fresh blueprint: for the policies of this package a hit is that blueprint."""
    cache, budget = open_at(None), Budget(bits, tier, 8 if eight else 16, kv_bits)
    policy = policies.load("tiered")
    rng = np.random.default_rng(seed)
    middle = rng.standard_normal(len(FEATURES))
    hits = 0
    for context in contexts * 3:
        profile = profile_of(middle + 0.15 * rng.standard_normal(len(FEATURES)), context)
        served, kind = cache.blueprint(policy, profile, budget)
        hits += kind in ("exact", "near")
        assert served == policy.blueprint(profile, budget, TABLE)
    assert hits


@given(
    context=st.integers(0, 3000),
    other=st.integers(0, 3000),
    weight_bytes=st.integers(0, 10**7),
    table=st.sampled_from([TABLE, LIMITED]),
)
def test_contexts_that_the_kv_policy_does_not_tell_apart(
    context: int, other: int, weight_bytes: int, table: SiteTable
) -> None:
    profile = profiles(1)[0]
    first, last = kv.same_contexts(context, Budget(), table, weight_bytes)
    assert first <= context <= last
    one, two = (kv.average_bits(replace(profile, context=c), Budget(), table, weight_bytes) for c in (context, other))
    assert one == two or not first <= other <= last


def test_a_policy_without_a_version_is_always_asked() -> None:
    cache, policy, profile = open_at(None), Counting(), profiles(1)[0]
    policy.cache_version = None
    assert [cache.blueprint(policy, profile, Budget())[1] for _ in range(3)] == [None] * 3
    assert policy.asked == 3
    assert cache.numbers.entries == 0


def test_a_budget_that_cannot_be_met_is_refused_and_not_kept() -> None:
    cache, policy, profile = open_at(None), Counting(), profiles(1)[0]
    for _ in range(2):
        with pytest.raises(QBEError, match="cannot be met"):
            cache.blueprint(policy, profile, Budget(bits=2))
    assert policy.asked == 2


def test_groups_and_memory_are_bounded_and_the_oldest_go() -> None:
    memory = Memory(3 * GROUP_ENTRIES)
    cells = [(c,) for c in range(4)]
    for cell in cells[:3]:
        memory.open(cell, (CachedBlueprint(cell, i.to_bytes(2), 0, 0, 9, ANY) for i in range(GROUP_ENTRIES + 5)))
    assert memory.entries == 3 * GROUP_ENTRIES
    far = 2**64 - 1
    assert memory.get(Query((0,), (4).to_bytes(2), far), 0) is None  # overwritten
    assert memory.get(Query((0,), (5).to_bytes(2), far), 0) == (ANY, "exact")
    memory.open(cells[3], [CachedBlueprint(cells[3], b"x", 0, 0, 9, ANY)])
    assert [c in memory for c in cells] == [True, False, True, True]  # cell 0 was asked for last


def test_what_memory_dropped_comes_from_disk(tmp_path: Path) -> None:
    cache, policy = open_at(tmp_path / "b.sqlite"), Counting()
    cache.capacity = 8
    queries = [(p, Budget(bits=5 + i % 20 / 10)) for i, p in enumerate(profiles(60))]  # of many cells
    for query in queries:
        cache.blueprint(policy, *query)
    assert cache.numbers.entries <= 8
    asked = policy.asked
    assert all(cache.blueprint(policy, *query)[1] in ("exact", "near") for query in queries)
    assert policy.asked == asked


def test_threads_share_a_cache(tmp_path: Path) -> None:
    cache, policy, failed = open_at(tmp_path / "b.sqlite"), policies.load("tiered"), []
    queries = profiles(80)
    expected = [policy.blueprint(p, Budget(), TABLE) for p in queries]

    def work() -> None:
        try:
            for profile, blueprint in zip(queries, expected, strict=True):
                assert cache.blueprint(policy, profile, Budget())[0] == blueprint
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert not failed
    numbers = cache.numbers
    assert numbers.exact + numbers.near + numbers.misses == 320


@pytest.mark.parametrize("change", ["table", "policy", "kv"])
def test_another_model_store_or_policy_has_other_entries(tmp_path: Path, change: str) -> None:
    path, profile = tmp_path / "b.sqlite", profiles(1)[0]
    first = open_at(path)
    first.blueprint(Counting(), profile, Budget())
    assert first.blueprint(Counting(), profile, Budget())[1] == "exact"
    first.close()
    policy, table = Counting(), TABLE
    if change == "table":  # measured anew
        table = small_table(seed=1)
    elif change == "kv":
        table = replace(TABLE, kv=(replace(TABLE.kv[0], entropy=(0.5, 0.1)), *TABLE.kv[1:]))
    else:
        policy.cache_version = "2"
    assert open_at(path, table).blueprint(policy, profile, Budget())[1] == "miss"
    assert open_at(path).blueprint(Counting(), profile, Budget())[1] == "exact"
