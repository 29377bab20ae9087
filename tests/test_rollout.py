"""A canary by itself: who is in which arm, what is found of it, how it moves on, what is left of it after a death."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from prometheus_client import CollectorRegistry

from qbe.errors import QBEError
from qbe.server.contract import Terms, check
from qbe.server.contract import terms as contract_terms
from qbe.server.keys import ANYONE, Client
from qbe.server.protocol import Contract
from qbe.server.rollout.arms import Arm, as_candidate, place, takes_part, unit
from qbe.server.rollout.controller import RolloutController
from qbe.server.rollout.evidence import Evidence
from qbe.server.rollout.metrics import RolloutMetrics
from qbe.server.rollout.settings import Candidate, Rollout, Step
from qbe.server.rollout.state import State, StateFile, identity
from qbe.server.rollout.statistics import LEVEL, Looks, least_excess, least_mean, quantile, slower, wilson
from qbe.server.settings import Key, Settings
from qbe.server.settings_file import load

GOOD: dict[str, float] = {"errors": 0.0, "loops": 0.0, "ttft": 0.1, "itl": 0.01}
BAD = GOOD | {"errors": 1.0}


def made(**changes: Any) -> Rollout:
    usual = {"candidate": {"bits": [4.5, 6.0]}, "salt": "s", "sample": 0.0,
             "steps": [{"weight": 5, "minutes": 1}, {"weight": 25, "minutes": 2}]}  # fmt: skip
    return Rollout.model_validate(usual | changes)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def controller(folder: Path, rollout: Rollout | None, clock: Clock | None = None) -> RolloutController:
    metrics = RolloutMetrics(CollectorRegistry(), "tiny")
    return RolloutController(lambda: rollout, folder / "ledger.sqlite", metrics, clock or Clock())


def wanted(contract: Contract | None = None, **tier: Any) -> Terms:
    return contract_terms("default", contract, Settings(), 0.0)


def told(one: RolloutController) -> dict[str, Any]:
    found = one.describe()
    assert found is not None
    return found


# Arms


@settings(max_examples=50)
@given(st.text(max_size=20), st.text(max_size=20), st.floats(0.1, 99), st.floats(0.1, 99))
def test_more_weight_moves_nobody_out(salt: str, name: str, weight: float, other: float) -> None:
    there = place(salt, name)
    assert 0 <= there < 100
    assert there == place(salt, name), "it is sticky"
    low, high = sorted((weight, other))
    assert there >= low or there < high


def test_weights_are_met() -> None:
    for weight in (5, 25, 50):
        share = sum(place("salt", f"key {i}") < weight for i in range(20_000)) / 200
        assert share == pytest.approx(weight, abs=4 * math.sqrt(weight * (100 - weight) / 20_000))


def test_another_salt_draws_anew() -> None:
    both = [(place("a", f"key {i}") < 50, place("b", f"key {i}") < 50) for i in range(4000)]
    assert sum(x and y for x, y in both) / 4000 == pytest.approx(0.25, abs=0.03)


def test_who_stays_in_one_arm() -> None:
    key, sticky = Client("a", Key(sha256="0" * 64), address="10.0.0.1"), made(sticky="conversation")
    assert unit(made(), key, "talk") == unit(made(), replace(key, address="10.0.0.2"), None) == "key a"
    assert unit(sticky, key, "talk") != unit(sticky, key, "other")
    assert unit(sticky, key, None) == "key a"
    assert unit(sticky, key, "talk") != unit(sticky, replace(key, name="b"), "talk"), "of one key"
    anyone = replace(ANYONE, address="10.0.0.1")
    assert unit(made(), anyone, "talk") == unit(made(), replace(anyone, address="10.0.0.2"), "talk")
    assert unit(made(), anyone, None) != unit(made(), replace(anyone, address="10.0.0.2"), None)
    assert unit(made(), anyone, "key a") != unit(made(), key, None)


def test_what_a_request_says_itself_it_has() -> None:
    bits, policy = Candidate(bits=(4.5, 6.0)), Candidate(policy="static", tiers=("default",))
    assert takes_part(bits, wanted(Contract(max_bits=5)))
    assert not takes_part(bits, wanted(Contract(bits=5)))
    assert takes_part(policy, wanted(Contract(bits=5)))
    assert not takes_part(policy, wanted(Contract(policy="uniform")))
    assert not takes_part(policy, contract_terms("flex", None, Settings(), 0.0))
    tried = as_candidate(wanted(Contract(kv_bits=8)), Candidate(bits=(4.1, 6.0), kv_bits=4.0, activation_bits=8), 3)
    assert (tried.arm, tried.tier_range, tried.kv_bits) == (Arm("candidate", 3), (4.1, 6.0), 8)
    assert tried.tier_settings.activation_bits == 8
    assert tried.tier_settings.floor == 4.1, "it never rises under pressure"
    assert tried.bounded, "the tiers' order does not bind it"
    assert tried.stable is not None
    assert (tried.stable.arm, tried.stable.tier_range) == (Arm("stable", 3), wanted().tier_range)


# Statistics


def test_wilson_is_the_root_of_its_equation() -> None:
    """The bound is the share from which what was seen is just as far as the level allows."""
    from statistics import NormalDist

    for bad, n, level in ((0, 20, 0.01), (7, 30, 0.005), (30, 30, 0.001)):
        z = NormalDist().inv_cdf(1 - level)
        for bound in wilson(bad, n, level):
            away = abs(bad / n - bound)
            assert bound in (0.0, 1.0) or away == pytest.approx(z * math.sqrt(bound * (1 - bound) / n))


def test_levels_add_up() -> None:
    looks, levels, seen = Looks(20, 100), list[float](), 0
    while seen < 100_000:
        seen += 1
        if (level := looks.take(seen)) is not None:
            levels.append(level)
    assert sum(levels) < LEVEL
    assert len(levels) < 100_000 / 25 + 10


def simulated(good: Callable[[random.Random], float], bad: Callable[[random.Random], float], name: str, **limits: float
              ) -> Callable[[int], int | None]:  # fmt: skip
    """After how many of the candidate's answers it is found to be worse, of 400; None: it is not."""
    rollout = made(limits=limits)

    def run(seed: int) -> int | None:
        rng, evidence = random.Random(seed), Evidence(rollout)
        for i in range(400):
            evidence.add("stable", {name: good(rng)})  # type: ignore[dict-item]
            evidence.add("candidate", {name: bad(rng)})  # type: ignore[dict-item]
            if evidence.judge() is not None:
                return i + 1
        return None

    return run


