"""A prompt that goes on with an earlier one keeps its blueprint, as far as its own budget allows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qbe import policies
from qbe.analysis import Analyzer
from qbe.analysis.profile import QueryProfile
from qbe.blueprint import Blueprint
from qbe.budget import TIER_BITS, Budget, averages
from qbe.policies.allocate import TOLERANCE
from qbe.policies.tiered import TieredPolicy
from qbe.selection.conversations import TAIL, Conversations, Turn
from qbe.selection.selector import BlueprintSelector, Selection
from qbe.sites import SiteTable
from test_policies import smollm2_like

TABLE = smollm2_like(layers=4)
TURN = Turn(Blueprint("x", (6,), (16,), (16,)), "default", 100)
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(deadline=None, max_examples=300)
@given(earlier=st.lists(st.tuples(st.sampled_from([b"", b"a"]), tokens), max_size=8), new=tokens,
       salt=st.sampled_from([b"", b"a"]))  # fmt: skip
def test_the_longest_earlier_prompt_that_begins_it_is_found(
    earlier: list[tuple[bytes, list[int]]], new: list[int], salt: bytes
) -> None:
    found, turns = Conversations(), [replace(TURN, context=i) for i in range(len(earlier))]
    for (whose, ids), turn in zip(earlier, turns, strict=True):
        found.began(whose, ids, turn)

    def goes_on(ids: list[int], tail: int) -> bool:
        length = len(ids) - tail
        return length > 0 and new[:length] == ids[:length] and (tail == 0 or new[-tail:] == ids[length:])

    longest = max(
        (len(ids) - tail for whose, ids in earlier for tail in range(TAIL + 1) if whose == salt and goes_on(ids, tail)),
        default=0,
    )
    turn = found.find(salt, new)
    if not longest:
        assert turn is None
    elif turn is not None:
        whose, ids = earlier[turns.index(turn)]
        assert whose == salt
        assert any(len(ids) - tail == longest and goes_on(ids, tail) for tail in range(TAIL + 1))


def test_who_shares_a_system_prompt_goes_on_with_nobody() -> None:
    found, system = Conversations(), [*range(100, 200)]
    found.began(b"", [*system, 1, 2, 3, 90, 91], TURN)
    assert found.find(b"", [*system, 4, 5, 6, 90, 91]) is None
    assert found.find(b"", [*system, 1, 2, 3, 90, 91, 7, 7, 90, 91]) is TURN
    assert found.find(b"key", [*system, 1, 2, 3, 90, 91, 7, 7, 90, 91]) is None
    # A template that leaves its last tokens out of the history, and writes them again for the new answer.
    assert found.find(b"", [*system, 1, 2, 3, 7, 7, 90, 91]) is TURN
    assert found.find(b"", [*system, 1, 2, 3, 7, 7]) is None


def test_the_oldest_prompts_are_forgotten() -> None:
    found = Conversations(entries=4 * (TAIL + 1))
    for i in range(10):
        found.began(b"", [i] * 20, replace(TURN, context=i))
    known = [found.find(b"", [i] * 21) for i in range(10)]
    assert [None if turn is None else turn.context for turn in known] == [None] * 6 + [6, 7, 8, 9]


class Scored(Analyzer):
    """The score is what the text says."""

    def analyze(self, text: str, token_ids: Any, *, tier: int | None = None) -> QueryProfile:
        return QueryProfile(float(text), "code", 2, {}, 0)


def selector(table: SiteTable = TABLE) -> BlueprintSelector:
    return BlueprintSelector(TieredPolicy(), "tiered", table, Scored(), None, None)


def ask(
    of: BlueprintSelector, score: float, prompt: list[int], salt: bytes = b"", structured: bool = False, **budget: Any
) -> Selection:
    asked = Budget(**budget)
    selected = of.select(of.policy(None), str(score), [], 300, asked, prompt, salt, structured)
    of.began(selected.blueprint, asked, 300, prompt, salt)
    return selected


def bits(blueprint: Blueprint) -> float:
    return round(blueprint.average_weight_bits(TABLE), 1)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_what_is_kept_is_within_what_was_asked_for(seed: int) -> None:
    draw, of, prompt = random.Random(seed), selector(), list[int]()
    for _ in range(6):
        prompt = [*prompt, *(draw.randrange(9) for _ in range(20))]
        low = round(draw.uniform(4.0, 8.0), 1)
        budget: dict[str, Any] = {"tier": draw.choice([*TIER_BITS])}
        budget |= draw.choice(({}, {"within": (low, min(8.0, low + draw.choice((0.0, 1.5))))}, {"bits": low}))
        form = draw.random() < 0.3
        selected = ask(of, draw.choice((0.1, 0.5, 0.9)), list(prompt), structured=form, **budget)
        asked, now = Budget(**budget), selected.blueprint.average_weight_bits(TABLE)
        if asked.bits is not None:
            assert selected.blueprint == selected.asked
        else:
            least = min(selected.profile.least_bits, asked.average_for(1.0))
            assert max(asked.range[0], least) - TOLERANCE <= now <= asked.range[1] + 0.01
        assert selected.blueprint.activation_bits == selected.asked.activation_bits


def test_a_conversation_keeps_its_blueprint_while_its_budget_allows_it() -> None:
    of, turns = selector(), [[*range(50 * n)] for n in range(1, 9)]
    assert bits(ask(of, 0.9, turns[0]).blueprint) == 6.7
    second = ask(of, 0.1, turns[1])
    assert (bits(second.asked), bits(second.blueprint)) == (5.3, 6.7)
    assert bits(ask(of, 0.1, [*turns[1][:49], 7]).blueprint) == 5.3, "another prompt"
    assert bits(ask(of, 0.1, turns[2], salt=b"another key").blueprint) == 5.3
    assert bits(ask(of, 0.1, turns[2], tier="flex").blueprint) == 4.7, "another tier is another wish"
    assert bits(ask(of, 0.5, turns[3], within=(4.3, 5.5)).blueprint) == 4.7, "pressure forbids 6.67"
    assert bits(ask(of, 0.5, turns[4]).blueprint) == 6.0, "and 4.67 is too little for the tier without it"
    assert bits(ask(of, 0.1, turns[5], within=(6.5, 7.0)).blueprint) == 6.7, "a client's own least bits"
    eight = ask(of, 0.1, turns[6], activation_bits=8).blueprint
    assert bits(eight) == 5.3
    assert 8 in eight.activation_bits


def test_a_kept_blueprint_has_the_least_bits_that_a_form_needs() -> None:
    of, turns = selector(), [[*range(50 * n)] for n in range(1, 5)]
    assert bits(ask(of, 0.1, turns[0]).blueprint) == 5.3
    assert bits(ask(of, 0.1, turns[1], structured=True).blueprint) == 6.0, "5.33 is too little for a call"
    plain = ask(of, 0.1, turns[2])
    assert (bits(plain.asked), bits(plain.blueprint)) == (5.3, 6.0)
    assert bits(ask(of, 0.9, turns[3], structured=True).blueprint) == 6.0, "kept, and enough"
    flex = selector()
    assert bits(ask(flex, 0.1, turns[0], tier="flex").blueprint) == 4.7
    assert bits(ask(flex, 0.1, turns[1], structured=True, tier="flex").blueprint) == 5.3, "the highest that flex has"


def test_few_averages_serve_a_tier() -> None:
    assert {t: averages(*b) for t, b in TIER_BITS.items()} == {
        "flex": (4.67, 5.33), "default": (5.33, 6.0, 6.67), "priority": (6.67, 7.33, 8.0),
    }  # fmt: skip
    policy, scores = policies.load("tiered"), [i / 200 for i in range(201)]
    for tier, few in TIER_BITS.items():
        found = {
            policy.blueprint(QueryProfile(s, "code", 2), Budget(tier=tier), TABLE).weight_bits for s in scores
        }  # fmt: skip
        assert len(found) == len(averages(*few))


def test_an_average_has_the_score_that_gives_it() -> None:
    for bits in (5.33, 6.0, 6.67):
        assert Budget().average_for(Budget().score_for(bits)) == bits
    assert [Budget().score_for(bits) for bits in (4.0, 9.0)] == [0.0, 1.0]
    assert Budget(within=(6.0, 6.0)).score_for(6.0) == 0.5


ends = st.tuples(st.floats(3.5, 9.0), st.floats(0.0, 3.0)).map(lambda r: (r[0], r[0] + r[1]))


@settings(max_examples=500)
@given(
    one=ends, low=st.floats(0.0, 2.0), high=st.floats(0.0, 2.0), score=st.floats(0.0, 1.0),
    floor=st.sampled_from((0.0, 6.0)),
)  # fmt: skip
def test_a_higher_range_gives_no_score_less(
    one: tuple[float, float], low: float, high: float, score: float, floor: float
) -> None:
    two = one[0] + low, max(one[0] + low, one[1] + high)
    had, has = (Budget(within=r).average_for(score, floor) for r in (one, two))
    assert had <= has
    for (least, most), average in ((one, had), (two, has)):
        assert least - 0.005 <= average <= most + 0.005
    assert Budget(within=one).average_for(0.0, floor) <= had <= Budget(within=one).average_for(1.0)


@pytest.mark.parametrize("context", [100, 5000])
def test_kv_bits_are_kept_until_the_context_asks_for_fewer(context: int) -> None:
    asked = Blueprint("x", (6,) * len(TABLE.nested), (16,) * len(TABLE.nested), (4,) * TABLE.layers)
    before = replace(asked, kv_bits=(8,) * TABLE.layers)
    table = TABLE.with_kv(kv_sites()) if context else TABLE
    profile = QueryProfile(0.5, "code", 2, {}, context)
    kept = Turn(before, "default", 100).kept(asked, Budget(), profile, table)
    assert kept.kv_bits == (before if context == 100 else asked).kv_bits
    assert Turn(before, "default", 100, own_kv=False).kept(asked, Budget(), profile, table) == asked


def kv_sites() -> Any:
    from qbe.sites import KVSite

    return tuple(KVSite(layer, head, 3, 256) for layer in range(TABLE.layers) for head in range(3))
