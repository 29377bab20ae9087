"""`/v1/messages`, through Anthropic's own client against a server process."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from server_running import LIMIT_S

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
WEATHER: Any = {
    "name": "weather",
    "description": "of a city",
    "input_schema": CITY,
    "cache_control": {"type": "ephemeral"},
}
BRIEF = "brief, " * 12  # more than a page of the cache
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def api(tiny_server_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=tiny_server_url, api_key="none", timeout=LIMIT_S, max_retries=0)


@pytest.fixture(scope="module")
def chat(tiny_server_url: str) -> Any:
    return openai.OpenAI(base_url=f"{tiny_server_url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)


def ask(api: anthropic.Anthropic, **fields: Any) -> Any:
    more = {"seed": 1} | fields.pop("more", {})
    return api.messages.create(**{"model": "model", "messages": HI, "max_tokens": 4} | fields, extra_body=more)


def test_it_writes_what_chat_completions_write(api: anthropic.Anthropic, chat: Any) -> None:
    said = [{"role": "system", "content": f"be\n{BRIEF}"}, {"role": "user", "content": "hi"}]
    other = chat.chat.completions.create(model="model", messages=said, max_tokens=4, seed=1)
    blocks: Any = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    system: Any = [{"type": "text", "text": "be"}, {"type": "text", "text": BRIEF}]
    for text, messages in ((f"be\n{BRIEF}", HI), (system, [{"role": "user", "content": blocks}])):
        found = ask(api, system=text, messages=messages)
        (block,) = found.content
        assert (block.type, block.text) == ("text", other.choices[0].message.content)
        assert (found.stop_reason, found.stop_sequence, found.role) == ("max_tokens", None, "assistant")
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == other.usage.prompt_tokens
    assert usage.output_tokens == 4
    assert usage.cache_read_input_tokens > 0


def test_precision_is_asked_for_as_in_chat(api: anthropic.Anthropic) -> None:
    found = ask(api, more={"service_tier": "flex", "qbe": {"bits": 4}})
    own = found.usage.model_extra["qbe"]
    assert (own["tier"], own["average_weight_bits"]) == ("flex", 4)
    assert ask(api, service_tier="standard_only").usage.model_extra["qbe"]["tier"] == "default"
    with pytest.raises(anthropic.BadRequestError, match=r"qbe\.bits"):
        ask(api, more={"qbe": {"bits": 17}})


def test_events_come_in_order(api: anthropic.Anthropic) -> None:
    whole = ask(api, max_tokens=6)
    events = list(ask(api, max_tokens=6, stream=True))
    deltas = [e for e in events if e.type == "content_block_delta"]
    kinds = [e.type for e in events if e.type != "ping"]
    assert kinds == ["message_start", "content_block_start", *["content_block_delta"] * len(deltas),
                     "content_block_stop", "message_delta", "message_stop"]  # fmt: skip
    assert "".join(e.delta.text for e in deltas) == whole.content[0].text
    assert events[-2].usage.output_tokens == 6
    assert events[-2].delta.stop_reason == "max_tokens"
    assert "qbe" in events[-2].usage.model_extra
    with api.messages.stream(model="model", messages=HI, max_tokens=6, extra_body={"seed": 1}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == 6


def test_calls_are_streamed_and_go_back(api: anthropic.Anthropic, chat: Any) -> None:
    asked: Any = dict(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200)
    with api.messages.stream(model="model", messages=HI, **asked) as stream:
        kinds = [e.delta.type for e in stream if e.type == "content_block_delta"]
        found = stream.get_final_message()
    assert set(kinds) == {"input_json_delta"}
    (call,) = found.content
    assert (call.type, call.name, found.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input["city"] in ("Paris", "Rome")  # type: ignore[index]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    back: Any = [*HI, {"role": "assistant", "content": found.content}, {"role": "user", "content": [
        result, {"type": "text", "text": "well?"}]}]  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
    said = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "weather", "arguments": json.dumps(call.input)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        {"role": "user", "content": "well?"},
    ]
    other = chat.chat.completions.create(model="model", messages=said, tools=[tool], max_tokens=1)
    counted = api.messages.count_tokens(model="model", messages=back, tools=[WEATHER])
    assert counted.input_tokens == other.usage.prompt_tokens
    failed = {**result, "is_error": True, "content": [{"type": "text", "text": "sunny"}]}
    back[-1] = {"role": "user", "content": [failed, {"type": "text", "text": "well?"}]}
    longer = api.messages.count_tokens(model="model", messages=back, tools=[WEATHER])
    assert longer.input_tokens == counted.input_tokens + len("Error: ")
    assert ask(api, messages=back, tools=[WEATHER]).content


def test_names_of_tools_are_as_long_as_anthropics(api: anthropic.Anthropic) -> None:
    long = WEATHER | {"name": "mcp__weather__" + "a" * 114}
    found = ask(api, tools=[long], tool_choice={"type": "any"}, max_tokens=240)
    assert found.content[0].name == long["name"]


def test_choices_of_tools(api: anthropic.Anthropic) -> None:
    clock = {"name": "clock", "type": "custom", "input_schema": {"type": "object", "properties": {}}}
    found = ask(api, tools=[WEATHER, clock], tool_choice={"type": "tool", "name": "clock"}, max_tokens=200)
    assert {block.name for block in found.content} == {"clock"}
    assert {b.type for b in ask(api, tools=[WEATHER], tool_choice={"type": "none"}).content} == {"text"}
    with pytest.raises(anthropic.BadRequestError, match="no function 'x'"):
        ask(api, tools=[WEATHER], tool_choice={"type": "tool", "name": "x"})


def test_stop_sequences_say_which(api: anthropic.Anthropic) -> None:
    text = ask(api, max_tokens=12).content[0].text
    stop = next(c for c in text[1:] if c.isascii() and c.isprintable() and c != " ")
    found = ask(api, max_tokens=12, stop_sequences=["never to be found", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text.partition(stop)[0]


def test_structured_text(api: anthropic.Anthropic) -> None:
    found = ask(api, output_config={"format": {"type": "json_schema", "schema": CITY}}, max_tokens=200)
    assert json.loads(found.content[0].text)["city"] in ("Paris", "Rome")
    assert found.stop_reason == "end_turn"
    assert found.usage.model_extra["qbe"]["valid"] is True


def test_tokens_are_counted(api: anthropic.Anthropic) -> None:
    counted = api.messages.count_tokens(model="model", messages=HI, system="be brief")
    found = ask(api, system="be brief")
    assert counted.input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="context"):
        api.messages.count_tokens(model="model", messages=[{"role": "user", "content": "x" * 5000}])


def test_models_are_listed(api: anthropic.Anthropic) -> None:
    names = [m.id for m in api.models.list()]
    assert "model" in names
    assert api.models.retrieve("model").display_name == "model"
    with pytest.raises(anthropic.NotFoundError) as missing:
        api.models.retrieve("other")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]


def test_what_changes_nothing_is_said(api: anthropic.Anthropic) -> None:
    found = ask(
        api, thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "low"}, speed="fast",
        metadata={"user_id": "u"}, more={
            "temperature": 0.5, "top_p": 0.9, "top_k": 3, "inference_geo": "us", "diagnostics": None,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }
    )  # fmt: skip
    assert sorted(found.usage.model_extra["qbe"]["ignored"]) == [
        "context_management", "inference_geo", "output_config.effort", "speed", "thinking",
    ]  # fmt: skip
    history: Any = [*HI, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "yes", "citations": None}]}, {"role": "user", "content": "so?"}]  # fmt: skip
    plain: Any = [*HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so?"}]
    counts = [api.messages.count_tokens(model="model", messages=m).input_tokens for m in (history, plain)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}]}]},
     "messages.0.content.0.source"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": "AA=="}}]}]}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "messages"),
    ({"container": "c"}, "container"), ({"mcp_servers": []}, "mcp_servers"), ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"), ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_anthropics_form(
    api: anthropic.Anthropic, fields: dict[str, Any], param: str
) -> None:
    answer = httpx2.post(
        f"{api.base_url}/v1/messages", json={"messages": HI, "max_tokens": 2} | fields, timeout=LIMIT_S
    )
    found = answer.json()
    assert answer.status_code == 400, answer.text
    assert (found["type"], found["error"]["type"], found["error"]["param"]) == ("error", "invalid_request_error", param)
    assert found["request_id"] == answer.headers["x-request-id"]
    assert "\n" not in found["error"]["message"]
