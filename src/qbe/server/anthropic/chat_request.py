"""From a body of `/v1/messages` to a request for chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qbe.server.anthropic.protocol import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
)
from qbe.server.errors import APIError
from qbe.server.messages import ContentPart, FunctionCall, Message, ToolCall
from qbe.server.protocol import ChatRequest, Function, JsonSchema, JsonSchemaFormat, NamedTool, Tool, ToolName

# What a chat request calls the fields of this body.
FIELDS = {
    "response_format": "output_config.format", "reasoning_effort": "output_config.effort", "stop": "stop_sequences",
    "chat_template_kwargs.enable_thinking": "thinking",
}  # fmt: skip


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The same request in the form of chat completions. Raises APIError for what cannot be put so."""
    if body.messages[-1].role == "assistant":
        raise APIError(400, "messages: the last one must be the user's: this server does not go on with an assistant's",
                       param="messages")  # fmt: skip
    system = "\n".join(block.text for block in body.system or ())
    first = [Message(role="system", content=system)] if system else []
    choice, fields = body.tool_choice, body.shared()
    if isinstance(body, MessagesRequest):
        tier = "default" if body.service_tier == "standard_only" else body.service_tier
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, "service_tier": tier}
    config = body.output_config
    return ChatRequest(
        messages=[*first, *(m for given in body.messages for m in _messages(given))],
        tools=None if body.tools is None else [_tool(t) for t in body.tools],
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        response_format=None if config is None or config.format is None else _format(config.format.schema_),
        reasoning_effort=None if config is None else config.effort,
        chat_template_kwargs=None if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"},
        **fields,
    )


def ignored(body: MessagesRequest, by_chat: Sequence[str]) -> list[str]:
    """Fields that ask for something and change nothing.

    Args:
        by_chat: those that chat completions would name.
    """
    wishes = [name for name in ("inference_geo", "context_management", "diagnostics") if getattr(body, name)]
    return [FIELDS.get(name, name) for name in by_chat] + wishes + ["speed"] * (body.speed == "fast")


def _messages(given: AnthropicMessage) -> list[Message]:
    """Results of calls are messages of their own; what is around them stays in order."""
    messages: list[Message] = []
    parts: list[ContentPart] = []
    calls: list[ToolCall] = []

    def flush() -> None:
        if parts or calls:
            messages.append(Message(role=given.role, content=[*parts], tool_calls=[*calls] or None))
        parts.clear()
        calls.clear()

    for block in given.content:
        if block.type == "text":
            parts.append(ContentPart(text=block.text or ""))
        elif block.type == "image":
            assert block.source is not None
            parts.append(ContentPart(type="image_url", image_url=block.source.uri()))
        elif block.type == "tool_use":
            calls.append(_call(block))
        elif block.type == "tool_result":
            flush()
            messages.append(Message(role="tool", tool_call_id=block.tool_use_id, content=block.result()))
    flush()
    return messages or [Message(role=given.role, content="")]


def _call(block: Block) -> ToolCall:
    assert block.name is not None
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.arguments()))


def _tool(tool: AnthropicTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )  # fmt: skip
    return Tool(type="function", function=function)


def _choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        assert choice.name is not None
        return NamedTool(type="function", function=ToolName(name=choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _format(schema: dict[str, Any]) -> JsonSchemaFormat:
    wanted = JsonSchema.model_validate({"name": "answer", "schema": schema})
    return JsonSchemaFormat(type="json_schema", json_schema=wanted)
