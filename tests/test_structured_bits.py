"""Answers that must have a form get the least bits that calls need, within what tier and request allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import qbe
from conftest import byte_tokenizer, tiny_llama
from explain_samples import dense
from qbe.analysis import Analyzer
from qbe.analysis.profile import STRUCTURED, STRUCTURED_BITS, QueryProfile
from qbe.budget import Budget
from qbe.cache.fingerprint import Fingerprint
from qbe.policies.static import StaticPolicy
from qbe.policies.tiered import TieredPolicy
from qbe.records import RecordStore

PLAIN = QueryProfile(0.0, "code", 2)
CALL = replace(PLAIN, features={STRUCTURED: 1.0})
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("budget", "plain", "call"),
    [
        (Budget(), 5.33, STRUCTURED_BITS),
        (Budget(tier="flex"), 4.67, 5.33),  # the highest average of its range
        (Budget(tier="priority"), 6.67, 6.67),
        (Budget(bits=4.5), 4.5, 4.5),  # who says what it wants gets that
        (Budget(within=(4.0, 4.2)), 4.0, 4.0),  # its only average
        (Budget(within=(4.3, 4.5)), 4.4, 4.4),
        (Budget(within=(4.0, 16.0)), 4.0, STRUCTURED_BITS),
    ],
)
def test_the_least_bits_are_raised_within_the_range(budget: Budget, plain: float, call: float) -> None:
    table = dense(4)
    for profile, bits in ((PLAIN, plain), (CALL, call)):
        found = TieredPolicy().blueprint(profile, budget, table).average_weight_bits(table)
        assert bits - 0.05 <= found <= bits + 1e-6
    for score in (0.0, 0.4, 0.9):
        average = budget.average_for(score, STRUCTURED_BITS)
        assert average == max(budget.average_for(score), budget.average_for(0.0, STRUCTURED_BITS))


def test_other_policies_and_the_cache_know_it_too() -> None:
    table = dense(4)
    flex = Budget(tier="flex")
    assert StaticPolicy().blueprint(CALL, flex, table).average_weight_bits(table) == pytest.approx(5.5, abs=0.05)
    assert StaticPolicy().blueprint(PLAIN, flex, table).average_weight_bits(table) == pytest.approx(4.9, abs=0.05)
    said = Analyzer().analyze("call it", [1, 2], tier=2)
    told = replace(said, features={**said.features, STRUCTURED: 1.0})
    for budget in (Budget(), Budget(tier="priority")):
        assert Fingerprint(said, budget).cell != Fingerprint(told, budget).cell
        assert Fingerprint(said, budget).digest == Fingerprint(told, budget).digest


def test_tools_and_forms_raise_a_requests_bits_and_are_recorded(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    with qbe.Engine(tiny_llama(), tokenizer=tokenizer, device="cpu", records=tmp_path / "r.sqlite",
                    blueprint_cache=tmp_path / "b.sqlite") as engine:  # fmt: skip
        asked = [{"role": "user", "content": "hi"}]
        params = qbe.SamplingParams(max_tokens=2)
        low = Budget(within=(4.0, 6.0))
        requests = [
            qbe.Request(asked, params, low), qbe.Request(asked, params, low, tools=TOOLS),
            qbe.Request(asked, params, low, structured=True),
        ]  # fmt: skip
        plain, tools, form = engine.generate_batch(requests)
        assert STRUCTURED not in plain.profile.features
        for result in (tools, form):
            assert result.profile.describe()["features"][STRUCTURED] == 1
            assert result.average_weight_bits > plain.average_weight_bits
        explained = engine.choose(requests[1])[1]
        assert explained.target_bits == 6.0
        assert explained.describe()["profile"]["features"][STRUCTURED] == 1
    record = RecordStore(tmp_path / "r.sqlite").get(form.id)
    assert record.features[STRUCTURED] == 1


def test_a_servers_tools_and_schemas_are_such_answers(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the server's extra is not installed")
    from server_running import running, tiny_engine

    def make() -> qbe.Engine:
        return tiny_engine(policy="tiered", blueprint_cache=False)

    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "qbe": {"min_bits": 4, "max_bits": 6}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
    with running(make, ledger=tmp_path / "ledger.sqlite") as server:
        bits = [
            server.post("chat/completions", {**body, **more}).json()["usage"]["qbe"]["average_weight_bits"]
            for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}, {"response_format": schema})
        ]
    plain, none, tools, form = bits
    assert plain == none < tools == form
