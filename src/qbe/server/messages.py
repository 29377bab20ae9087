"""Messages of a conversation, read leniently: clients send back in them what answers and streams carry."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from qbe.errors import QBEError
from qbe.pictures.picture import check_uri

MOST_PARTS, MOST_CALLS = 1024, 128  # of a message
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PICTURES = ("image_url", "input_image")
_UNREAD = ("thinking", "redacted_thinking", "reasoning")  # of earlier answers; templates leave them out, too


def without_nulls(data: Any) -> Any:
    """A field that is explicitly null is one that is not there."""
    return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class Lenient(BaseModel):
    """Part of a conversation; fields that the model does not read are let through."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return without_nulls(data)


class ContentPart(Lenient):
    """A piece of a message: text, or a picture.

    Attributes:
        image_url: the picture's `data:` URI.
    """

    type: str = "text"
    text: str = ""
    image_url: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = data.get("type", "text")
        if isinstance(kind, str) and kind in _UNREAD:
            return {"type": kind, "text": ""}
        if isinstance(kind, str) and kind in _PICTURES:
            return {"type": "image_url", "image_url": _uri(data.get("image_url"), kind)}
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise ValueError("this server reads text and pictures: parts have the type 'text' or 'image_url'")
        if not isinstance(data.get(_TEXTS[kind]), str):
            raise ValueError(f"a part of type '{kind}' has its text in '{_TEXTS[kind]}'")
        return {"type": "text", "text": data[_TEXTS[kind]]}


def _uri(given: Any, kind: str) -> str:
    """A picture's URI. Raises ValueError for one that would have to be fetched; the rest is checked when it is read."""
    found = given.get("url") if isinstance(given, dict) else given
    if not isinstance(found, str):
        raise ValueError(f"a part of type '{kind}' has the picture's data: URI in 'image_url'")
    try:
        check_uri(found)
    except QBEError as error:
        raise ValueError(str(error)) from None
    return found


class FunctionCall(Lenient):
    """A call that the model made."""

    name: str
    arguments: str = ""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, dict) else value


class CustomCall(Lenient):
    """A call of a custom tool."""

    name: str
    input: str = ""


class ToolCall(Lenient):
    """The same, with its id."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def _has_one(self) -> ToolCall:
        if self.function is None and self.custom is None:
            raise ValueError("a call says what was called: it has a 'function'")
        return self

    def called(self) -> FunctionCall:
        """What was called; the input of a custom tool is its only argument."""
        if self.function is not None:
            return self.function
        assert self.custom is not None
        return FunctionCall(name=self.custom.name, arguments=json.dumps({"input": self.custom.input}))


class Message(Lenient):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = Field(default=None)

    @field_validator("reasoning_content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        return value if isinstance(value, str) else None

    def pictured(self) -> list[dict[str, Any]] | None:
        """Its text and pictures, as parts of OpenAI's form; None where it has no picture."""
        if not isinstance(self.content, list) or all(p.image_url is None for p in self.content):
            return None
        return [
            {"type": "text", "text": p.text} if p.image_url is None
            else {"type": "image_url", "image_url": {"url": p.image_url}}
            for p in self.content
        ]  # fmt: skip

    def text(self) -> str:
        """Its text in one piece."""
        found = "".join(p.text for p in self.content) if isinstance(self.content, list) else self.content or ""
        return found or self.refusal or ""

    def calls(self) -> list[ToolCall]:
        """Its calls, those of the old form as well."""
        if self.function_call is not None and not self.tool_calls:
            return [ToolCall(function=self.function_call)]
        return self.tool_calls or []