@pytest.mark.parametrize(
    ("name", "draw", "limits"),
    [
        ("errors", lambda rng: float(rng.random() < 0.05), {"errors": 0.0}),
        ("loops", lambda rng: float(rng.random() < 0.4), {"loops": 0.0}),
        ("ttft", lambda rng: rng.lognormvariate(0, 1), {"ttft": 1.0}),
        ("live_kl", lambda rng: rng.expovariate(2.0), {"live_kl": 0.5}),
    ],
)  # fmt: skip
def test_an_arm_that_is_just_within_its_limit_is_rarely_called_worse(
    name: str, draw: Callable[[random.Random], float], limits: dict[str, float]
) -> None:
    run = simulated(draw, draw, name, **limits)
    assert sum(run(seed) is not None for seed in range(100)) <= 4  # 1 in 100 at most is meant, 4 with 99.6 %


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("errors", lambda rng: float(rng.random() < 0.01), lambda rng: float(rng.random() < 0.4)),
        ("malformed", lambda rng: float(rng.random() < 0.05), lambda rng: float(rng.random() < 0.5)),
        ("failures", lambda rng: float(rng.random() < 0.2), lambda rng: float(rng.random() < 0.8)),
        ("itl", lambda rng: rng.lognormvariate(0, 0.3), lambda rng: 3 * rng.lognormvariate(0, 0.3)),
        ("live_kl", lambda rng: rng.expovariate(10.0), lambda rng: rng.expovariate(0.5)),
        ("top1_agreement", lambda rng: 0.9, lambda rng: rng.uniform(0.2, 0.6)),
        ("flip_margin", lambda rng: 0.1, lambda rng: rng.expovariate(0.2)),
    ],
)  # fmt: skip
def test_an_arm_that_is_much_worse_is_found_within_a_hundred(
    name: str, good: Callable[[random.Random], float], bad: Callable[[random.Random], float]
) -> None:
    found = [simulated(good, bad, name)(seed) for seed in range(20)]
    assert all(n is not None and n <= 100 for n in found), found


