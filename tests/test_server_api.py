"""The HTTP API through OpenAI's own client: what it promises, against the engine and transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import torch

from server_running import Running, running, tiny_parts

HI: Any = [{"role": "user", "content": "hi"}]
FULL = {"qbe": {"bits": 16}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size", "kind", "parts"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False,
    }}}
    for name in ("light", "heat")
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def api(server: Running) -> openai.OpenAI:
    return server.client


def test_a_chat_answer_is_the_engines_and_says_what_it_took(server: Running, api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="tiny", messages=HI, max_tokens=9, temperature=0, extra_body=FULL)
    model, tokenizer = tiny_parts()
    ids = tokenizer(tokenizer.apply_chat_template(HI, tokenize=False))["input_ids"]
    for _ in range(9):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert answer.choices[0].message.content == tokenizer.decode(ids[-9:])
    assert answer.choices[0].finish_reason == "length"
    assert answer.service_tier == "default"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids) - 9, 9)
    own = answer.usage.model_extra["qbe"]  # type: ignore[index]
    assert own["average_weight_bits"] == own["average_kv_bits"] == 16
    assert own["tokens_by_bits"] == {"16": len(ids) - 1}


def test_a_stream_adds_up_to_the_whole(api: openai.OpenAI) -> None:
    asked: Any = dict(model="tiny", messages=HI, max_tokens=20, seed=5, logprobs=True, top_logprobs=2, n=3)
    whole = api.chat.completions.create(**asked)
    texts, tokens, reasons, usages = [""] * 3, [0] * 3, [None] * 3, []
    for chunk in api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert len(set(texts)) == 3
    assert tokens == [len(c.logprobs.content) for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1].completion_tokens == whole.usage.completion_tokens
    again = api.chat.completions.create(**{**asked, "n": 1, "seed": 6})
    assert again.choices[0].message.content == texts[1]  # the i-th answer has the seed s + i


def test_logprobs_and_bias(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model="tiny", messages=HI, max_tokens=3, logprobs=True, top_logprobs=4, logit_bias={"66": 100}, temperature=0
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [c.token for c in content] == ["c", "c", "c"]  # token 66 of this tokenizer
    assert content[0].bytes == [ord("c")]
    assert len(content[0].top_logprobs) == 4
    assert content[0].top_logprobs[0].logprob > content[0].logprob  # the model's own, before the bias


def test_stop_is_no_part_of_the_answer(api: openai.OpenAI) -> None:
    asked: Any = dict(model="tiny", prompt="x", max_tokens=6, logit_bias={"66": 100}, temperature=0)
    assert api.completions.create(**asked).choices[0].text == "cccccc"
    stopped = api.completions.create(**asked, stop=["ccc"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


def test_an_event_is_one_line_however_a_client_splits_them(server: Running) -> None:
    prompt = "one\u2028two\x85three\u2029four\r\nfive\x0b\x1c\\u2028"
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "stream": True}
    text = ""
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in "".join(answer.iter_text()).splitlines():  # as some clients do, at more than CR and LF
            if line and line != "data: [DONE]":
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text.startswith(prompt)
    whole = server.post("completions", body | {"stream": False})
    assert len(whole.text.splitlines()) == 1
    assert whole.json()["choices"][0]["text"].startswith(prompt)


def test_echo_says_how_likely_the_prompt_is(server: Running, api: openai.OpenAI) -> None:
    """What lm-evaluation-harness's local-completions reads."""
    prompt = "the quick brown fox " * 30  # longer than a step
    answer = api.completions.create(
        model="tiny", prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0, extra_body=FULL
    )
    model, tokenizer = tiny_parts()
    ids = tokenizer(prompt)["input_ids"]
    expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = answer.choices[0].logprobs
    assert found is not None
    assert answer.choices[0].text.startswith(prompt)
    assert len(found.token_logprobs) == len(ids) + 1  # type: ignore[arg-type]
    assert found.token_logprobs[0] is None  # type: ignore[index]
    for i in range(1, len(ids)):
        assert found.token_logprobs[i] == pytest.approx(float(expected[i - 1, ids[i]]), abs=1e-4)  # type: ignore[index]
        assert max(found.top_logprobs[i].values()) == pytest.approx(float(expected[i - 1].max()), abs=1e-4)  # type: ignore[index]
    assert found.text_offset[:4] == [0, 1, 2, 3]  # type: ignore[index]
    wide = api.completions.create(model="tiny", prompt="ß 日!", max_tokens=0, echo=True, logprobs=1, extra_body=FULL)
    assert wide.choices[0].logprobs.text_offset == [0, 0, 1, 2, 2, 2, 3]  # type: ignore[union-attr]
    tokens = api.completions.create(
        model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1, extra_body=FULL
    )  # fmt: skip
    assert tokens.choices[0].text == prompt
    assert tokens.choices[0].logprobs.token_logprobs == found.token_logprobs[:-1]  # type: ignore[index, union-attr]
    assert tokens.usage.completion_tokens == 0  # type: ignore[union-attr]


