"""No body makes the server fail: what is wrong is a 400 in OpenAI's format, everything else is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server_running import Running, running

ODD = st.one_of(st.integers(), st.floats(), st.sampled_from([-1, 99, 1e308]))
NUMBERS = st.one_of(st.sampled_from([0, 1, 0.5, 1.5]), st.sampled_from([1, 0.25]), ODD)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
ANYTHING = st.recursive(
    SCALARS, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(st.text(max_size=6), v, max_size=3)),
    max_leaves=6,
)  # fmt: skip
SCHEMAS = st.recursive(
    st.sampled_from([{"type": t} for t in ("string", "integer", "boolean", "null", "object", "array", "x")]),
    lambda s: st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["object", "array"]), "items": s, "anyOf": st.lists(s, max_size=2),
        "properties": st.dictionaries(st.text(max_size=3), s, max_size=2), "pattern": st.text(max_size=6),
    }), max_leaves=4,
)  # fmt: skip
CALL = st.fixed_dictionaries({"id": st.text(max_size=3), "type": st.just("function"), "function": st.fixed_dictionaries(
    {"name": st.text(max_size=3), "arguments": st.sampled_from(["{}", "", "[]", "{", '{"a": 1}'])})})  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
         "content": st.one_of(st.text(), st.just("hello"), st.just([{"type": "text", "text": "a"}]))},
        optional={"tool_calls": st.lists(CALL, max_size=2), "name": st.text(max_size=4), "more": ANYTHING},
    ),
    min_size=1, max_size=3,
)  # fmt: skip
FUNCTION = {"type": "function", "function": {"name": "f"}}
CONTRACT = {
    "bits": st.sampled_from([4, 6, 16, 5]), "min_bits": NUMBERS, "max_bits": st.sampled_from([4, 8, 99]),
    "kv_bits": st.sampled_from([2, 4, 5, 16]), "kv_error": NUMBERS, "max_cost": NUMBERS, "max_latency_ms": NUMBERS,
    "policy": st.sampled_from(["uniform", "tiered", "x"]), "activation_bits": st.sampled_from([8, 16, 4]),
    "state_bits": st.sampled_from([8, 32, 4]),
}  # fmt: skip
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
                     "repetition_penalty"), NUMBERS),
    "model": st.sampled_from(["tiny", "x", None]), "n": st.sampled_from([1, 2, 0, 999, None]), "unknown": ANYTHING,
    "stop": st.one_of(st.text(), st.lists(st.text(min_size=1), max_size=3), ANYTHING), "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(-2, 400).map(str), NUMBERS, max_size=2), "logprobs": st.booleans(),
    "stream_options": st.one_of(ANYTHING, st.just({"include_usage": True, "continuous_usage_stats": True})),
    "service_tier": st.sampled_from(["auto", "flex", "scale", "priority", "fast", "gold"]),
    "response_format": st.one_of(
        ANYTHING, st.just({"type": "json_object"}), st.builds(lambda g: {"type": "grammar", "grammar": g}, st.text()),
        st.builds(lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}, SCHEMAS)),
    "ignore_eos": st.booleans(),
}  # fmt: skip
CHAT = FIELDS | {
    "tools": st.one_of(ANYTHING, st.just([FUNCTION]), st.builds(
        lambda s: [{"type": "function", "function": {"name": "f", "parameters": s}}], SCHEMAS)),
    "tool_choice": st.sampled_from(["auto", "none", "required", FUNCTION, 1]), "parallel_tool_calls": st.booleans(),
    "top_logprobs": NUMBERS,
}  # fmt: skip
COMPLETION = FIELDS | {"echo": st.booleans(), "logprobs": NUMBERS, "best_of": st.sampled_from([None, 1, 2])}
PROMPTS = st.one_of(
    st.text(min_size=1, max_size=9),
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.just(["a", "b"]),
    ANYTHING,
)


def some_of(fields: dict[str, st.SearchStrategy[Any]], **always: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Bodies with a few of these fields, so that not every one is refused for something."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries(always | {name: fields[name] for name in chosen}))


TOKENS = st.sampled_from([1, 2, 3, 0])
BOUNDS = st.one_of(st.none(), st.none(), some_of(CONTRACT), ANYTHING)
BODIES = st.one_of(
    some_of(CHAT, messages=st.one_of(MESSAGES, MESSAGES, MESSAGES, ANYTHING), max_tokens=TOKENS, qbe=BOUNDS).map(
        lambda b: ("chat/completions", b)
    ),
    some_of(COMPLETION, prompt=PROMPTS, max_tokens=TOKENS, qbe=BOUNDS).map(lambda b: ("completions", b)),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(BODIES)
def test_no_body_makes_the_server_fail(server: Running, asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    answer = server.http.post(
        f"/v1/{path}", content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), (body, answer.text)