def test_one_that_becomes_worse_is_found_within_a_hundred_more() -> None:
    rng, evidence = random.Random(0), Evidence(made())
    for i in range(5200):
        evidence.add("stable", {"errors": 0.0})
        evidence.add("candidate", {"errors": float(i >= 5100 - 100 and rng.random() < 0.7)})
        if evidence.judge():
            assert 5000 < i < 5100
            return
    raise AssertionError("never")


def test_bounds_by_hand() -> None:
    assert least_mean([1.0, 1.0, 1.0], 0.01) == 1.0
    assert least_mean([0.0, 2.0], 0.25) == pytest.approx(1 - 1.0)  # t of one degree at 75 % is 1
    assert quantile(range(1, 21)) == 19
    assert least_excess(20, 20, 0, 20, 0.005) > 0.4
    assert slower([10.0] * 30, [1.0] * 30, 1.5, 0.005)
    assert not slower([1.4] * 30, [1.0] * 30, 1.5, 0.005)


# What metrics come to


def filled(rollout: Rollout, n: int, values: dict[str, float]) -> Evidence:
    evidence = Evidence(rollout)
    for _ in range(n):
        for arm in ("stable", "candidate"):
            evidence.add(arm, values)  # type: ignore[arg-type]
    return evidence


def test_outcomes() -> None:
    assert filled(made(), 19, GOOD).outcome(True) == "inconclusive"
    assert filled(made(), 20, GOOD).outcome(True) == "successful"
    assert filled(made(sample=0.5), 20, GOOD).outcome(True) == "inconclusive", "nothing was scored"
    assert filled(made(sample=0.5), 20, GOOD).outcome(False) == "successful", "nothing can be"
    fewer = {name: value for name, value in GOOD.items() if name != "itl"}
    assert filled(made(), 20, fewer).outcome(True) == "inconclusive"
    assert filled(made(off=["itl"]), 20, fewer).outcome(True) == "successful"
    scored = {"live_kl": 0.1, "top1_agreement": 0.9}
    assert filled(made(sample=0.5), 20, GOOD | scored).outcome(True) == "successful"
    beyond = filled(made(sample=0.5, limits={"live_kl": 0.2}), 7, GOOD | scored | {"live_kl": 0.3})
    assert beyond.judge() is None, "of too few nothing is said"
    for _ in range(20):
        beyond.add("candidate", {"live_kl": 0.3})
    assert beyond.judge() == "live_kl"
    assert beyond.outcome(True) == "failed"
    for _ in range(500):
        beyond.add("candidate", {"live_kl": 0.0})
    assert beyond.judge() == "live_kl", "once worse it stays so"


# Time


def feed(one: RolloutController, n: int, mine: dict[str, float] = GOOD, other: dict[str, float] = GOOD) -> None:
    assert one.weight >= 0, "it has begun"
    run = one._runs
    for _ in range(n):
        one.saw(Arm("stable", run), other)  # type: ignore[arg-type]
        one.saw(Arm("candidate", run), mine)  # type: ignore[arg-type]


def test_it_goes_up_step_by_step(tmp_path: Path) -> None:
    clock = Clock()
    one = controller(tmp_path, made(), clock)
    assert one.weight == 5
    feed(one, 30)
    clock.now = 59.0
    one.look()
    assert (one.weight, told(one)["outcome"]) == (5, "successful"), "not before its minute"
    clock.now = 61.0
    one.look()
    assert one.weight == 25
    clock.now = 61.0 + 121
    one.look()
    assert (one.weight, told(one)["phase"]) == (25, "inconclusive"), "it needs answers of its own"
    feed(one, 30)
    clock.now += 1
    one.look()
    assert (one.weight, told(one)["phase"]) == (100, "successful")