def test_several_prompts_and_answers_keep_their_places(api: openai.OpenAI) -> None:
    asked: Any = dict(model="tiny", max_tokens=5, seed=1)
    both = api.completions.create(prompt=["one", "two"], n=2, **asked)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[2].text == api.completions.create(prompt="two", **asked).choices[0].text
    assert both.usage.prompt_tokens == 6  # type: ignore[union-attr]
    chunks = api.completions.create(prompt=["one", "two"], n=2, stream=True, **asked)
    texts = [""] * 4
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in both.choices]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_finished_answer_matches_its_schema(api: openai.OpenAI, kind: str) -> None:
    finished = 0
    wanted: Any = {"type": kind}
    if kind == "json_schema":
        wanted["json_schema"] = {"name": "thing", "schema": SCHEMA, "strict": True}
    answer = api.chat.completions.create(
        model="tiny", messages=HI, max_tokens=300, response_format=wanted, n=4, seed=3, logit_bias={"92": 20}
    )
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA if kind == "json_schema" else {})
    assert finished


def test_a_schema_that_nothing_matches_is_one_line(api: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError, match="no text that it allows") as refused:
        api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], response_format=wanted)
    assert "Parser" not in refused.value.message


def test_a_grammar(api: openai.OpenAI) -> None:
    wanted: Any = {"type": "grammar", "grammar": 'start: "yes" | "no" " "? /[0-9]{3}/'}
    for seed in range(4):
        answer = api.chat.completions.create(model="tiny", messages=HI, response_format=wanted, seed=seed)
        content = answer.choices[0].message.content or ""
        assert content == "yes" or (content[:2] == "no" and content[-3:].isdigit())
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "heat"}}])
def test_calls_have_the_schemas_arguments(api: openai.OpenAI, choice: Any) -> None:
    asked: Any = dict(model="tiny", messages=HI, tools=TOOLS, tool_choice=choice, seed=2, max_tokens=300,
                      parallel_tool_calls=False, logit_bias={"92": 30})  # fmt: skip
    answer = api.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or ()
    assert call.function.name in (("heat",) if choice != "required" else ("light", "heat"))  # type: ignore[union-attr]
    assert isinstance(json.loads(call.function.arguments)["on"], bool)  # type: ignore[union-attr]
    name, arguments = "", ""
    for chunk in api.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""  # type: ignore[union-attr]
            arguments += piece.function.arguments or ""  # type: ignore[union-attr]
    assert (name, arguments) == (call.function.name, call.function.arguments)  # type: ignore[union-attr]
    told = [*HI, answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert api.chat.completions.create(model="tiny", messages=told, tools=TOOLS, max_tokens=2).choices


def test_tools_left_alone_allow_text(api: openai.OpenAI) -> None:
    asked: Any = dict(model="tiny", messages=HI, tools=TOOLS, max_tokens=5, temperature=0, logit_bias={"66": 100})
    for choice in ("auto", "none"):
        assert api.chat.completions.create(tool_choice=choice, **asked).choices[0].message.content == "ccccc"


def test_what_the_server_is(server: Running, api: openai.OpenAI) -> None:
    assert "tiny" in [m.id for m in api.models.list()]
    assert api.models.retrieve("tiny").id == "tiny"
    document = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(
        document["paths"]
    )
    assert "qbe" in document["components"]["schemas"]["ChatRequest"]["properties"]
    assert server.http.get("/health").json() == server.http.get("/ready").json() == {"status": "ok"}
    before = server.metric("vllm:generation_tokens_total")
    api.completions.create(model="tiny", prompt="x", max_tokens=7, extra_body={"ignore_eos": True})
    assert server.metric("vllm:generation_tokens_total") == before + 7
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    with pytest.raises(openai.NotFoundError) as refused:
        api.completions.create(model="other", prompt="x")
    assert refused.value.code == "model_not_found"
