"""Function calls: how the model is told of functions, what its answer may then be, and how it is read.

Calls have one form whatever the model, the one that Hermes and Qwen were trained on, and a grammar makes sure of it:

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from qbe.engine.detokenize import overlap
from qbe.server.errors import APIError
from qbe.server.grammar import rule
from qbe.server.protocol import ChatRequest, Message, NamedTool, Tool

_OPEN = '<tool_call>\n{"name": '
_ARGUMENTS = ', "arguments": '
_CLOSE = "}\n</tool_call>"
_PROMPT = """You may call functions. These are their signatures:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments within these tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def offered(body: ChatRequest) -> list[Tool]:
    """The functions that this request lets the model call. Raises APIError for a choice that is none of them."""
    tools, choice = body.tools or [], body.tool_choice
    names = [t.function.name for t in tools]
    if len(set(names)) < len(names):
        raise APIError(400, "tools: two functions have the same name", param="tools")
    if not tools and choice not in (None, "none", "auto"):
        raise APIError(400, "tool_choice is given, but tools is empty", param="tool_choice")
    if isinstance(choice, NamedTool):
        tools = [t for t in tools if t.function.name == choice.function.name]
        if not tools:
            raise APIError(400, f"tool_choice: tools has no function '{choice.function.name}'", param="tool_choice")
    return [] if choice == "none" else tools


def grammar(body: ChatRequest, tools: Sequence[Tool], text: str | None) -> str:
    """What the answer may be, in Lark.

    Args:
        tools: not empty.
        text: what text it may be when it is no call, as rules of Lark that define `text`; None allows any.
    """
    named, many = isinstance(body.tool_choice, NamedTool), body.parallel_tool_calls
    calls = "call" if named or not many else 'call ("\\n" call)*'
    if named or body.tool_choice == "required":
        start = calls
    elif text is not None:
        start = f"text | {calls}"
    else:
        start = f"FREE? ({calls})?"
    rules = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    if start.startswith("FREE"):
        rules.append("FREE: /(?s:.+)/ & ~/(?s:.*)<tool_call>(?s:.*)/")
    elif start.startswith("text"):
        rules.append(text or "")
    for i, tool in enumerate(tools):
        begin = json.dumps(_OPEN + json.dumps(tool.function.name) + _ARGUMENTS)
        arguments = rule(tool.function.parameters or {"type": "object"}, "tools")
        rules.append(f"call_{i}: {begin} {arguments} {json.dumps(_CLOSE)}")
    return "\n".join(rules)


def conversation(messages: Sequence[Message], tools: Sequence[Tool], known: bool) -> list[dict[str, Any]]:
    """The messages for the chat template.

    Args:
        known: whether the template itself knows what to do with tools; if not, they go into messages as text.
    """
    found = [_message(m, known) for m in messages]
    if tools and not known:
        signatures = "\n".join(json.dumps(t.model_dump(exclude_none=True)) for t in tools)
        said = _PROMPT.format(tools=signatures)
        if found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{said}"}
        else:
            found.insert(0, {"role": "system", "content": said})
    return found


def _message(message: Message, known: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": message.text()}
    calls = [{"name": c.function.name, "arguments": _arguments(c.function.arguments)} for c in message.tool_calls or ()]
    if known:
        if calls:
            found["tool_calls"] = [{"type": "function", "function": c} for c in calls]
        return found | {k: v for k in ("name", "tool_call_id") if (v := getattr(message, k)) is not None}
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{found['content']}\n</tool_response>"}
    said = [f"<tool_call>\n{json.dumps(c)}\n</tool_call>" for c in calls]
    return {**found, "content": "\n".join([found["content"]] * bool(found["content"]) + said)}


def _arguments(said: str) -> dict[str, Any] | str:
    """Those of an earlier call, as templates take them. Text stays what it is: an answer that ended with `length` may
    have a call in it that was cut off, and comes back with the next turn.
    """
    try:
        found = json.loads(said or "{}")
    except (ValueError, RecursionError):
        return said
    return found if isinstance(found, dict) else said


@dataclass(frozen=True)
class Text:
    """A piece of an answer that is no call."""

    text: str


@dataclass(frozen=True)
class Begun:
    """A call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments, which are JSON."""

    index: int
    text: str


class ToolCallParser:
    """Reads an answer piece by piece. What may be the beginning of a tag is held back.

    Args:
        tools: whether there may be calls.

    Attributes:
        calls: how many have begun.
    """

    def __init__(self, tools: bool) -> None:
        self.calls = 0
        self._held, self._within, self._tools = "", "text", tools

    def push(self, text: str, last: bool = False) -> Iterator[Text | Begun | Arguments]:
        """What became certain.

        Args:
            last: nothing follows.
        """
        self._held += text
        while self._tools:
            if self._within == "name":
                name, found, rest = self._held.partition(_ARGUMENTS)
                if not found:
                    return
                self.calls += 1
                yield Begun(self.calls - 1, f"call_{uuid.uuid4().hex[:24]}", json.loads(name))
                self._within, self._held = "arguments", rest
            tag = _OPEN if self._within == "text" else _CLOSE
            piece, found, rest = self._held.partition(tag)
            if not found:
                break
            yield from self._piece(piece)
            self._within, self._held = ("name", rest) if self._within == "text" else ("text", rest.removeprefix("\n"))
        keep = overlap(self._held, tag) if self._tools else 0
        if last and keep < (len("<tool_call>") if self._within == "text" else len("}\n<")):
            keep = 0  # it was no tag; longer ones are of a call that was cut off
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._piece(piece)

    def _piece(self, piece: str) -> Iterator[Text | Arguments]:
        if self._within == "arguments":
            if piece:
                yield Arguments(self.calls - 1, piece)
        elif piece and not (self.calls and not piece.strip()):  # the line between two calls
            yield Text(piece)


def knows_tools(tokenizer: Any) -> bool:
    """Whether a chat template itself tells of tools."""
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "?"}]
    try:
        plain, told = (tokenizer.apply_chat_template(messages, tools=t, tokenize=False) for t in (None, [tool]))
    except (TemplateError, TypeError, ValueError):
        return False
    return bool(plain != told)