def test_abort_is_at_once_and_for_good(tmp_path: Path) -> None:
    clock = Clock()
    one = controller(tmp_path, made(), clock)
    one.look()
    fed = 0
    while one.weight:
        feed(one, 1, BAD)
        fed += 1
    assert fed <= 25
    assert told(one)["cause"] == "errors: candidate 1, stable 0; limit 0.02"
    feed(one, 200)
    clock.now = 1e6
    one.look()
    assert one.weight == 0, "good answers that come late bring it not back"
    assert one.aborts == 1
    again = controller(tmp_path, made())
    assert (again.weight, told(again)["phase"]) == (0, "aborted"), "nor does a restart"
    assert controller(tmp_path, made(salt="other")).weight == 5, "another one begins"
    again.act("resume")
    assert (again.weight, told(again)["step"]) == (5, 0)


def test_answers_of_an_earlier_step_do_not_count(tmp_path: Path) -> None:
    clock = Clock()
    one = controller(tmp_path, made(), clock)
    feed(one, 30)
    before = Arm("candidate", one._runs)
    clock.now = 61.0
    one.look()
    for _ in range(100):
        one.saw(before, BAD)  # type: ignore[arg-type]
    assert one.weight == 25


def test_what_operators_do(tmp_path: Path) -> None:
    clock = Clock()
    one = controller(tmp_path, made(), clock)
    with pytest.raises(QBEError, match="nothing to resume"):
        one.act("resume")
    one.act("pause")
    feed(one, 30)
    clock.now = 1000.0
    one.look()
    assert (one.weight, told(one)["phase"], told(one)["elapsed_s"]) == (5, "paused", 0)
    with pytest.raises(QBEError, match="cannot be paused: it is paused"):
        one.act("pause")
    one.act("resume")
    clock.now = 1061.0
    one.look()
    assert one.weight == 25
    one.act("promote")
    assert one.weight == 100
    one.act("abort")
    assert (one.weight, one.aborted) == (0, "an operator aborted it")
    with pytest.raises(QBEError, match="there is no rollout"):
        controller(tmp_path, None).act("abort")


def test_time_stands_still_while_health_acts(tmp_path: Path) -> None:
    clock = Clock()
    one = controller(tmp_path, made(), clock)
    one.held = True
    feed(one, 50, BAD)
    clock.now = 100.0
    one.look()
    assert (one.weight, told(one)["elapsed_s"]) == (5, 0)


def test_servers_that_share_a_ledger_share_an_abort(tmp_path: Path) -> None:
    clock = Clock()
    one, other = controller(tmp_path, made(), clock), controller(tmp_path, made(), clock)
    assert one.weight == other.weight == 5
    one.abort("because", "test")
    clock.now = 45.0  # when the other one would write how long its step has run
    other.look()
    assert (other.weight, other.aborted) == (0, "because")
    assert controller(tmp_path, made()).weight == 0
    other.act("resume")
    other.look()
    assert (one.weight, other.weight) == (0, 5), "whom an operator asked"


def test_time_goes_on_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    one = controller(tmp_path, made(), clock)
    one.look()
    clock.now = 45.0
    one.look()
    again = controller(tmp_path, made())
    assert told(again)["elapsed_s"] == 45
    clock.now = 50.0
    one.look()
    one.close()
    assert told(controller(tmp_path, made()))["elapsed_s"] == 50, "a server that ends well loses none"


