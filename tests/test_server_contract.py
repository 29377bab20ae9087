"""Precision as part of the contract: tiers, bounds, prices, brownout, and settings that change while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qbe.server.contract import budget, terms
from qbe.server.energy.governor import tier_bits
from qbe.server.errors import APIError
from qbe.server.protocol import Contract
from qbe.server.settings import Settings, Tier
from qbe.server.settings_file import load
from qbe.server.speed import Speed
from server_running import Running, running, tiny_engine, until

TOML = """
[tiers.flex]
bits = [4.0, 4.5]
price = 0.5
[tiers.default]
bits = [6.0, 8.0]
floor = 4.0
[tiers.priority]
bits = [8.0, 8.0]
ceiling = 8.0
[prices]
currency = "EUR"
input = 10.0
cached_input = 1.0
output = 40.0
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "serve.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qbe.server.service._RELOAD_S", 0.05)
        with running(config=config) as found:
            yield found


def ask(server: Running, **body: Any) -> Any:
    answer = server.post("completions", {"prompt": "hello there", "max_tokens": 4, "ignore_eos": True} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("asked", "served", "bits"),
    [("flex", "flex", 4), ("default", "default", 8), ("auto", "default", 8), ("priority", "priority", 8),
     ("fast", "priority", 8), ("scale", "default", 8), (None, "default", 8)],
)  # fmt: skip
def test_the_reply_names_the_tier_served(server: Running, asked: str | None, served: str, bits: float) -> None:
    answer = ask(server, service_tier=asked)
    assert answer["service_tier"] == served
    assert answer["usage"]["qbe"]["average_weight_bits"] == bits


@pytest.mark.parametrize(
    ("bounds", "bits", "kv_bits"),
    [({"bits": 6}, 6, 16), ({"max_bits": 6.5}, 6, 16), ({"min_bits": 16}, 16, 16), ({"kv_bits": 4, "bits": 4}, 4, 4),
     ({"kv_bits": "turbo4", "bits": 4}, 4, 4),     ({"policy": "uniform", "bits": 16, "activation_bits": 8}, 16, 16)],
)  # fmt: skip
def test_bounds_hold(server: Running, bounds: dict[str, Any], bits: float, kv_bits: float) -> None:
    usage = ask(server, prompt=(str(bounds) * 20)[:130], qbe=bounds)["usage"]
    assert usage["qbe"]["average_weight_bits"] == bits
    # One page is sealed: the tokens of the last one see the page before theirs at 16 bits, too.
    assert usage["qbe"]["average_kv_bits"] == pytest.approx((64 * kv_bits + 69 * 16) / 133, abs=1e-4)
    assert sum(usage["qbe"]["tokens_by_bits"].values()) == 130 + 4 - 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"service_tier": "gold"}, "service_tier"),
        ({"qbe": {"bitz": 5}}, "qbe.bitz"),
        ({"qbe": {"bits": 5, "max_bits": 6}}, "qbe.bits"),
        ({"qbe": {"min_bits": 8, "max_bits": 6}}, "qbe.min_bits"),
        ({"qbe": {"bits": 99}}, "qbe.bits"),
        ({"qbe": {"bits": 2}}, "qbe.bits"),
        ({"qbe": {"max_bits": 3}}, "qbe.max_bits"),
        ({"qbe": {"bits": 5}}, "qbe.bits"),  # the uniform policy has 4, 6, 8 and 16
        ({"service_tier": "priority", "qbe": {"min_bits": 9}}, "qbe.min_bits"),
        ({"qbe": {"kv_bits": 1}}, "qbe.kv_bits"),
        ({"qbe": {"kv_bits": 5}}, "qbe.kv_bits"),
        ({"qbe": {"kv_bits": "turbo3"}}, "qbe.kv_bits"),
        ({"qbe": {"kv_bits": "4"}}, "qbe.kv_bits"),
        ({"qbe": {"kv_bits": True}}, "qbe.kv_bits"),
        ({"qbe": {"kv_bits": [4]}}, "qbe.kv_bits"),
        ({"qbe": {"careful_tokens": True}}, "qbe.high_precision_tokens"),
        ({"qbe": {"careful_tokens": "yes", "activation_bits": 8}}, "qbe.high_precision_tokens"),
        ({"qbe": {"activation_bits": 7}}, "qbe.activation_bits"),
        ({"qbe": {"state_bits": 9}}, "qbe.state_bits"),
        ({"qbe": {"kv_bits": 4, "kv_error": 1e39}}, "qbe.kv_error"),
        ({"qbe": {"max_cost": 1e-9}}, "qbe.max_cost"),
        ({"qbe": {"max_cost": 0}}, "qbe.max_cost"),
        ({"qbe": {"max_latency_ms": -1}}, "qbe.max_latency_ms"),
        ({"qbe": {"policy": "none"}}, "qbe.policy"),
        ({"qbe": {"bits": 5, "refresh": True}}, "qbe.refresh"),
        ({"qbe": {"refresh": True}}, "qbe.refresh"),  # the uniform policy does not read the score
        ({"qbe": {"refresh_interval": 8}}, "qbe.refresh_interval"),
        ({"qbe": {"refresh": True, "refresh_count": 0}}, "qbe.refresh_count"),
        ({"qbe": {"best_effort": 1}}, "qbe.best_effort"),
        ({"qbe": {"policy": "tiered"}}, "qbe.policy"),  # this engine has no sensitivities
        ({"qbe": {"policy": "mobi", "bits": 5}}, "qbe.policy"),
        ({"qbe": {"policy": "random:x"}}, "qbe.policy"),
        ({"qbe": {"policy": 5}}, "qbe.policy"),
        ({"qbe": {"cascade": True}}, "qbe.cascade"),  # nothing was learned for it
        ({"qbe": {"cascade": 1}}, "qbe.cascade"),
        ({"qbe": {"speculate": "yes"}}, "qbe.speculate"),
        ({"qbe": {"min_bits": "many"}}, "qbe.min_bits"),
        ({"qbe": []}, "qbe"),
        ({"max_tokens": 1 << 30, "prompt": "x" * 5000}, "prompt"),
        ({"max_tokens": 0.5}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": ""}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "text", "grammar": ""}}, "response_format.grammar"),
        ({"response_format": {"type": "grammar", "grammar": "start: !"}}, "response_format"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"temperature": 3}, "temperature"),
        ({"n": 129}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(server: Running, body: dict[str, Any], field: str) -> None:
    refused(server, "completions", {"prompt": "hello"} | body, field)


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]}, "tools"),
        ({"tools": [FUNCTION], "response_format": {"type": "grammar", "grammar": "start: /x/"}}, "response_format"),
        ({"qbe": {"bits": 5}}, "qbe.bits"),
        ({"qbe": {"policy": "tokenwise"}}, "qbe.policy"),
    ],
)
def test_so_is_a_wrong_conversation(server: Running, body: dict[str, Any], field: str) -> None:
    refused(server, "chat/completions", {"messages": [{"role": "user", "content": "hello"}]} | body, field)


