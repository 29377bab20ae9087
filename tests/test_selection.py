"""What both engines choose and record with, and vLLM's scheduler keeps of a request; none of it needs vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qbe.analysis import Analyzer
from qbe.blueprint import Blueprint
from qbe.budget import Budget
from qbe.errors import QBEError
from qbe.policies.uniform import UniformPolicy
from qbe.refresh.monitor import Cause, Monitor
from qbe.refresh.thresholds import RUN, WINDOW, Thresholds
from qbe.selection.blueprint_history import BlueprintHistory
from qbe.selection.record_builder import tokens_by_activation_bits
from qbe.selection.selector import BlueprintSelector
from qbe.sites import FULL_BITS, Role, Site, SiteTable
from qbe.vllm.blueprint_payload import BlueprintPayload
from qbe.vllm.request_state import RequestState

GEARS = (4, 6, 8, FULL_BITS)


def table(sites: int = 3) -> SiteTable:
    made = tuple(
        Site(f"layers.{i}.up", Role.FFN_UP, i, (64, 64), True, GEARS, {g: g * 512 for g in GEARS}) for i in range(sites)
    )
    return SiteTable(made, "made up", sites)


def payload(bits: tuple[int, ...], of: SiteTable, refresh: bool = False) -> BlueprintPayload:
    return BlueprintPayload(
        policy="uniform", asked_policy="uniform", weight_bits=bytes(bits), activation_bits=bytes([16] * len(bits)),
        digest=of.digest, budget={"bits": None, "tier": "flex", "activation_bits": 16, "refresh": refresh},
        profile={"score": 0.5, "prompt_class": "code", "tier": 1, "features": {}, "cluster": None}, context=9,
        analysis_ms=0.1, policy_ms=0.2,
    )  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 9), max_size=3), st.integers(0, 30), st.integers(1, 30))
def test_a_token_keeps_the_blueprint_that_it_had(gaps: list[int], start: int, count: int) -> None:
    made = [Blueprint(f"of part {i}", (4,), (16,), ()) for i in range(4)]
    history, expected = BlueprintHistory(made[0]), [made[0]] * 60
    start_of_part = 0
    for gap, blueprint in zip(gaps, made[1:], strict=False):
        start_of_part += gap
        history.change(start_of_part, blueprint)
        expected[start_of_part:] = [blueprint] * (60 - start_of_part)
    assert [b for b, n in history.runs(start, count) for _ in range(n)] == expected[start : start + count]
    assert history.last == expected[-1]
    assert [history.at(p) for p in range(60)] == expected
    assert history.first == expected[0]
    spans = history.spans(start, start + count)
    assert [b for b, _ in spans] == made[: len(spans)], "also those that none of the tokens has"
    assert [(b, n) for b, n in spans if n] == history.runs(start, count)


def test_an_answer_is_refreshed_and_recorded() -> None:
    class Wider(UniformPolicy):
        """The widest gear for hard queries."""

        def blueprint(self, profile: Any, budget: Any, table: SiteTable) -> Blueprint:
            return Blueprint.of("wider", table, (8 if profile.score > 0.6 else 4,) * len(table.nested))

    mine = table()
    thresholds = Thresholds(2.0, 0.5, 1.0, 3.0, 99)
    answer = RequestState(payload((4, 4, 4), mine, refresh=True), mine, 0.0, Monitor(thresholds))
    selector = BlueprintSelector(Wider(), "uniform", mine, Analyzer(), None, None)
    answer.computed(answer.history.runs(0, 5), {}, samples=False)
    answer.wrote((3.0, 0.1))
    for i in range(RUN * WINDOW - 1):
        assert answer.cause() is None, i
        answer.computed(answer.history.runs(5 + i, 1), {}, samples=True)
        answer.wrote((3.0, 0.1))
    cause = answer.cause()
    assert cause is not None
    assert cause.kind == "hard"
    end = 4 + RUN * WINDOW
    assert answer.refresh(cause, selector, end)
    assert answer.history.last.weight_bits == (8, 8, 8)
    answer.computed(answer.history.runs(end, 1), {}, samples=True)
    answer.wrote((0.1, 5.0))
    answer.computed(answer.history.runs(0, 3), {}, samples=True)  # again, after a preemption
    request = SimpleNamespace(
        num_prompt_tokens=5, num_output_tokens=97, get_finished_reason=lambda: "length", status=None
    )
    record = answer.record(request, "made up")
    assert record.tokens_by_bits == {4: 5 + RUN * WINDOW - 1 + 3, 8: 1}
    assert record.finish_reason == "length"
    assert len(record.entropies or ()) == 97
    assert record.bytes_moved == 3 * 512 * (4 * 96 + 8)
    assert [r["kind"] for r in record.refreshes or ()] == ["hard"]
    record.to_row()
    assert (record.policy, record.score, record.prompt_class) == ("uniform", 0.5, "code"), "of the first choice"
    assert record.pages_read is record.drafted_tokens is None, "vLLM has no such thing"


def test_a_selection_says_what_was_chosen_and_an_answer_that_turned_hard_is_chosen_again() -> None:
    mine = table()
    selector = BlueprintSelector(UniformPolicy(), "uniform", mine, Analyzer(), None, 100)
    policy = selector.policy(None)
    selected = selector.select(policy, "Why is the sky blue?", [1, 2, 3], 2000, Budget(bits=6))
    assert selected.blueprint.weight_bits == (6, 6, 6)
    assert (selected.cache, selected.profile.context) == (None, 100)
    assert min(selected.analysis_ms, selected.policy_ms) > 0
    profile, blueprint = selector.select_again(None, selected.profile, Budget(bits=6), Cause("hard", 96, 5.0, 0.1))
    assert profile.score > selected.profile.score
    assert blueprint.weight_bits == (6, 6, 6), "an average that was asked for stays"
    with pytest.raises(QBEError) as refused:
        selector.select(policy, "Why?", [1], 10, Budget(bits=2))
    assert refused.value.field == "bits"


def test_activations_are_counted_by_the_weights_that_they_meet() -> None:
    mine = table(4)
    mixed = Blueprint("b", (4,) * 4, (8, 8, 8, 16), ())
    assert tokens_by_activation_bits([(mixed, 8)], mine, 10) == {8: 6, 16: 4}
    assert tokens_by_activation_bits([(mixed, 4), (mixed.full_activations, 6)], mine, 10) == {8: 3, 16: 7}
    assert tokens_by_activation_bits([(mixed.full_activations, 3)], mine, 3) == {16: 3}
    assert tokens_by_activation_bits([], mine, 0) == {}