class Rollouts(RuleBasedStateMachine):
    """Whatever happens in whatever order: the weight rises within a rollout until it is off, and off it stays."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        for left in self.folder.glob("*.json"):
            left.unlink()
        self.one, self.off, self.most = controller(self.folder, made(), self.clock), False, 5.0

    @rule(seconds=st.floats(0, 200))
    def time_goes_on(self, seconds: float) -> None:
        self.clock.now += seconds
        self.one.look()

    @rule(n=st.integers(1, 40), bad=st.booleans())
    def answers_come(self, n: int, bad: bool) -> None:
        feed(self.one, n, BAD if bad else GOOD)

    @rule()
    def it_restarts(self) -> None:
        self.one = controller(self.folder, made(), self.clock)

    @precondition(lambda self: self.one.weight > 0)
    @rule()
    def an_operator_aborts(self) -> None:
        self.one.act("abort")

    @precondition(lambda self: self.one.weight == 0)
    @rule()
    def an_operator_resumes(self) -> None:
        self.one.act("resume")
        self.off, self.most = False, 5.0

    @invariant()
    def weights(self) -> None:
        weight = self.one.weight
        assert weight in (0, 5, 25, 100)
        assert not self.off or weight == 0
        assert weight == 0 or weight >= self.most
        self.off, self.most = weight == 0, max(self.most, weight)


def test_no_order_of_events_brings_an_aborted_candidate_back(tmp_path: Path) -> None:
    Rollouts.folder = tmp_path
    run_state_machine_as_test(Rollouts, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))


# The file


def test_a_damaged_state_is_an_abort(tmp_path: Path) -> None:
    file, id = StateFile(tmp_path / "ledger.sqlite"), identity(made())
    assert file.read(id, 2) == State()
    file.write(id, State("paused", 1, 3.5))
    assert file.read(id, 2) == State("paused", 1, 3.5)
    good = json.loads(file.path(id).read_text())
    for wrong in ("", "[]", "null", json.dumps(good | {"step": 2}), json.dumps(good | {"phase": "fine"}),
                  json.dumps(good | {"format": 2}), json.dumps(good | {"elapsed_s": "x"}), "{" * 100_000):  # fmt: skip
        file.path(id).write_text(wrong)
        found = file.read(id, 2)
        assert found.phase == "aborted", wrong[:50]
        assert str(file.path(id)) in found.cause
    assert controller(tmp_path, made()).weight == 0


def test_a_state_that_cannot_be_written_holds_in_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = controller(tmp_path / "nowhere" / "below", made())
    assert one.weight == 5
    (tmp_path / "nowhere").write_text("a file")
    one.abort("because", "test")
    assert one.weight == 0
    assert "cannot be written" in caplog.text


# Settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps = []", "rollout.steps: "),
        ("", "rollout.steps: Field required"),
        ("steps = [{weight = 5}]", "rollout.steps.0.minutes: "),
        ("steps = [{weight = 100, minutes = 1}]", "rollout.steps.0.weight: "),
        ("steps = [{weight = 9, minutes = 1}, {weight = 9, minutes = 1}]", "steps: their weights must rise"),
        ("steps = [{weight = 9, minutes = 1}]\nsalty = 1", "rollout.salty: there is no such setting"),
        ("steps = [{weight = 9, minutes = 1}]\noff = [\"speed\"]", "rollout.off.0: "),
        ("steps = [{weight = 9, minutes = 1}]\nleast = 200", "least and least_scored are at most window"),
        ("steps = [{weight = 9, minutes = 1}]\n[rollout.candidate]", "it changes nothing: give bits, policy"),
        ("steps = [{weight = 9, minutes = 1}]\n[rollout.candidate]\nbits = [6.0, 5.0]", "bits: the two must rise"),
        ("steps = [{weight = 9, minutes = 1}]\n[rollout.candidate]\nmodel = \"b\"", "a server has one store: for"),
        ("steps = [{weight = 9, minutes = 1}]\n[rollout.candidate]\nkv_bits = 1.0", "rollout.candidate.kv_bits"),
        ("steps = [{weight = 9, minutes = 1}]\n[rollout.limits]\nttft = 0.5", "rollout.limits.ttft: "),
        ("steps = [{weight = 9, minutes = 1}]\n[rollout.candidate]\nbits = [4.0, 9.0]\n[tiers.flex]\nceiling = 8.0",
         "rollout.candidate.bits: 9 is above the ceiling of tier 'flex', 8"),
    ],
)  # fmt: skip
def test_settings_that_are_wrong_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "serve.toml").write_text(f"[rollout]\n{text}\n")
    with pytest.raises(QBEError) as refused:
        load(tmp_path / "serve.toml")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_the_model_cannot_do_is_one_line() -> None:
    def settings_of(**candidate: Any) -> Settings:
        return Settings(rollout=Rollout(candidate=Candidate(**candidate), steps=(Step(weight=5, minutes=1),)))

    check(settings_of(policy="random:7"), 4.0)
    with pytest.raises(QBEError, match=r"rollout\.candidate\.bits goes down to 3\.5, .* lowest average is 4\.00"):
        check(settings_of(bits=(3.5, 5.0)), 4.0)
    with pytest.raises(QBEError, match=r"rollout\.candidate\.policy: unknown policy 'none'"):
        check(settings_of(policy="none"), 4.0)
    without = Settings(rollout=Rollout(steps=(Step(weight=5, minutes=1),)))
    check(without, 4.0)