def test_what_can_never_fit_names_the_length_that_was_asked_for() -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    with running(lambda: tiny_engine(kv_tokens=256)) as small:
        refused(small, "completions", {"prompt": "hello", "max_tokens": 300}, "max_tokens")
        refused(small, "chat/completions", chat | {"max_tokens": 300}, "max_tokens")
        refused(small, "chat/completions", chat | {"max_completion_tokens": 300}, "max_completion_tokens")


def refused(server: Running, path: str, body: dict[str, Any], field: str) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == field, error
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


def test_the_cost_is_that_of_the_bits_used(server: Running) -> None:
    usage = ask(server, prompt="x" * 40, n=2, qbe={"bits": 4})["usage"]
    assert usage["cost"] == pytest.approx((40 * 10 + 8 * 40) / 1e6 * 4 / 16)
    assert usage["qbe"]["currency"] == "EUR"
    flex = ask(server, prompt="y" * 40, service_tier="flex", qbe={"bits": 4})["usage"]
    assert flex["cost"] == pytest.approx((40 * 10 + 4 * 40) / 1e6 * 4 / 16 / 2)
    ask(server, prompt="z" * 130)
    cached = ask(server, prompt="z" * 130)["usage"]
    assert cached["prompt_tokens_details"]["cached_tokens"] == 128
    assert cached["cost"] == pytest.approx((2 * 10 + 128 * 1 + 4 * 40) / 1e6 * 8 / 16)


def test_a_price_bounds_the_bits(server: Running) -> None:
    most = (20 * 10 + 4 * 40) / 1e6
    usage = ask(server, prompt="x" * 20, qbe={"max_cost": most * 7 / 16})["usage"]
    assert usage["qbe"]["average_weight_bits"] == 6
    assert usage["cost"] <= most * 7 / 16


