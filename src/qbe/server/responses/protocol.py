"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from qbe.server.fields import Body, Name
from qbe.server.messages import MOST_PARTS, ContentPart, Lenient
from qbe.server.protocol import (
    GrammarFormat,
    InputGrammar,
    JsonObjectFormat,
    JsonSchema,
    OpenAIRequest,
    TextFormat,
    TextInput,
)

MOST_ITEMS = 4096
_Parts = Annotated[list[ContentPart], Field(max_length=MOST_PARTS, fail_fast=True)]


def _refuse(value: Any) -> Any:
    raise ValueError("this server cannot do that: leave it out")


Refused = Annotated[None, BeforeValidator(_refuse)]


class InputItem(Lenient):
    """A piece of the conversation: a message, a call, its result.

    Attributes:
        type: `reasoning` is left out, as templates do; `item_reference` stands for what an answer had with this `id`.
        output: of a call; text, or parts that are text.
    """

    type: Literal[
        "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
        "item_reference",
    ] = "message"  # fmt: skip
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | _Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | _Parts | None = None

    @model_validator(mode="before")
    @classmethod
    def _a_bare_id(cls, data: Any) -> Any:
        if isinstance(data, dict) and "type" not in data and "role" not in data and "id" in data:
            return {**data, "type": "item_reference"}
        return {**data, "content": None} if isinstance(data, dict) and data.get("type") == "reasoning" else data

    @model_validator(mode="after")
    def _complete(self) -> InputItem:
        needed = {
            "message": ("role", "content"), "function_call": ("call_id", "name"), "function_call_output": ("call_id",),
            "custom_tool_call": ("call_id", "name"), "custom_tool_call_output": ("call_id",),
            "item_reference": ("id",),
        }  # fmt: skip
        missing = next((name for name in needed.get(self.type, ()) if getattr(self, name) is None), None)
        if missing is not None:
            raise ValueError(f"an item of type '{self.type}' has '{missing}'")
        return self


def _one_message(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class GrammarInput(Lenient):
    """Text of a grammar."""

    type: Literal["grammar"]
    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Field(min_length=1)]

    def grammar(self) -> InputGrammar:
        """As in chat."""
        return InputGrammar(syntax=self.syntax, definition=self.definition)


class FlatTool(Lenient):
    """A function, with `parameters` and `strict`, or a custom tool, which takes a text, with `format`."""

    type: Literal["function", "custom"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None


class FlatName(Lenient):
    """The tool that must be called, or one of those allowed."""

    type: Literal["function", "custom"]
    name: Name


class FlatAllowed(Body):
    """The tools that may be called in this turn; the model is told of all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatName], Field(min_length=1, max_length=128, fail_fast=True)]


class FlatSchemaFormat(JsonSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """What the answer's text is."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat | GrammarFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Lenient):
    """How much the model shall think; `summary` is taken, and there is none."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Body):
    """What a stream carries beside the answer."""

    include_obfuscation: bool | None = None


class ResponsesRequest(OpenAIRequest):
    """Body of `/v1/responses`.

    Attributes:
        input: a text, or the conversation.
        instructions: a system message, for this answer alone.
        previous_response_id: the conversation begins with that answer and what led to it, if it is still kept.
        store: false: the answer is not kept.
        include: `message.output_text.logprobs` is what there is.
        truncation: a conversation that is too long is refused whatever it says.
        max_tool_calls: of tools that run on the server, of which there are none.
    """

    input: Annotated[
        list[InputItem] | None, Field(max_length=MOST_ITEMS, fail_fast=True), BeforeValidator(_one_message)
    ] = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatName | FlatAllowed | None = None
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    background: Literal[False] | None = None
    conversation: Refused = None
    prompt: Refused = None
    context_management: Refused = None
    moderation: Refused = None
