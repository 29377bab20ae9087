"""Reading calls out of an answer, however it is cut into pieces or cut off."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qbe.server.call_reader import Arguments, Begun, Reader
from qbe.server.errors import APIError
from qbe.server.messages import Message
from qbe.server.protocol import ChatRequest
from qbe.server.tools import conversation, offered

CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that came in these pieces."""
    reader, text, calls = Reader(True), "", list[list[str]]()
    for i, piece in enumerate(pieces):
        for found in reader.push(piece, last=i == len(pieces) - 1):
            if isinstance(found, Begun):
                calls.append([found.name, ""])
            elif isinstance(found, Arguments):
                calls[found.index][1] += found.text
            else:
                text += found.text
    return text, [(name, arguments) for name, arguments in calls]


@given(st.lists(st.integers(0, 200), max_size=30), st.sampled_from(["", "a <b> {} <tool", "<"]))
def test_pieces_do_not_matter(cuts: list[int], before: str) -> None:
    whole = before + CALLS
    ends = sorted({min(c, len(whole)) for c in cuts} | {0, len(whole)})
    pieces = [whole[a:b] for a, b in pairwise(ends)]
    assert read(pieces) == (before, [("f", '{"a": {"b": 1}}'), ("g", "{}")])


@given(st.integers(0, len(CALLS)))
def test_an_answer_that_is_cut_off_shows_no_tags(end: int) -> None:
    text, calls = read([CALLS[:end]])
    assert "tool_call>" not in text
    assert not any("<" in arguments for _, arguments in calls)
    assert [name for name, _ in calls] == ["f", "g"][: len(calls)]


@pytest.mark.parametrize("text", ["plain", "a < b", "<tool", "1 </tool_call>", ""])
def test_what_is_no_call_is_text(text: str) -> None:
    assert read([text]) == (text, [])


def test_templates_that_know_no_tools_are_told_in_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        Message(role="developer", content="be brief"),
        Message(role="assistant", content=None, tool_calls=[call]),  # type: ignore[list-item]
        Message(role="tool", content="done", tool_call_id="1"),
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    tools = offered(ChatRequest.model_validate({"messages": USER, "tools": [tool]}))
    told = conversation(messages, tools, known=False)
    assert [m["role"] for m in told] == ["system", "assistant", "user"]
    assert told[0]["content"].startswith("be brief")
    assert '"name": "f"' in told[0]["content"]
    assert json.loads(told[1]["content"].split("\n")[1]) == {"name": "f", "arguments": {"a": 1}}
    assert "done" in told[2]["content"]
    known = conversation(messages, tools, known=True)
    assert known[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert known[2] == {"role": "tool", "content": "done", "tool_call_id": "1"}


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "5", "{" * 5000])
def test_a_call_that_was_cut_off_comes_back_as_text(arguments: str) -> None:
    """The answer ended with `length` within it; the client sends what it has got with its next turn."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [Message(role="assistant", tool_calls=[call])]  # type: ignore[list-item]
    for known in (True, False):
        (said,) = conversation(messages, [], known)
        found = said["tool_calls"][0]["function"] if known else json.loads(said["content"].split("\n")[1])
        assert found == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}],
          "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_choice_that_is_none(more: dict[str, Any], field: str) -> None:
    with pytest.raises(APIError) as refused:
        offered(ChatRequest.model_validate({"messages": USER} | more))
    assert refused.value.param == field