def test_what_is_late_is_cut(server: Running) -> None:
    body = {"max_tokens": 3000, "prompt": "x", "ignore_eos": True, "qbe": {"max_latency_ms": 60}}
    answer = server.post("completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] < 3000
    until(lambda: not server.engine.core.has_work(), "the engine is idle")


def test_settings_change_while_it_runs_and_broken_ones_do_not(server: Running, config: Path) -> None:
    def write(text: str) -> None:
        new = config.with_suffix(".new")
        new.write_text(text)
        os.replace(new, config)

    try:
        write(TOML.replace("[6.0, 8.0]", "[16.0, 16.0]"))
        until(lambda: server.service.settings.tiers.default.bits[0] == 16, "the new settings")
        assert ask(server)["usage"]["qbe"]["average_weight_bits"] == 16
        for broken in ("[tiers.default]\nbits = [9, 5]", "not = [toml", "[tiers.flex]\nbits = [2.0, 3.0]"):
            write(broken)
            until(lambda: server.metric("qbe:settings_ok") == 0, "it says so")
            assert ask(server)["usage"]["qbe"]["average_weight_bits"] == 16
            write(TOML.replace("[6.0, 8.0]", "[16.0, 16.0]"))
            until(lambda: server.metric("qbe:settings_ok") == 1, "it is good again")
    finally:
        write(TOML)
        until(lambda: server.service.settings.tiers.default.bits[0] == 6, "the old settings")


def test_a_tier_without_bits_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("[tiers.flex]\npatience_s = 60\n[tiers.default]\nprice = 2\n[tiers.priority]\nbits = [8, 8]\n")
    tiers, usual = load(path).tiers, Settings().tiers
    assert (tiers.flex.bits, tiers.flex.patience_s) == (usual.flex.bits, 60)
    assert (tiers.default.bits, tiers.default.floor) == (usual.default.bits, usual.default.floor)
    assert (tiers.priority.bits, tiers.priority.floor) == ((8, 8), None)
    path.write_text("[tiers.default]\nbits = [8, 8]\n")
    assert load(path).tiers.default.floor is None  # a file that gives bits says all of it


def test_a_browned_out_tier_sinks_to_its_floor_and_no_further() -> None:
    tier = Tier(bits=(5.0, 7.0), floor=4.0)
    assert tier_bits(tier, 0.0) == (5.0, 7.0)
    assert tier_bits(tier, 0.5) == (4.5, 5.5)
    assert tier_bits(tier, 1.0) == (4.0, 4.0)
    assert tier_bits(Tier(bits=(5.0, 7.0)), 1.0) == (5.0, 7.0)
    given = terms("default", Contract(min_bits=6.0), Settings(), 1.0)
    assert budget(given, 1, 1, 1, 4.0, Speed()).within == (6.0, 6.0)  # what was asked for stays


def test_a_tier_says_the_activation_bits_that_a_request_does_not() -> None:
    settings = Settings.model_validate({"tiers": {"flex": {"activation_bits": 8}}})
    for tier, wanted, bits in (("flex", None, 8), ("flex", 16, 16), ("default", None, 16), ("default", 8, 8)):
        given = terms(tier, Contract(activation_bits=wanted), settings, 0.0)  # type: ignore[arg-type]
        assert budget(given, 1, 1, 1, 4.0, Speed()).activation_bits == bits


def test_speed_is_a_line_over_bits() -> None:
    speed = Speed()
    assert speed.most_bits(100, 10, 10) is None
    for bits in (4.0, 8.0, 4.0, 8.0):
        speed.learn(10, 20.0, 11, 10 * (1 + 0.5 * bits), bits)
    # 20 ms for the prompt, then 10 tokens of 1 + b/2 ms
    assert speed.most_bits(20 + 10 * 4.0, 10, 11) == pytest.approx(6.0)
    given = terms("default", Contract(max_latency_ms=50.0), Settings(), 0.0)
    found = budget(given, 10, 11, 1, 4.0, speed).within
    assert found is not None
    assert found[0] == found[1] == pytest.approx(4.0)
    with pytest.raises(APIError, match="max_bits"):
        budget(terms("default", Contract(max_bits=3.0), Settings(), 0.0), 1, 1, 1, 4.0, speed)


def test_best_effort_leaves_out_what_cannot_be_done_and_says_so(server: Running) -> None:
    usage = ask(server, qbe={"refresh": True, "cascade": True, "best_effort": True})["usage"]
    assert usage["qbe"]["ignored"] == ["qbe.refresh", "qbe.cascade"]
    assert "ignored" not in ask(server, qbe={"best_effort": True})["usage"]["qbe"]
