"""Tier queues: who goes first, that nobody starves, kept places, batches apart. Real scheduler, simulated clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_models import request
from qbe.engine.scheduling.scheduler import Scheduler
from qbe.engine.scheduling.sequence import Sequence, Status
from qbe.kvcache.allocator import PageAllocator, PageFormat
from qbe.server.queues import TierQueues
from qbe.server.settings import Settings, TierName
from server_running import Running, running, tiny_engine, until

STEP_S = 0.1


class Simulated:
    """A server without a model: every step takes `STEP_S` and gives every answer that is past its prompt a token."""

    def __init__(self, places: int = 4, tokens: int = 16, **parts: Any) -> None:
        self.now, self._number = 0.0, 0
        self.scheduler = Scheduler(
            PageAllocator(4096, PageFormat(0, 4096)), max_batch_tokens=tokens, max_sequences=places, context=4096
        )
        found = Settings.model_validate(parts)
        self.queues = TierQueues(lambda: found, places, tokens, lambda: self.now)
        self.queues.guide(self.scheduler)

    def ask(self, tier: TierName, tokens: int = 3, prompt: int = 2, slack: float | None = None) -> Sequence:
        self._number += 1
        found = request(f"{tier}{self._number}", [5] * prompt, max_tokens=tokens)
        found.priority = self.queues.priority(tier, slack)
        self.scheduler.add(found)
        return found

    def step(self) -> list[str]:
        """The tiers that ran."""
        work = self.scheduler.schedule()
        for w in work:
            w.sequence.computed = w.start + w.count
        self.scheduler.complete(work)
        for w in work:
            if w.samples:
                w.sequence.token_ids.append(1)
                if len(w.sequence.token_ids) == w.sequence.max_length:
                    self.scheduler.finish(w.sequence, "length")
        self.now += STEP_S
        return [w.sequence.priority.tier for w in work]

    def begun(self) -> list[str]:
        """Tiers in the order in which their answers begin, until all are done."""
        order: list[str] = []
        seen: set[str] = set()
        while self.scheduler.has_work():
            self.step()
            for one in self.scheduler.running:
                if one.request_id not in seen:
                    seen.add(one.request_id)
                    order.append(one.priority.tier)
        return order


def test_less_patience_goes_first_until_others_have_waited_long_enough() -> None:
    one = Simulated(places=1)
    for tier in ("flex", "flex", "default", "priority"):
        one.ask(tier)  # type: ignore[arg-type]
    assert one.begun() == ["priority", "default", "flex", "flex"]
    one.ask("flex")
    one.now += 25.1  # of its 30 s; default has 5
    one.ask("default")
    one.ask("priority")
    assert one.begun() == ["priority", "flex", "default"]


@example(flood=[("priority", 2, 15)], apart=True, thin=0)  # every step reads a prompt that leaves flex's no room
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["default", "priority"]), st.integers(1, 12), st.integers(1, 40)), min_size=1),
    st.booleans(), st.integers(0, 8),
)  # fmt: skip
def test_nobody_starves(flood: list[tuple[TierName, int, int]], apart: bool, thin: int) -> None:
    """An adversary keeps the queue full of higher tiers; the lowest begins in the time that its patience says."""
    places, queue, longest = 3, 6, 12 + 3  # steps of an answer: its tokens, and its prompt in chunks
    one = Simulated(places, queues={"apart": apart, "thin": thin})
    victim, number = None, 0
    for _ in range(100_000):
        while len(one.scheduler.waiting) < queue:  # as admission has it
            tier, tokens, prompt = flood[number % len(flood)]
            one.ask(tier, tokens, prompt)
            number += 1
        one.step()
        if victim is None:
            victim = one.ask("flex", 3, 20)
        if victim.status is not Status.WAITING:
            break
    assert victim is not None
    assert victim.status is not Status.WAITING
    # 30 s of patience, then those that were before it, in the worst case one after the other.
    assert one.now <= 30 + (queue + 2 * places) * longest * STEP_S


def test_priority_begins_at_once_under_a_flood() -> None:
    """A place is kept for it, and its prompt goes before prompts that have begun."""
    one = Simulated(places=8)
    for number in range(20):
        one.ask("flex", tokens=100, prompt=200 if number > 5 else 2)
    for _ in range(10):
        one.step()
    assert len(one.scheduler.running) == 7
    first = one.ask("priority", tokens=2, prompt=8)
    one.step()
    assert len(first.output_ids) == 1
    one.step()
    assert first.status is Status.FINISHED
    two = [one.ask("priority", prompt=4) for _ in range(2)]  # the kept place is one
    one.step()
    assert [len(s.output_ids) for s in two] == [1, 0]


def test_who_comes_to_a_kept_place_begins_in_a_step_of_its_own() -> None:
    one = Simulated(places=8)
    for _ in range(4):
        one.ask("flex", tokens=4, prompt=200)
    for _ in range(3):
        one.step()
        one.queues.stepped(STEP_S)
    one.ask("priority", prompt=8)
    assert one.step() == ["priority"]


def test_nobody_rests_for_one_that_cannot_begin() -> None:
    """The only place is taken: whoever has it goes on, instead of steps without work."""
    one = Simulated(places=1)
    first = one.ask("flex", tokens=9, prompt=20)
    one.step()
    one.queues.stepped(STEP_S)
    late = one.ask("priority")
    while late.status is not Status.FINISHED:
        assert one.step()
        one.queues.stepped(STEP_S)
    assert first.status is Status.FINISHED


def test_the_lowest_gives_its_pages_up_first() -> None:
    one = Simulated(places=4, tokens=128)
    one.scheduler = Scheduler(
        PageAllocator(4, PageFormat(0, 4096)), max_batch_tokens=128, max_sequences=4, context=4096
    )
    one.queues.guide(one.scheduler)
    old, young = one.ask("flex", tokens=200, prompt=50), one.ask("priority", tokens=200, prompt=50)
    while one.scheduler.has_work():
        one.step()
    assert old.preemptions > 0
    assert young.preemptions == 0


def test_batches_apart_have_one_tier_until_somebody_loses_patience() -> None:
    one = Simulated(places=4, queues={"apart": True, "thin": 0})
    for _ in range(12):
        one.ask("flex", tokens=10)
        one.ask("default", tokens=10)
    mixed = 0
    while one.scheduler.has_work():
        mixed += len(set(one.step())) > 1
    assert mixed == 0
    assert one.now > 5  # default's patience ended meanwhile


def test_thin_queues_take_in_adjacent_tiers() -> None:
    def together(thin: int, *tiers: TierName) -> set[str]:
        one = Simulated(places=4, queues={"apart": True, "thin": thin})
        one.ask(tiers[0], tokens=30)
        one.step()
        for tier in tiers[1:]:
            one.ask(tier, tokens=30)
        one.now -= 10  # nobody's patience is over
        return set(one.step())

    assert together(4, "flex", "default", "default") == {"flex", "default"}
    assert together(0, "flex", "default", "default") == {"flex"}
    assert together(4, "flex", "priority") == {"flex"}
    assert together(2, "default", "flex", *["default"] * 5) == {"default"}


def test_a_wish_for_speed_passes_its_own_tier_alone() -> None:
    one = Simulated(places=1)
    for tier, slack in (("flex", None), ("flex", 0.0), ("default", None), ("default", 0.0), ("priority", None)):
        one.now += 0.001
        one.ask(tier, slack=slack)  # type: ignore[arg-type]
    assert one.begun() == ["default", "priority", "flex", "default", "flex"]
    assert one.queues.priority("flex", 0.0).rank == one.queues.priority("default").rank
    assert one.queues.priority("flex", 12.0).rank == pytest.approx(one.now + 12)
    assert one.queues.priority("flex", 99.0).rank == one.queues.priority("flex").rank


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config: Path = tmp_path_factory.mktemp("config") / "serve.toml"
    config.write_text("[limits]\nqueue = 20\n")
    with running(lambda: tiny_engine(max_sequences=1), config) as found:
        yield found


def test_a_server_orders_its_queue_and_refuses_what_comes_too_late(server: Running) -> None:
    ended: list[str] = []

    def ask(tier: str, tokens: int) -> None:
        body = {"prompt": tier, "max_tokens": tokens, "ignore_eos": True, "service_tier": tier}
        assert server.post("completions", body).status_code == 200
        ended.append(tier)

    step, pause = server.engine.core.step, [0.02]
    server.engine.core.step = lambda: (time.sleep(pause[0]), step())[1]  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, "default", 400)]
        until(lambda: len(server.engine.core.scheduler.running) == 1, "the only place is taken")
        for number, tier in enumerate(("flex", "flex", "default", "priority"), 1):
            asked.append(pool.submit(ask, tier, 150))
            until(lambda number=number: len(server.engine.core.scheduler.waiting) == number, "it waits")
        pause[0] = 0.0  # all of them wait: on
        until(lambda: len(ended) >= 3, "there is a pace")
        pause[0] = 0.02  # two are left
        late = {"prompt": "x", "service_tier": "flex", "max_tokens": 9, "qbe": {"max_latency_ms": 0.5}}
        refused = server.post("completions", late)
        pause[0] = 0.0
        for one in asked:
            one.result(60)
    assert ended == ["default", "priority", "default", "flex", "flex"]
    assert refused.status_code == 429
    assert refused.json()["error"]["param"] == "qbe.max_latency_ms"
    assert int(refused.headers["Retry-After"]) >= 1


def test_prompts_of_lower_tiers_leave_steps_short() -> None:
    """Who comes waits for a step that runs, so a flood of long flex prompts must not fill it."""
    one = Simulated(places=8, tokens=16)
    for _ in range(4):
        one.ask("flex", prompt=40)
    one.step()
    assert [(w.sequence.priority.tier, w.count) for w in one.scheduler.last] == [("flex", 4)]
    one.ask("priority", prompt=12)
    one.ask("default", prompt=40)
    one.step()  # priority's prompt leaves room for neither
    assert [(w.sequence.priority.tier, w.count) for w in one.scheduler.last] == [("priority", 12)]
    one.step()
    writing, *prompts = [(w.sequence.priority.tier, w.count) for w in one.scheduler.last]
    assert writing == ("priority", 1)
    assert prompts == [("default", 8)]  # flex, which may have 4, has no place beside it
    while one.scheduler.has_work():
        one.step()
        assert sum(w.count for w in one.scheduler.last if w.count > 1) <= 16


def test_one_that_has_lost_patience_holds_up_nobody_of_a_higher_tier() -> None:
    one = Simulated(places=8, tokens=16)
    one.ask("flex", prompt=40)
    one.ask("flex", prompt=40)
    one.now += 31
    one.ask("priority", prompt=30)
    one.step()
    assert [(w.sequence.priority.tier, w.count) for w in one.scheduler.last] == [("flex", 4), ("priority", 12)]
