"""Fair shares of keys, the order of tiers, and how fast kept places stay. Real scheduler, simulated clock."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_models import request
from qbe.budget import Budget, averages
from qbe.engine.scheduling.scheduler import Scheduler
from qbe.engine.scheduling.sequence import Sequence, Status
from qbe.kvcache.allocator import PageAllocator, PageFormat
from qbe.records.ledger import UNIT
from qbe.server.admission import Admission
from qbe.server.contract import terms
from qbe.server.errors import APIError
from qbe.server.keys import Client
from qbe.server.protocol import Contract
from qbe.server.queues import TierQueues, in_order
from qbe.server.quotas import Quotas, Use
from qbe.server.settings import TIER_NAMES, Key, Settings, Tier, TierName
from qbe.server.tier_order import TierOrder

NOBODY = "0" * 64


def client(name: str, **more: Any) -> Client:
    return Client(name, Key(sha256=NOBODY, **more))


class Simulated:
    """No model: a step takes 20 ms, 5 more for each answer that writes, 1 for each token of a prompt."""

    def __init__(self, places: int = 16, tokens: int = 512, pages: int = 4096, **parts: Any) -> None:
        self.now, self._number = 0.0, 0
        self.scheduler = Scheduler(
            PageAllocator(pages, PageFormat(0, 4096)), max_batch_tokens=tokens, max_sequences=places, context=65536
        )
        found = Settings.model_validate(parts)
        self.queues = TierQueues(lambda: found, places, tokens, lambda: self.now)
        self.queues.guide(self.scheduler)
        self.served: Counter[str] = Counter()

    def ask(self, tier: TierName, key: Client, tokens: int = 3, prompt: int = 2) -> Sequence:
        self._number += 1
        found = request(f"{tier}{self._number}", [self._number % 1000] * prompt, max_tokens=tokens)
        found.priority = self.queues.priority(tier, client=key)
        self.scheduler.add(found)
        return found

    def step(self) -> None:
        work = self.scheduler.schedule()
        for w in work:
            w.sequence.computed = w.start + w.count
            self.served[w.sequence.priority.key] += w.count if w.count > 1 else 0
        self.scheduler.complete(work)
        for w in work:
            if w.samples:
                w.sequence.token_ids.append(1)
                self.served[w.sequence.priority.key] += 2  # as the counters have it
                if len(w.sequence.token_ids) == w.sequence.max_length:
                    self.scheduler.finish(w.sequence, "length")
        seconds = 0.02 + sum(0.005 if w.count == 1 else 0.001 * w.count for w in work)
        self.now += seconds
        self.queues.stepped(seconds)

    def waiting(self, key: str) -> int:
        return sum(s.priority.key == key for s in self.scheduler.waiting)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["flex", "default", "priority"]))
def test_three_keys_get_their_shares_whoever_floods(seed: int, tier: TierName) -> None:
    """The first key asks for twenty times as much, and each has lengths of its own."""
    served = shares_of_three(seed, tier)
    assert min(served) >= 0.8 * sum(served) / 3, served


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["flex", "default"]))
def test_keys_get_their_shares_of_what_a_stream_of_priority_leaves(seed: int, tier: TierName) -> None:
    served = shares_of_three(seed, tier, steps=1200, above=True)
    assert min(served) >= 0.8 * sum(served) / 3, served


def shares_of_three(seed: int, tier: TierName, steps: int = 600, above: bool = False) -> list[int]:
    """Tokens that each key was served in the second half; `above`: beside a stream of priority."""
    rng, one, keys = random.Random(seed), Simulated(places=8), [client("a"), client("b"), client("c")]
    sizes = [(rng.randint(1, 60), rng.randint(1, 200)) for _ in keys]
    for number in range(steps):
        for key, most, (tokens, prompt) in zip(keys, (160, 8, 8), sizes, strict=True):
            while one.waiting(key.name) < most:
                one.ask(tier, key, rng.randint(1, tokens), rng.randint(1, prompt))
        while above and not any(s.priority.key == "p" for s in (*one.scheduler.waiting, *one.scheduler.running)):
            one.ask("priority", client("p"), 40, 30)
        if number == steps // 2:
            one.served.clear()
        one.step()
    return [one.served[key.name] for key in keys]


def test_equal_requests_get_equal_shares_and_weights_count() -> None:
    one, keys = Simulated(places=8), [client("a"), client("b"), client("c", weight=2.0)]
    for number in range(600):
        for key, most in zip(keys, (100, 5, 5), strict=True):
            while one.waiting(key.name) < most:
                one.ask("default", key, 20, 30)
        if number == 200:
            one.served.clear()
        one.step()
    total = sum(one.served.values())
    for key, share in (("a", 0.25), ("b", 0.25), ("c", 0.5)):
        assert one.served[key] >= 0.8 * share * total, one.served


def test_one_answer_of_a_quiet_key_passes_a_flood() -> None:
    one = Simulated(places=4)
    for _ in range(200):
        one.ask("default", client("a"), 50)
    for _ in range(20):
        one.step()
    late = one.ask("default", client("b"), 2)
    for _ in range(60):
        one.step()
    assert late.status is Status.FINISHED


def test_who_was_away_has_saved_nothing_up() -> None:
    one = Simulated(places=4)
    for _ in range(1000):
        while one.waiting("a") < 8:
            one.ask("default", client("a"), 20)
        one.step()
    one.served.clear()
    for _ in range(1000):
        for key in ("a", "b"):
            while one.waiting(key) < 8:
                one.ask("default", client(key), 20)
        one.step()
    assert 0.8 <= one.served["a"] / one.served["b"] <= 1.25


def test_a_key_has_a_queue_of_its_own_and_answers_at_once() -> None:
    admission, limits = Admission(running=2), Settings().limits
    for _ in range(66):
        admission.enter(1, limits, "flex", client("a"))
    with pytest.raises(APIError, match="wait already"):
        admission.enter(1, limits, "flex", client("a"))
    for _ in range(64):
        admission.enter(1, limits, "flex", client("b"))
    few = client("c", concurrent=2)
    admission.enter(2, limits, "flex", few)
    with pytest.raises(APIError, match="may have 2") as refused:
        admission.enter(1, limits, "priority", few)
    assert refused.value.status == 429
    admission.leave(1, "flex", client=few)
    admission.enter(1, limits, "priority", few)
    with pytest.raises(APIError) as refused:
        admission.enter(3, limits, "priority", few)
    assert refused.value.status == 400


def test_days_and_months_have_budgets() -> None:
    now = [datetime(2026, 11, 30, 23, 0, tzinfo=UTC)]
    quotas, key = Quotas(lambda: now[0]), client("a", tokens_per_day=100, cost_per_month=2.0)
    quotas.reserve(key, Use(60, UNIT))
    with pytest.raises(APIError, match="40 are left") as refused:
        quotas.reserve(key, Use(41, 0))
    assert (refused.value.status, refused.value.code) == (429, "insufficient_quota")
    assert refused.value.retry_after == 3600
    quotas.add("a", Use(20, UNIT))
    quotas.release(key, Use(60, UNIT))
    quotas.reserve(key, Use(80, 0))
    quotas.release(key, Use(80, 0))
    with pytest.raises(APIError, match="2 in cost a month"):
        quotas.reserve(key, Use(1, 3 * UNIT // 2))
    quotas.reserve(client("b"), Use(10**9, 10**9 * UNIT))
    now[0] = datetime(2026, 12, 1, 0, 0, 1, tzinfo=UTC)
    quotas.reserve(key, Use(100, 2 * UNIT))


Event = tuple[TierName, int, int, bool]
EVENTS = st.lists(
    st.tuples(st.sampled_from(TIER_NAMES), st.integers(0, 4), st.integers(1, 40), st.booleans()),
    min_size=1,
    max_size=60,
)


@settings(max_examples=1000, deadline=None)
@given(EVENTS, st.integers(1, 32), st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]))
def test_the_order_of_tiers_is_never_inverted(load: list[Event], places: int, shift: float) -> None:
    """Whatever comes and goes: of all answers inside, a dearer tier's has at least the bits of a cheaper one's."""
    now = [0.0]
    given_settings, admission = Settings(), Admission(places, lambda: now[0])
    inside: list[tuple[TierName, str, tuple[float, float]]] = []
    for tier, key, count, leaves in load:
        now[0] += 0.1
        if leaves:
            for _ in range(min(count, len(inside))):
                gone, name, found = inside.pop(key % len(inside))
                admission.leave(1, gone, client=client(name))
                admission.order.leave(gone, found, 1)
            continue
        for _ in range(count):
            brownout = admission.brownout(given_settings.limits, tier)
            assert brownout <= admission.brownout(given_settings.limits, "flex")  # the cheapest sinks first
            try:
                admission.enter(1, given_settings.limits, tier, client(str(key)))
            except APIError:
                break
            asked = terms(tier, Contract(), given_settings, brownout, shift)
            found = admission.order.within(tier, asked.tier_range, asked.tier_settings.bits[1])
            admission.order.enter(tier, found, 1)
            inside.append((tier, str(key), found))
            assert 4.3 <= found[0] <= found[1] <= 8.0
        ranges = {t: [r for name, _, r in inside if name == t] for t in TIER_NAMES}
        for low, high in (("flex", "default"), ("default", "priority"), ("flex", "priority")):
            for end in (0, 1):  # every score's bits lie between the ends in the same place
                assert max((r[end] for r in ranges[low]), default=0.0) <= min(
                    (r[end] for r in ranges[high]), default=99.0
                )


@settings(max_examples=1000, deadline=None)
@given(EVENTS, st.integers(1, 32), st.integers(0, 2**32 - 1))
def test_conversations_that_keep_their_bits_do_not_turn_the_order_around(
    load: list[Event], places: int, seed: int
) -> None:
    """What answers inside read, each for a score of its own: for any one score a dearer tier's is never below."""
    draw, given_settings = random.Random(seed), Settings()
    admission = Admission(places)
    inside: list[tuple[TierName, tuple[float, float]]] = []
    for tier, key, count, leaves in load:
        if leaves:
            for _ in range(min(count, len(inside))):
                gone, found = inside.pop(draw.randrange(len(inside)))
                admission.leave(1, gone, client=client("x"), within=found)
            continue
        for _ in range(count):
            brownout = admission.brownout(given_settings.limits, tier)
            try:
                admission.enter(1, given_settings.limits, tier, client("x"))
            except APIError:
                break
            asked = terms(tier, Contract(), given_settings, brownout)
            found = admission.order.within(tier, asked.tier_range, asked.tier_settings.bits[1])
            admission.order.enter(tier, found, 1)
            if key % 2:  # its conversation has another of its range's averages, as an assignment meets it
                bits = draw.choice(averages(*found))
                kept = admission.order.keep(tier, found, bits - draw.choice((0.0, 0.03)), 1)
                assert kept is None or kept == pytest.approx((bits, bits), abs=0.03)
                found = kept or found
            inside.append((tier, found))
        for score in (0.0, 0.3, 0.5, 0.7, 1.0):
            read = {t: [Budget(within=r).average_for(score) for name, r in inside if name == t] for t in TIER_NAMES}
            for low, high in (("flex", "default"), ("default", "priority"), ("flex", "priority")):
                assert max(read[low], default=0.0) <= min(read[high], default=99.0)


