"""Detectors and the ladder by themselves: what trips, what is done, and when it is taken back."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from qbe.engine.sampling.answer_scoring import AnswerScore
from qbe.server.health.detectors import AnswerFacts, Detectors, Rating
from qbe.server.health.ladder import Ladder
from qbe.server.health.loops import ends_in_loop
from qbe.server.health.scorer import ScoredAnswer
from qbe.server.health.settings import DetectorName, Health
from qbe.server.health.syndromes import DETECTORS, RUNGS
from qbe.server.health.windows import Ratio, Reading, Shares


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ladder(**settings: Any) -> tuple[Ladder, Clock]:
    clock, found = Clock(), Health(**{"hold_s": 10.0} | settings)
    return Ladder(lambda: found, clock), clock


def says(**values: float) -> dict[DetectorName, Reading]:
    return {name: Reading(value, 64) for name, value in values.items()}  # type: ignore[misc]


def test_every_detector_has_a_threshold_and_a_name() -> None:
    assert set(get_args(DetectorName)) == set(DETECTORS)
    assert set(DETECTORS) <= set(Health.model_fields)


def test_an_action_is_taken_at_once_and_given_back_late() -> None:
    one, clock = ladder()
    assert one.look(says(live_kl=0.4)) is None
    change = one.look(says(live_kl=0.6))
    assert change is not None
    assert (change.action, change.taken, change.cause, change.value) == ("floor_up", True, "live_kl", 0.6)
    assert one.epoch == 1
    clock.now = 9.0
    assert one.look(says(live_kl=0.1)) is None
    clock.now = 10.5
    change = one.look({})
    assert change is not None
    assert (change.action, change.taken) == ("floor_up", False)
    assert not one.taken


def test_it_goes_up_rung_by_rung_while_that_does_not_help() -> None:
    one, clock = ladder()
    for action in RUNGS:
        change = one.look(says(acceptance=0.0))
        assert change is not None
        assert change.action == action
    assert not one.exhausted
    assert one.look(says(acceptance=0.0)) is None
    assert one.exhausted
    for action in reversed(RUNGS):  # and down from the top, a hold each
        clock.now += 10
        change = one.look({})
        assert change is not None
        assert (change.action, change.taken) == (action, False)
        assert one.look({}) is None
    assert not one.exhausted


def test_what_is_needed_again_soon_is_held_longer() -> None:
    one, clock = ladder()
    for times in (1, 2, 4, 8, 16, 16):
        assert one.look(says(live_kl=0.6)) is not None
        clock.now += 10 * times - 1
        assert one.look({}) is None
        clock.now += 1
        assert one.look({}) is not None
    clock.now += 4 * 16 * 10
    assert one.look(says(live_kl=0.6)) is not None
    clock.now += 10
    assert one.look({}) is not None, "long after, it begins anew"


def test_a_detector_that_only_tells_trips_with_hysteresis() -> None:
    one, _ = ladder()
    for value, tripped in ((0.24, False), (0.26, True), (0.22, True), (0.19, False), (0.24, False)):
        assert one.look(says(drift=value)) is None
        assert ("drift" in one.tripped) is tripped
    off, _ = ladder(ladder=False)
    for value, tripped in ((0.61, False), (0.5, True), (0.7, True), (0.76, False)):
        off.look(says(top1_agreement=value))
        assert ("top1_agreement" in off.tripped) is tripped


def test_without_a_ladder_nothing_is_done_and_what_was_is_taken_back() -> None:
    settings = [Health(hold_s=10.0)]
    one = Ladder(lambda: settings[0], Clock())
    assert one.look(says(errors=0.5)) is not None
    assert list(one.taken) == ["widest_gear"]
    settings[0] = Health(ladder=False)
    change = one.look(says(errors=0.5))
    assert change is not None
    assert not change.taken
    assert one.look(says(errors=0.5)) is None
    assert one.tripped == {"errors"}


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([1, 2, 3] * 20, True), ([9, 9, 4, *[7] * 48], True), ([5] * 40, False), ([1, 2, 3] * 7, False),
        (list(range(200)), False), ([*[1, 2, 3] * 20, 8], False), ([], False), (list(range(60)) * 8, True),
        (list(range(65)) * 9, False),
    ],
)  # fmt: skip
def test_loops(tokens: list[int], loops: bool) -> None:
    assert ends_in_loop(tokens) is loops


def test_loops_are_what_a_slow_search_finds() -> None:
    import random

    rng = random.Random(0)
    for _ in range(300):
        piece = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        tokens = [rng.randrange(3) for _ in range(rng.randrange(20))] + piece * rng.randrange(1, 20)
        slow = any(
            tokens[-span:] == (tokens[-period:] * span)[-span:]
            for period in range(1, 65)
            for span in [max(8 * period, 48)]
            if len(tokens) >= span
        )
        assert ends_in_loop(tokens) is slow, tokens


def test_ratios_and_shares() -> None:
    ratio = Ratio(3)
    assert ratio.read(1) == Reading(None, 0)
    for part, whole in ((9, 9), (1, 2), (0, 4), (1, 2)):
        ratio.add(part, whole)
    assert ratio.read(3) == Reading(2 / 8, 3), "the last three"
    assert ratio.read(4).value is None
    ratio = Ratio(2)
    ratio.add(3.0, 0)
    assert ratio.read(1).value == math.inf
    told = Ratio(10)
    for teller, failed in (("a", 1), ("a", 1), ("a", 1), ("b", 0)):
        told.add(failed, teller=teller)
    assert told.read(4).value == 0.0, "one key says so alone"
    told.add(1, teller="b")
    assert told.read(4).value == 0.5
    same, other = Shares(100, {"code": 50, "dialogue": 50}), Shares(100, {"code": 50, "dialogue": 50})
    for i in range(100):
        same.add(("code", "dialogue")[i % 2])
        other.add("summarisation")
    assert same.read(1).value == pytest.approx(0.0)
    assert (other.read(1).value or 0) > 1


def facts(**changes: Any) -> AnswerFacts:
    usual = {"prompt_class": "code", "failed": False, "loops": False, "rejected": None, "kv_raised": None,
             "drafted": 0, "accepted": 0}  # fmt: skip
    return AnswerFacts(**usual | changes)


def score(kl: float, tokens: int = 10, tier: str = "default", context: int = 10, **more: Any) -> ScoredAnswer:
    found = AnswerScore(tokens, 0, kl, 0.9, 0.1, kl, (0.0,) * tokens, 16.0, **more)
    return ScoredAnswer("a", tier, "code", 0, context, None, found)


def test_what_every_answer_shows_is_counted() -> None:
    settings = Health(least=2, window=4)
    detectors = Detectors(lambda: settings, {"code": 1})
    for i in range(8):
        detectors.answer(facts(loops=i % 2 == 0, rejected=i % 4 == 0, kv_raised=True, drafted=10, accepted=i))
    said = detectors.readings()
    values = {name: reading.value for name, reading in said.items()}
    assert values["loops"] == 0.5
    assert values["grammar"] == 0.25
    assert values["kv_raised"] == 1
    assert values["acceptance"] == (4 + 5 + 6 + 7) / 40
    assert values["errors"] == 0
    assert values["drift"] == pytest.approx(0.0)
    assert values["live_kl"] is None
    detectors.clear()
    assert detectors.readings()["loops"].value is None


def test_the_worst_tier_counts() -> None:
    settings = Health(least=2)
    detectors = Detectors(lambda: settings)
    for kl, tier in ((0.1, "priority"), (0.1, "priority"), (0.4, "flex"), (0.8, "flex"), (9.0, "default")):
        detectors.scored(score(kl, tier=tier))
    assert detectors.readings()["live_kl"].value == pytest.approx(0.6), "one answer of default is too few"
    assert detectors.readings()["opening_kl"].value == pytest.approx((0.2 + 1.2 + 9) / 5)


def test_long_prompts_are_compared_with_short_ones() -> None:
    settings = Health(least=2, long_context=100)
    detectors = Detectors(lambda: settings)
    for _ in range(2):
        detectors.scored(score(0.1))
    assert detectors.readings()["long_context_kl"].value is None
    for _ in range(2):
        detectors.scored(score(0.4, context=100))
    assert detectors.readings()["long_context_kl"].value == pytest.approx(0.3)


def test_inputs_are_compared_with_those_of_the_calibration_text() -> None:
    settings = Health(least=1)
    detectors = Detectors(lambda: settings)
    detectors.inputs, detectors.inputs_tokens = (*[1.0] * 20, 2.0, None), 30
    detectors.scored(score(0.1, inputs=(*[9.0] * 21, None), inputs_tokens=29))
    assert detectors.readings()["activation_range"].value is None, "too short a prompt to compare"
    detectors.scored(score(0.1, inputs=(*[1.5] * 18, 3.0, 90.0, 2.0, None), inputs_tokens=30))
    assert detectors.readings()["activation_range"].value == 3, "one site of 21 is left out"


def test_ratings_and_detectors_that_are_off() -> None:
    settings = Health(least=2, off=("retries",))
    detectors = Detectors(lambda: settings)
    detectors.rated(Rating(failed=None, structured=False, retries=4, cost=1.0))
    detectors.rated(Rating(failed=True, structured=True, retries=0, cost=2.0))
    detectors.rated(Rating(failed=False, structured=True, retries=0, cost=4.0))
    said = detectors.readings()
    assert "retries" not in said
    assert said["failures"].value == said["structured_failures"].value == 0.5
    assert said["cost_per_success"].value == 6.0
