"""Function calls: how the model is told of functions, what its answer may then be, and how it is read.

Calls have one form whatever the model, the one that Hermes and Qwen were trained on, and a grammar makes sure of it:

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qbe.engine.chat_template import chat_template
from qbe.engine.typed_text import CallArguments
from qbe.server.call_reader import ARGUMENTS, CLOSE, OPEN, RAW, RAW_CLOSE
from qbe.server.errors import APIError
from qbe.server.grammar import rule
from qbe.server.messages import Message
from qbe.server.protocol import AllowedTools, ChatRequest, GrammarInput, NamedTool, Tool
from qbe.server.schemas import normal

_ROLES = {"developer": "system", "function": "tool"}
_PROMPT = """You may call functions. These are their signatures:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments within these tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def offered(body: ChatRequest) -> list[Tool]:
    """The tools that this request lets the model call. Raises APIError for a choice that is none of them."""
    tools, choice = body.tools or [], body.tool_choice
    names = [t.name for t in tools]
    if len(set(names)) < len(names):
        raise APIError(400, "tools: two functions have the same name", param="tools")
    if not tools and choice not in (None, "none", "auto"):
        raise APIError(400, "tool_choice is given, but tools is empty", param="tool_choice")
    if isinstance(choice, NamedTool | AllowedTools):
        wanted = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
        missing = next((w for w in wanted if (w.type, w.name) not in {(t.type, t.name) for t in tools}), None)
        if missing is not None:
            raise APIError(400, f"tool_choice: tools has no {missing.type} '{missing.name}'", param="tool_choice")
        tools = [t for t in tools if t.name in {w.name for w in wanted}]
    return [] if choice == "none" else tools


def told(body: ChatRequest) -> list[Tool]:
    """The tools that the model is told of: those not allowed in this turn, too, so that the prompt stays as it was."""
    found = offered(body)
    return list(body.tools or ()) if found and isinstance(body.tool_choice, AllowedTools) else found


def described(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it: a custom one as a function of one text."""
    if tool.custom is None:
        return tool.model_dump(exclude_none=True)
    about = tool.custom.description or ""
    if isinstance(tool.custom.format, GrammarInput):
        grammar = tool.custom.format.grammar
        about += f"\nIts input is text of this grammar ({grammar.syntax}):\n{grammar.definition}"
    function = {"name": tool.name, "description": about.strip(), "parameters": parameters(tool)}
    return {"type": "function", "function": function}


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. Raises APIError for what is no schema."""
    if tool.function is not None:
        found = normal(tool.function.parameters or {}, "tools")
        free = not found.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const", "not"}
        return {"type": "object", **found} if free else found
    text: dict[str, Any] = {"type": "string"}
    assert tool.custom is not None
    if isinstance(tool.custom.format, GrammarInput) and tool.custom.format.grammar.syntax == "regex":
        text["pattern"] = f"^(?:{tool.custom.format.grammar.definition})$"
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def own_grammar(tool: Tool) -> str | None:
    """The Lark grammar of a custom tool's input, which is written as it is, not as JSON."""
    given = None if tool.custom is None else tool.custom.format
    return given.grammar.definition if isinstance(given, GrammarInput) and given.grammar.syntax == "lark" else None


def grammar(
    body: ChatRequest, tools: Sequence[Tool], text: str | None, schemas: Mapping[str, dict[str, Any]] | None = None
) -> str:
    """What the answer may be, in Lark.

    Args:
        tools: not empty.
        text: what text it may be when it is no call, as rules of Lark that define `text`; None allows any.
        schemas: of the arguments, by name; None: their own.
    """
    named, many = isinstance(body.tool_choice, NamedTool), body.parallel_tool_calls
    choice = body.tool_choice
    required = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    calls = "call" if named or not many else 'call ("\\n" call)*'
    if named or required == "required":
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
        name, own = json.dumps(tool.name), own_grammar(tool)
        if own is not None:
            rules.append(f"call_{i}: {json.dumps(OPEN + name + RAW)} raw_{i} {json.dumps(RAW_CLOSE)}")
            rules.append(f"raw_{i}: %lark {{\n{own}\n}}")
            continue
        arguments = rule(parameters(tool) if schemas is None else schemas[tool.name], "tools")
        rules.append(f"call_{i}: {json.dumps(OPEN + name + ARGUMENTS)} {arguments} {json.dumps(CLOSE)}")
    return "\n".join(rules)


def conversation(messages: Sequence[Message], tools: Sequence[Tool], known: bool) -> list[dict[str, Any]]:
    """The messages for the chat template.

    Args:
        known: whether the template itself knows what to do with tools; if not, they go into messages as text.
    """
    found = [_message(m, known) for m in (_with_ids(messages) if known else messages)]
    if tools and not known:
        signatures = "\n".join(json.dumps(described(t)) for t in tools)
        said = _PROMPT.format(tools=signatures)
        if found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{said}"}
        else:
            found.insert(0, {"role": "system", "content": said})
    return found


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """With an id for every call and result that has none, as those of the old form."""
    found, last = list[Message](), {}
    for n, message in enumerate(messages):
        if calls := message.calls():
            calls = [
                c.model_copy(update={"id": c.id or f"call{n % 100:02d}{i % 1000:03d}"}) for i, c in enumerate(calls)
            ]
            last = {c.called().name: c.id for c in calls} | {None: calls[-1].id}
            message = message.model_copy(update={"tool_calls": calls})
        elif message.role in ("tool", "function") and message.tool_call_id is None and last:
            message = message.model_copy(update={"tool_call_id": last.get(message.name, last[None])})
        found.append(message)
    return found


def _message(message: Message, known: bool) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role)
    pictured = message.pictured()
    if pictured is not None:
        if role != "user":
            raise APIError(
                400, f"a message of '{message.role}' has a picture: give it in one of the user", param="messages"
            )
        return {"role": role, "content": pictured} | ({} if message.name is None else {"name": message.name})
    found: dict[str, Any] = {"role": role, "content": message.text()}
    calls = [{"name": c.called().name, "arguments": _arguments(c.called().arguments)} for c in message.calls()]
    if known:
        if calls:
            ids = [{} if c.id is None else {"id": c.id} for c in message.calls()]
            found["tool_calls"] = [{**i, "type": "function", "function": c} for i, c in zip(ids, calls, strict=True)]
            found["content"] = found["content"] or None
        more = ("name", "tool_call_id", "reasoning_content")
        return found | {k: v for k in more if (v := getattr(message, k)) is not None}
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
    return CallArguments(found, said) if isinstance(found, dict) else said


def knows_tools(tokenizer: Any) -> bool:
    """Whether a chat template itself tells of tools, calls and results."""
    found = chat_template(tokenizer)
    return found is not None and found.knows_tools