def test_a_conversation_keeps_its_bits_where_the_order_allows_it() -> None:
    order = TierOrder()
    order.enter("flex", (4.3, 5.5), 1)
    order.enter("default", (5.0, 7.0), 2)
    assert order.keep("default", (5.0, 7.0), 5.3, 1) == (5.33, 5.33), "as much as flex can have"
    assert order.within("priority", (4.3, 8.0), 8.0) == (5.33, 8.0)
    assert order.keep("flex", (4.3, 5.5), 5.33, 1) == (5.33, 5.33)
    assert order.keep("default", (5.0, 7.0), 4.67, 1) is None
    order.leave("default", (5.33, 5.33), 1)
    order.leave("flex", (5.33, 5.33), 1)
    assert order.keep("default", (5.0, 7.0), 4.67, 1) == (4.67, 4.67)
    order.enter("flex", (4.3, 4.3), 1)
    assert order.keep("flex", (4.3, 4.3), 5.33, 1) is None, "more than the dearer one beside it has"


def test_a_flood_of_flex_does_not_sink_a_lone_default() -> None:
    admission, limits = Admission(16), Settings().limits
    for _ in range(80):
        admission.enter(1, limits, "flex")
    assert admission.brownout(limits, "flex") == 1
    assert admission.brownout(limits, "default") == 0
    tiers = Settings().tiers
    assert terms("flex", None, Settings(), 1.0).tier_range == (tiers.flex.bits[0],) * 2


