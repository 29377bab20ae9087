"""From a body of `/v1/responses` to a request for chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qbe.server.messages import CustomCall, FunctionCall, Message, ToolCall
from qbe.server.protocol import (
    Allowed,
    AllowedTools,
    ChatRequest,
    CustomTool,
    Function,
    GrammarInput,
    JsonSchema,
    JsonSchemaFormat,
    NamedTool,
    OpenAIRequest,
    Tool,
    ToolName,
)
from qbe.server.responses.protocol import FlatAllowed, FlatName, FlatSchemaFormat, FlatTool, InputItem, ResponsesRequest
from qbe.server.responses.protocol import GrammarInput as FlatGrammarInput

# What a chat request calls the fields of this body.
FIELDS = {
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
    "logprobs": "include",
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"


def chat_request(body: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    """The same request in the form of chat completions.

    Args:
        items: the whole conversation.
    """
    system = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    wanted = (name for name in OpenAIRequest.model_fields if name in body.model_fields_set and name != "store")
    fields: dict[str, Any] = {name: getattr(body, name) for name in wanted}
    text, asks = body.text, LOGPROBS in (body.include or ())
    return ChatRequest(
        messages=[*system, *_messages(items)],
        max_completion_tokens=body.max_output_tokens,
        logprobs=asks or None,
        top_logprobs=body.top_logprobs if asks else None,
        response_format=_format(None if text is None else text.format),
        verbosity=None if text is None else text.verbosity,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        tools=None if body.tools is None else [_tool(t) for t in body.tools],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        **fields,
    )


def ignored(body: ResponsesRequest, by_chat: Sequence[str]) -> list[str]:
    """Fields that ask for something and change nothing.

    Args:
        by_chat: those that chat completions would name.
    """
    names = [FIELDS.get(name, name) for name in by_chat]
    if body.truncation == "auto":
        names.append("truncation")
    if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
        names.append("reasoning.summary")
    return names + [f"include.{name}" for name in body.include or () if name != LOGPROBS]


def _messages(items: Sequence[InputItem]) -> list[Message]:
    """An answer's text and its calls are items of their own, and one message."""
    messages: list[Message] = []
    for item in items:
        if item.type == "message":
            assert item.role is not None
            messages.append(Message(role=item.role, content=item.content))
        elif item.type in ("function_call", "custom_tool_call"):
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant"))
            messages[-1] = messages[-1].model_copy(
                update={"tool_calls": [*(messages[-1].tool_calls or ()), _call(item)]}
            )
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output or ""))
    return messages


def _call(item: InputItem) -> ToolCall:
    assert item.name is not None
    if item.type == "custom_tool_call":
        return ToolCall(id=item.call_id, type="custom", custom=CustomCall(name=item.name, input=item.input or ""))
    return ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments or ""))


def _tool(tool: FlatTool) -> Tool:
    if tool.type == "function":
        function = Function(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
        return Tool(type="function", function=function)
    given = tool.format
    form = GrammarInput(type="grammar", grammar=given.grammar()) if isinstance(given, FlatGrammarInput) else given
    return Tool(type="custom", custom=CustomTool(name=tool.name, description=tool.description, format=form))


def _named(name: FlatName) -> NamedTool:
    return NamedTool.model_validate({"type": name.type, name.type: ToolName(name=name.name)})


def _choice(choice: Any) -> Any:
    if isinstance(choice, FlatName):
        return _named(choice)
    if isinstance(choice, FlatAllowed):
        allowed = Allowed(mode=choice.mode, tools=[_named(name) for name in choice.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=allowed)
    return choice


def _format(given: Any) -> Any:
    if not isinstance(given, FlatSchemaFormat):
        return given
    schema = JsonSchema.model_validate(
        {"name": given.name, "description": given.description, "schema": given.schema_, "strict": given.strict}
    )
    return JsonSchemaFormat(type="json_schema", json_schema=schema)
