"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from qbe.server.fields import Body, Name, ServiceTier, Text
from qbe.server.messages import MOST_PARTS, Lenient
from qbe.server.protocol import BaseRequest

_UNREAD = ("thinking", "redacted_thinking")  # of earlier answers; templates leave them out, too


def _one_block(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Lenient):
    """A piece of text."""

    type: Literal["text"]
    text: str


Texts = Annotated[
    list[TextBlock], Field(max_length=MOST_PARTS, fail_fast=True), BeforeValidator(_one_block)
]  # fmt: skip


class ImageSource(Lenient):
    """A picture's bytes, in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @model_validator(mode="before")
    @classmethod
    def _here(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") != "base64":
            raise ValueError("nothing is fetched: a picture's source has the type 'base64' and its 'data'")
        return data

    def uri(self) -> str:
        """As chat completions have it."""
        return f"data:{self.media_type};base64,{self.data}"


class Block(Lenient):
    """A piece of a message: text, a picture, a call, or its result.

    Attributes:
        type: `thinking` and `redacted_thinking` are left out, as templates do.
        source: of a picture.
        id, name, input: of a call.
        tool_use_id, content, is_error: of its result.
    """

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: ImageSource | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Texts | None = None
    is_error: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_read(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind in _UNREAD:
            return {"type": kind}
        if isinstance(kind, str) and kind not in ("text", "image", "tool_use", "tool_result"):
            raise ValueError("a block has the type 'text', 'image', 'tool_use' or 'tool_result'")
        return data

    @model_validator(mode="after")
    def _complete(self) -> Block:
        needed = {"text": ("text",), "image": ("source",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}
        missing = next((name for name in needed.get(self.type, ()) if getattr(self, name) is None), None)
        if missing is not None:
            raise ValueError(f"a block of type '{self.type}' has '{missing}'")
        return self

    def arguments(self) -> str:
        """Of a call, as JSON."""
        return json.dumps(self.input or {})

    def result(self) -> str:
        """Of a call, in one piece."""
        text = "".join(part.text for part in self.content or ())
        return f"Error: {text}" if self.is_error else text


class AnthropicMessage(Lenient):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=MOST_PARTS, fail_fast=True), BeforeValidator(_one_block)]


class AnthropicTool(Lenient):
    """A function that the model may call."""

    name: Name
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _ours(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(f"this server has no tool of type '{kind[:64]}': give tools with an 'input_schema'")
        return data


class AnthropicToolChoice(Lenient):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> AnthropicToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("a choice of type 'tool' has its 'name'")
        return self


class Thinking(Lenient):
    """Whether the model shall think first, as its chat template offers it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputSchema(Lenient):
    """A schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """What the answer is, and how much work goes into it."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputSchema | None = None


class AnthropicMetadata(Lenient):
    """Who asks, for the client's own books."""

    user_id: str | None = None


class CountTokensRequest(BaseRequest):
    """Body of `/v1/messages/count_tokens`: what of `/v1/messages` makes the prompt."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`.

    Attributes:
        service_tier: `standard_only` is `default`.
        cache_control: taken; prefixes are always cached.
        inference_geo, speed, context_management, diagnostics: taken, and nothing is done about them.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    service_tier: ServiceTier | Literal["standard_only"] | None = None
    metadata: AnthropicMetadata | None = None
    inference_geo: Annotated[str, Field(max_length=64)] | None = None
    speed: Literal["standard", "fast"] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