def test_an_order_leaves_what_has_left() -> None:
    order = TierOrder()
    order.enter("flex", (4.3, 5.5), 2)
    assert order.within("default", (4.3, 4.3), 7.0) == (4.3, 5.5)
    order.leave("flex", (4.3, 5.5), 1)
    order.leave("flex", (4.3, 5.5), 1)
    assert order.within("default", (4.3, 4.3), 7.0) == (4.3, 4.3)
    order.enter("default", (4.3, 4.3), 1)
    assert order.within("flex", (4.3, 5.5), 5.5) == (4.3, 4.3)
    assert order.within("priority", (6.5, 8.0), 8.0) == (6.5, 8.0)


def took(one: Simulated, prompt: int, tokens: int) -> float:
    """Seconds of a priority answer that comes now."""
    began, found = one.now, one.ask("priority", client("p"), tokens, prompt)
    while found.status is not Status.FINISHED:
        one.step()
    return one.now - began


FLOOD = st.tuples(st.sampled_from(["flex", "default"]), st.integers(1, 120), st.integers(1, 900))


@settings(max_examples=6, deadline=None)
@given(st.lists(FLOOD, min_size=1, max_size=4), st.integers(1, 600), st.integers(16, 60))
def test_priority_takes_at_most_half_as_long_again_under_any_flood(
    flood: list[tuple[TierName, int, int]], prompt: int, tokens: int
) -> None:
    alone = took(Simulated(), prompt, tokens)
    one, times = Simulated(), list[float]()
    for turn in range(3):
        for _ in range(27 + turn):  # others come and go between
            for number, (tier, written, read) in enumerate(flood):
                while one.waiting(f"f{number}") < 20:
                    one.ask(tier, client(f"f{number}"), written, read)
            one.step()
        times.append(took(one, prompt, tokens))
    assert max(times) <= 1.5 * alone  # and the rest of the step that runs when it comes


