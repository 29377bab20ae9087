"""What OpenAI's own client and those of others send by default, against a server process."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import openai
import pytest

from server_running import LIMIT_S

HI: Any = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
WEATHER: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}


@pytest.fixture(scope="module")
def url(tiny_server_url: str) -> str:
    return tiny_server_url


@pytest.fixture(scope="module")
def api(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)


def post(url: str, path: str, **body: Any) -> Any:
    return httpx2.post(f"{url}/v1/{path}", json=body, timeout=LIMIT_S, verify=False)


def chat(url: str, **body: Any) -> Any:
    return post(url, "chat/completions", **{"messages": HI, "max_tokens": 3} | body)


@pytest.mark.parametrize("field", [
    "temperature", "top_p", "n", "stop", "seed", "logit_bias", "user", "stream", "stream_options", "logprobs", "tools",
    "tool_choice", "parallel_tool_calls", "response_format", "metadata", "store", "functions", "function_call", "audio",
    "reasoning_effort", "verbosity", "prediction", "modalities", "service_tier", "qbe", "ignore_eos",
    "web_search_options",
    "logprob_token_ids", "max_completion_tokens", "prompt_cache_key", "safety_identifier", "chat_template_kwargs",
])  # fmt: skip
def test_null_asks_for_nothing(url: str, field: str) -> None:
    assert chat(url, **{field: None}).status_code == 200


def test_all_answers_may_be_the_best(url: str) -> None:
    answer = post(url, "completions", prompt="a", max_tokens=2, n=2, best_of=2)
    assert len(answer.json()["choices"]) == 2, answer.text


def test_nulls_in_completions_and_within_fields(url: str) -> None:
    contract = dict.fromkeys(("bits", "min_bits", "kv_bits", "max_cost", "policy", "refresh", "best_effort", "cascade"))
    assert post(url, "completions", prompt="a", max_tokens=2, qbe=contract).status_code == 200
    nulls = dict.fromkeys(("echo", "ignore_eos", "best_of", "suffix", "logprobs", "stop", "n", "seed", "stream"))
    assert post(url, "completions", prompt="a", max_tokens=2, **nulls).status_code == 200
    stream = chat(url, stream=True, stream_options={"include_usage": None, "include_obfuscation": None})
    assert stream.text.endswith("data: [DONE]\n\n")
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    assert chat(url, tools=[tool], tool_choice="auto").status_code == 200


@pytest.mark.parametrize(("fields", "ignored"), [
    ({"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": False}, None),
    ({"verbosity": "low", "reasoning_effort": "high", "store": True}, ["reasoning_effort", "store", "verbosity"]),
    ({"prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h"},
     ["prediction", "prompt_cache_retention"]),
    ({"prompt_cache_options": {"mode": "implicit"}}, ["prompt_cache_options"]),
    ({"chat_template_kwargs": {"enable_thinking": False}}, ["chat_template_kwargs.enable_thinking"]),
    ({"modalities": ["text"], "parallel_tool_calls": True, "top_p": 0, "service_tier": "auto"}, None),
])  # fmt: skip
def test_harmless_fields_are_taken_and_what_does_nothing_is_named(
    url: str, fields: dict[str, Any], ignored: Any
) -> None:
    answer = chat(url, **fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]["qbe"].get("ignored")
    assert (found and sorted(found)) == ignored


@pytest.mark.parametrize("fields", [
    {"functions": [{"name": "f"}]}, {"audio": {"voice": "x"}}, {"web_search_options": {}}, {"modalities": ["audio"]},
    {"moderation": {"model": "omni-moderation-latest"}},
    {"chat_template_kwargs": {"tokenize": True}}, {"chat_template_kwargs": {"chat_template": "x"}}, {"unheard_of": 1},
    {"tools": [{"type": "web_search"}]}, {"tools": [{"type": "custom", "function": {"name": "f"}}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
])  # fmt: skip
def test_what_cannot_be_honoured_says_so(url: str, fields: dict[str, Any]) -> None:
    answer = chat(url, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] is not None
    assert error["param"].split(".")[0] in fields
    assert "\n" not in error["message"]


def test_of_a_list_the_wrong_part_is_told(url: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "x"}, image]
    error = chat(url, messages=[{"role": "user", "content": parts}]).json()["error"]
    assert (error["param"], "it is a model of text: leave" in error["message"]) == ("messages", True)
    audio = {"type": "input_audio", "input_audio": {}}
    error = chat(url, messages=[{"role": "user", "content": [*parts, audio]}]).json()["error"]
    assert (error["param"], "parts have the type 'text'" in error["message"]) == ("messages.0.content", True)
    assert "at least 1 character" in chat(url, stop=["a", ""]).json()["error"]["message"]


def test_a_streamed_call_goes_back_as_it_came(api: openai.OpenAI) -> None:
    asked: Any = dict(model="model", tools=[WEATHER], max_tokens=200, seed=1, parallel_tool_calls=False)
    with api.chat.completions.stream(messages=HI, tool_choice="required", **asked) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or ()
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    for back in (message, message.to_dict(), message.model_dump(exclude_none=True)):
        assert api.chat.completions.create(messages=[*HI, back, result], **asked | {"max_tokens": 2}).choices
    calls: list[Any] = []
    for chunk in api.chat.completions.create(messages=HI, tool_choice="required", stream=True, **asked):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.index >= len(calls):
                calls.append(delta.model_dump())
            else:
                calls[delta.index]["function"]["arguments"] += delta.function.arguments  # type: ignore[union-attr]
    back = {"role": "assistant", "content": None, "tool_calls": calls}
    result["tool_call_id"] = calls[0]["id"]
    assert api.chat.completions.create(messages=[*HI, back, result], **asked | {"max_tokens": 2}).choices


CALL: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


@pytest.mark.parametrize("history", [
    [{"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}], "refusal": None, "audio": None,
      "annotations": [], "function_call": None, "parsed": None},
     {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok", "cache_control": {}}]}],
    [{"role": "assistant", "tool_calls": [
        CALL | {"function": CALL["function"] | {"parsed_arguments": {"city": "Rome"}}}]},
     {"role": "tool", "tool_call_id": "c1", "content": "ok", "name": None}],
    [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
     {"role": "tool", "tool_call_id": "c1", "content": "ok"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": None}}]},
     {"role": "tool", "content": "ok"}],
    [{"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
     {"role": "function", "name": "weather", "content": "ok"}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, {"role": "developer", "content": "x"}],
    [{"role": "assistant", "content": None, "refusal": "no"},
     {"role": "system", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm"}, {"type": "output_text", "text": "yes"}]}],
    [{"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "hm", "reasoning": {"a": 1}}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "c2", "type": "custom", "custom": {
        "name": "run", "input": "ls"}}]}, {"role": "tool", "tool_call_id": "c2", "content": "a.txt"}],
])  # fmt: skip
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_history_is_read_leniently(url: str, history: list[dict[str, Any]], tools: Any) -> None:
    answer = chat(url, messages=[*HI, *history, {"role": "user", "content": "well?"}], tools=tools)
    assert answer.status_code == 200, answer.text


def test_tools_that_are_allowed_in_this_turn(api: openai.OpenAI) -> None:
    both = [WEATHER, {"type": "function", "function": {"name": "clock", "parameters": CITY}}]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}}  # fmt: skip
    found = api.chat.completions.create(model="model", messages=HI, tools=both, tool_choice=allowed, max_tokens=200)  # type: ignore[call-overload]
    assert {c.function.name for c in found.choices[0].message.tool_calls} == {"clock"}
    wrong = allowed | {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]}}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        api.chat.completions.create(model="model", messages=HI, tools=both, tool_choice=wrong)  # type: ignore[call-overload]


@pytest.mark.parametrize(("form", "matches"), [
    ({"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "ls" | "pwd" " "? /[a-z]{2}/'}},
     r"ls|pwd ?[a-z]{2}"),
    ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{3}|no"}}, r"[0-9]{3}|no"),
    ({"type": "text"}, r"(?s:.*)"),
    (None, r"(?s:.*)"),
])  # fmt: skip
def test_custom_tools(api: openai.OpenAI, url: str, form: Any, matches: str) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "run", "description": "runs it", "format": form}}
    asked: Any = dict(model="model", messages=HI, tools=[tool, WEATHER], seed=3, max_tokens=120,
                      tool_choice={"type": "custom", "custom": {"name": "run"}})  # fmt: skip
    message = api.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls or ()
    assert (call.type, call.custom.name) == ("custom", "run")  # type: ignore[union-attr]
    assert re.fullmatch(matches, call.custom.input)  # type: ignore[union-attr]
    lines = chat(url, **asked, stream=True).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert [c["custom"] for d in deltas for c in d.get("tool_calls", ())] == [call.custom.model_dump()]  # type: ignore[union-attr]
    back = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert api.chat.completions.create(**asked | {"messages": back, "tool_choice": "auto", "max_tokens": 2}).choices


def of(a: Any, **more: Any) -> dict[str, Any]:
    """A schema with one property."""
    return {"type": "object", "properties": {"a": a}, "required": ["a"], **more}


EVERYDAY = {
    "unique": of({"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
    "names": of({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}),
    "not": of({"not": {}}), "if": of({"type": "string"}, **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    "contains": of({"type": "array", "contains": {"type": "string"}, "minContains": 1}),
    "lookahead": of({"type": "string", "pattern": "^(?!-)[a-z-]+$"}), "backreference": of({"pattern": "(a)\\1"}),
    "boundary": of({"type": "string", "pattern": "\\bx\\b"}), "no pattern": of({"type": "string", "pattern": "(["}),
    "format": of({"type": "string", "format": "byte"}), "oneOf": of({"oneOf": [{"type": "string"}, {"const": "all"}]}),
    "any": of({"type": "any"}), "capitals": of({"type": "STRING"}),
    "nullable": of({"type": "string", "nullable": True}), "no type": {"properties": {}},
    "null": {"type": "object", "properties": {}, "required": None}, "flag": of({"type": "string", "required": True}),
    "no enum": of({"type": "string", "enum": []}), "dependent": of({"type": "string"}, dependentRequired={"a": ["b"]}),
    "unknown reference": of({"$ref": "#/definitions/x"}), "elsewhere": of({"$ref": "http://example.org/x"}),
    "dynamic": of({"$dynamicRef": "#x"}), "unevaluated": of({"type": "string"}, unevaluatedProperties=False),
    "nowhere": {"type": "object", "properties": {}, "required": ["z"], "additionalProperties": False},
    "types": of({"type": ["string", {"type": "null"}]}), "large": of({"type": "integer", "maximum": 2**63 - 1}),
    "draft 4": of({"type": "number", "minimum": 0, "exclusiveMinimum": True}), "int": of({"type": "int"}),
    "tuple": of({"type": "array", "items": [{"type": "string"}], "additionalItems": False}),
    "patterns": of({"type": "object", "patternProperties": {"^(?=x)": {}}, "additionalProperties": False}),
    "dependencies": of({"type": "string"}, dependencies={"a": ["b"]}),
    "disallow": of({"type": "string", "disallow": [{"enum": ["x"]}]}), "extends": of({"extends": {"type": "string"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_schemas_do_not_refuse_a_tool(url: str, name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": EVERYDAY[name]}}, WEATHER]
    answer = chat(url, tools=tools, tool_choice="required", max_tokens=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, of({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"$ref": "#/$defs/b"}}})]
)
def test_a_schema_that_refers_to_itself_alone_is_one_line(url: str, schema: dict[str, Any]) -> None:
    error = chat(url, tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).json()["error"]
    assert error["param"] == "tools"
    assert "no text that it allows" in error["message"]


@pytest.mark.parametrize("name", ["unique", "lookahead", "format", "if", "nowhere", "dependencies", "disallow"])
def test_strict_ones_are_kept_to_or_refused_by_name(url: str, name: str) -> None:
    tools = [WEATHER, {"type": "function", "function": {"name": "odd", "parameters": EVERYDAY[name], "strict": True}}]
    answer = chat(url, tools=tools)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "tools", "invalid_grammar")
    assert "'odd'" in error["message"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": EVERYDAY[name], "strict": True}}
    assert chat(url, response_format=form).json()["error"]["param"] == "response_format"


def test_what_the_grammar_leaves_open_is_checked(url: str) -> None:
    schema = of({"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
                additionalProperties=False)  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    seen = set()
    for seed in range(12):
        answer = chat(url, response_format=form, seed=seed, max_tokens=200).json()
        found = json.loads(answer["choices"][0]["message"]["content"])["a"]
        assert answer["usage"]["qbe"]["valid"] == (found[0] != found[1])
        seen.add(found[0] != found[1])
    assert seen == {True, False}


def test_keywords_of_draft_3_hold(url: str) -> None:
    """What of them a grammar can hold does; the rest is checked."""
    schema = of({"type": "integer", "divisibleBy": 7, "minimum": 1, "maximum": 20, "disallow": [{"enum": [14]}]},
                additionalProperties=False)  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    seen = {}
    for seed in range(12):
        answer = chat(url, response_format=form, seed=seed, max_tokens=200).json()
        seen[json.loads(answer["choices"][0]["message"]["content"])["a"]] = answer["usage"]["qbe"]["valid"]
    assert seen == {7: True, 14: False}


@pytest.mark.parametrize("most", [12, 40, 90])
def test_structured_answers_end(api: openai.OpenAI, most: int) -> None:
    b = {"type": "array", "items": {"type": "number"}}
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": b}, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked: Any = dict(model="model", messages=HI, response_format=form, max_tokens=most, seed=1)
    answer = api.chat.completions.create(**asked)
    own = answer.usage.model_extra["qbe"]  # type: ignore[union-attr, index]
    least = len('{"a":"","b":[]}')
    if most < least:
        assert (own["valid"], own["cut"], answer.choices[0].finish_reason) == (False, None, "length")
        return
    assert set(json.loads(answer.choices[0].message.content or "")) == {"a", "b"}
    assert own["valid"] is True
    assert (answer.choices[0].finish_reason == "length") == (own["cut"] == "max_tokens")
    *_, last = api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.model_extra["qbe"]["valid"] is True  # type: ignore[union-attr, index]


def test_a_call_ends_and_says_that_it_was_cut(api: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": of({"type": "string"})}}
    answer = api.chat.completions.create(
        model="model", messages=HI, tools=[tool], tool_choice="required", max_tokens=120, logit_bias={"66": 30},
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or ()
    assert "c" in json.loads(call.function.arguments)["a"]  # type: ignore[union-attr]
    assert answer.choices[0].finish_reason == "length"  # what was cut must not be taken for what was meant
    assert answer.usage.model_extra["qbe"] | {"valid": True, "cut": "max_tokens"} == answer.usage.model_extra["qbe"]  # type: ignore[union-attr, index]
