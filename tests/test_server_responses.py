"""`/v1/responses`, through OpenAI's own client against a server process."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from qbe.server.errors import APIError
from qbe.server.responses import store
from qbe.server.responses.protocol import InputItem
from server_running import LIMIT_S

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
WEATHER: Any = {"type": "function", "name": "weather", "strict": True, "parameters": CITY}
CLOCK: Any = {"type": "function", "name": "clock", "strict": False, "parameters": {"type": "object", "properties": {}}}
BRIEF = "be brief, " * 12  # more than a page of the cache


@pytest.fixture(scope="module")
def api(tiny_server_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny_server_url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    more = {"seed": 1} | fields.pop("more", {})
    return api.responses.create(**{"model": "model", "input": "hi", "max_output_tokens": 4} | fields, extra_body=more)


def post(api: openai.OpenAI, **body: Any) -> Any:
    return httpx2.post(f"{api.base_url}responses", json=body, timeout=LIMIT_S, verify=False)


def test_it_writes_what_chat_completions_write(api: openai.OpenAI) -> None:
    chat = api.chat.completions.create(
        model="model", messages=[{"role": "system", "content": BRIEF}, {"role": "user", "content": "hi"}],
        max_tokens=4, seed=1,
    )  # fmt: skip
    items: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    for given in ("hi", items):
        found = ask(api, instructions=BRIEF, input=given, store=False)
        assert found.output_text == chat.choices[0].message.content
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.id.startswith("resp_")
    assert chat.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat.usage.prompt_tokens, 4)
    assert found.usage.total_tokens == found.usage.input_tokens + 4
    assert 0 < found.usage.input_tokens_details.cached_tokens < found.usage.input_tokens
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_precision_is_asked_for_as_in_chat(api: openai.OpenAI) -> None:
    found = ask(api, service_tier="flex", more={"qbe": {"bits": 4}, "top_k": 3})
    assert found.service_tier == "flex"
    assert found.usage.model_extra["qbe"]["average_weight_bits"] == 4
    assert "cost" in found.usage.model_extra
    with pytest.raises(openai.BadRequestError, match=r"qbe\.bits") as refused:
        ask(api, more={"qbe": {"bits": 17}})
    assert refused.value.param == "qbe.bits"


def test_events_come_in_order(api: openai.OpenAI) -> None:
    whole = ask(api, max_output_tokens=6)
    events = list(ask(api, max_output_tokens=6, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert "".join(e.delta for e in deltas) == whole.output_text == events[-1].response.output_text
    assert events[0].response.output == []
    assert events[2].item.content == []
    assert {e.item_id for e in deltas} == {events[2].item.id}
    assert events[-1].response.usage.output_tokens == 6


def test_calls_are_streamed_and_go_back(api: openai.OpenAI) -> None:
    asked: Any = dict(tools=[WEATHER], tool_choice="required", max_output_tokens=200, parallel_tool_calls=False)
    kinds = []
    with api.responses.stream(model="model", input="hi", **asked) as stream:
        for e in stream:
            kinds.append(e.type.removeprefix("response."))
        found = stream.get_final_response()
    assert kinds[2] == "output_item.added"
    assert "function_call_arguments.delta" in kinds
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    (call,) = found.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    question: Any = {"role": "user", "content": "hi"}
    whole = ask(api, input=[question, call, result], tools=[WEATHER])
    kept = ask(api, input=[result], previous_response_id=found.id, tools=[WEATHER])
    named = ask(api, input=[question, {"type": "item_reference", "id": call.id}, result], tools=[WEATHER])
    assert whole.usage.input_tokens == kept.usage.input_tokens == named.usage.input_tokens
    assert whole.output_text == kept.output_text == named.output_text


def test_choices_of_tools(api: openai.OpenAI) -> None:
    for choice in (
        {"type": "function", "name": "clock"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]},
    ):
        found = ask(api, tools=[WEATHER, CLOCK], tool_choice=choice, max_output_tokens=200)
        assert {item.name for item in found.output} == {"clock"}
        assert found.tool_choice.type == choice["type"]
    with pytest.raises(openai.BadRequestError, match="no function 'x'") as refused:
        ask(api, tools=[WEATHER], tool_choice={"type": "function", "name": "x"})
    assert refused.value.param == "tool_choice"


def test_custom_tools(api: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "regex",
                                                             "definition": "[0-9]{3}|no"}}  # fmt: skip
    asked: Any = dict(tools=[tool], tool_choice="required", max_output_tokens=200, parallel_tool_calls=False)
    events = list(ask(api, stream=True, **asked))
    (call,) = events[-1].response.output
    assert call.type == "custom_tool_call"
    assert call.input == "no" or call.input.isdigit()
    assert [e.type for e in events[3:6]] == [
        "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "response.output_item.done",
    ]  # fmt: skip
    back = [
        {"role": "user", "content": "hi"},
        call,
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "ok"}]},
    ]
    assert ask(api, input=back, tools=[tool]).output


def test_structured_text(api: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": CITY, "strict": True}}
    found = ask(api, text=form, max_output_tokens=200)
    assert json.loads(found.output_text)["city"] in ("Paris", "Rome")
    assert (found.status, found.usage.model_extra["qbe"]["valid"]) == ("completed", True)
    assert found.text.format.name == "place"
    assert isinstance(
        json.loads(ask(api, text={"format": {"type": "json_object"}}, max_output_tokens=99).output_text), dict
    )
    odd = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(api, text=odd)
    assert refused.value.param == "text.format"
    assert refused.value.message.count("text.format: ") == 1
    assert "response_format" not in refused.value.message


def test_logprobs_are_included_where_asked(api: openai.OpenAI) -> None:
    found = ask(api, include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = found.output[0].content
    assert len(part.logprobs) == 4
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    assert ask(api).output[0].content[0].logprobs == []
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        ask(api, top_logprobs=2)


def test_answers_are_kept_and_forgotten(api: openai.OpenAI) -> None:
    first = ask(api)
    assert api.responses.retrieve(first.id).output_text == first.output_text
    second = ask(api, input="and?", previous_response_id=first.id)
    listed = api.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in listed] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    assert second.usage.input_tokens > first.usage.input_tokens
    one = api.responses.input_items.list(second.id, limit=1)
    assert [item.content[0].text for item in one.data] == ["and?"]  # type: ignore[union-attr, index]
    assert len(list(one)) == 3  # the client asks for the other pages
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation") as refused:
        ask(api, previous_response_id=first.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(ask(api, store=False).id)


@pytest.mark.parametrize(("fields", "param"), [
    ({"background": True}, "background"), ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"), ({"unheard_of": 1}, "unheard_of"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/a"}]}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"), ({"input": []}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input.0.type"),
    ({"input": "x" * 5000}, "input"), ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(api: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    answer = post(api, **{"input": "hi", "max_output_tokens": 2} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param
    assert "\n" not in error["message"]


def test_what_changes_nothing_is_said(api: openai.OpenAI) -> None:
    found = ask(
        api, truncation="auto", reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"},
        include=["reasoning.encrypted_content"], metadata={"a": "b"}, user="u", safety_identifier="s",
        prompt_cache_key="k", max_tool_calls=3, parallel_tool_calls=True,
    )  # fmt: skip
    assert sorted(found.usage.model_extra["qbe"]["ignored"]) == [
        "include.reasoning.encrypted_content", "reasoning.effort", "reasoning.summary", "text.verbosity", "truncation",
    ]  # fmt: skip
    assert found.metadata == {"a": "b"}
    nulls: Any = dict.fromkeys(("instructions", "tools", "tool_choice", "text", "reasoning", "include", "background"))
    assert "ignored" not in post(api, input="hi", max_output_tokens=2, **nulls).json()["usage"]["qbe"]


def test_a_history_of_other_clients_is_read(api: openai.OpenAI) -> None:
    history: Any = [
        {"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"}, {"role": "user", "content": "well?"},
    ]  # fmt: skip
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "yes",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "well?"},
    ]
    chat = api.chat.completions.create(model="model", messages=said, max_tokens=2, seed=1)  # type: ignore[arg-type]
    assert ask(api, input=history).usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "path", ["embeddings", "audio/speech", "images/generations", "moderations", "fine_tuning/jobs"]
)
def test_paths_of_other_servers_get_a_hint(api: openai.OpenAI, path: str) -> None:
    answer = httpx2.post(f"{api.base_url}{path}", json={"input": "x"}, timeout=LIMIT_S)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert f"there is no '/v1/{path}' here: this server" in message
    assert "\n" not in message


def kept(text: str, id: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"id": id, "output": [{"id": f"msg_{id}", "type": "message", "role": "assistant", "content": content}]}


def test_the_store_is_bounded_for_each_key_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_KEPT", 3)
    monkeypatch.setattr(store, "KEY_BYTES", 4000)
    monkeypatch.setattr(store, "ALL_BYTES", 6000)
    found, asked = store.ResponseStore(), [InputItem(role="user", content="x")]
    for i in range(5):
        found.put("a", kept("short", f"a{i}"), asked)
    found.put("b", kept("short", "b0"), asked)
    with pytest.raises(APIError, match="no response 'a1'"):
        found.get("a", "a1")
    assert [found.get("a", f"a{i}").response["id"] for i in (2, 3, 4)] == ["a2", "a3", "a4"]
    with pytest.raises(APIError):
        found.get("b", "a2")  # another key's
    found.put("a", kept("y" * 1500, "long"), asked)  # twice that, with the item: others of this key make room
    assert found.get("b", "b0")
    found.put("a", kept("y" * 5000, "too long"), asked)
    with pytest.raises(APIError):
        found.get("a", "too long")
    found.put("b", kept("y" * 1400, "b1"), asked)
    assert sum(found._bytes.values()) <= 6000
    assert found._bytes.total() == sum(k.bytes for k in found._kept.values())
    for key, id in list(found._kept):
        found.delete(key, id)
    assert not found._items
    assert found._bytes.total() == 0