@example([("flex", 1, 321), ("flex", 1, 1)])  # the second waits while the first one's prompt is read
@settings(max_examples=4, deadline=None)
@given(st.lists(FLOOD, min_size=1, max_size=3))
def test_others_go_on_beside_a_stream_of_priority(flood: list[tuple[TierName, int, int]]) -> None:
    one = Simulated()
    for _ in range(600):
        for number, (tier, written, read) in enumerate(flood):
            while one.waiting(f"f{number}") < 12:
                one.ask(tier, client(f"f{number}"), written, read)
        while one.waiting("p") + sum(s.priority.key == "p" for s in one.scheduler.running) < 2:
            one.ask("priority", client("p"), 40, 300)
        one.step()
    # Flex has patience with default (tests/test_server_queues.py says how much), so that alone may have gone on.
    tiers = [tier for tier, _, _ in flood]
    going_on = "default" if "default" in tiers else "flex"
    assert all(one.served[f"f{number}"] > 0 for number, tier in enumerate(tiers) if tier == going_on)


def test_priority_takes_the_pages_of_others() -> None:
    one = Simulated(places=16, pages=8)
    others = [one.ask("flex", client("a"), tokens=200, prompt=50) for _ in range(7)]
    for _ in range(3):
        one.step()
    assert len(one.scheduler.running) >= 4
    late = one.ask("priority", client("p"), tokens=4, prompt=120)
    for _ in range(3):
        one.step()
    assert late.status is not Status.WAITING
    assert late.preemptions == 0
    assert any(o.preemptions for o in others)


def test_a_tier_keeps_the_bits_that_a_request_sets() -> None:
    from types import SimpleNamespace

    asked: Any = SimpleNamespace(terms=terms("default", Contract(min_bits=6.0), Settings(), 1.0))
    assert in_order(asked, Admission(2), 1) is asked


def test_a_settings_file_has_the_new_limits(tmp_path: Path) -> None:
    from qbe.server.settings_file import load

    path = tmp_path / "serve.toml"
    path.write_text(
        f'[keys.a]\nsha256 = "{NOBODY}"\nweight = 2.0\nconcurrent = 4\ntokens_per_day = 5\ncost_per_month = 1.5\n'
        "shared_prefixes = true\n[http]\nprivate = true\ncors_origins = ['https://example.org']\n"
    )
    found = load(path)
    assert (found.keys["a"].weight, found.keys["a"].concurrent, found.http.private) == (2.0, 4, True)
    assert Tier(bits=(5.0, 7.0)).floor is None
