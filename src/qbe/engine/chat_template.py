"""A model's chat template: what it can take is tried out once, and conversations are given to it in that form.

Templates are programs of many authors. Some read a message's content as text, some as a list of parts; some want the
arguments of a call as an object, some as text; some refuse a system message or two messages of one role in a row. None
of them says so; what does not come out of a template was not read.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Literal

from qbe.engine.prompt_pictures import has_pictures, joined, parts_of
from qbe.engine.typed_text import CallArguments
from qbe.errors import QBEError

Message = dict[str, Any]
Form = Literal["text", "parts"]

_CALL_ID = "qbecall01"  # nine letters and digits, as Mistral's templates want them
_FIRST: Message = {"role": "user", "content": "qbefirst"}


class ChatTemplate:
    """Renders conversations.

    Args:
        tokenizer: of transformers, with a chat template.

    Attributes:
        forms: by role, how content reaches the prompt; None: not at all.
        later_system: whether a system message does that is not the first message.
        arguments: whether calls' arguments are wanted as `object` or as `text`.
        knows_tools: whether functions, calls and results all come out of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._apply: Callable[..., str] = tokenizer.apply_chat_template
        self.forms: dict[str, Form | None] = {"user": "text", "assistant": "text", "system": "text", "tool": "text"}
        self.forms["user"] = self._form(lambda content: [{"role": "user", "content": content}])
        self._first = self._shaped([_FIRST])
        self.forms["assistant"] = self._form(
            lambda c: [*self._first, {"role": "assistant", "content": c}, *self._first]
        )
        self.forms["system"] = self._form(lambda c: [{"role": "system", "content": c}, *self._first])
        answered = [*self._first, *self._shaped([{"role": "assistant", "content": "qbeanswer"}])]
        self.later_system = (
            self._form(lambda c: [*answered, {"role": "system", "content": c}, *self._first]) is not None
        )
        self.arguments = self._arguments()
        self.forms["tool"] = self._form(lambda c: self._called(c, _ARGUMENTS[self.arguments]))
        self.knows_tools = self._knows_tools()

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, variables: dict[str, Any], model: str,
        generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        """The prompt's text.

        Args:
            messages: of OpenAI's form; content is text, a list of parts of text or `{"type": "image"}`, or None.
            tools: JSON descriptions of functions.
            variables: more that the template may read.
            model: its name, for messages.
            generation_prompt: whether the answer's beginning stands at the end.

        Raises:
            QBEError: the template refuses the conversation, fails, or has nothing of it.
        """
        if self.forms["user"] is None and any(m["role"] == "user" for m in messages):
            raise QBEError(f"the chat template of {model} leaves out what users write; give the prompt as plain text")
        failure: Exception | None = None
        tried: list[list[Message]] = []
        for candidate in self._candidates(messages):
            if candidate in tried:
                continue
            tried.append(candidate)
            try:
                return self._rendered(candidate, tools, variables, generation_prompt)
            except Exception as error:  # whatever a template's author did not think of
                failure = failure or error
        said = " ".join(str(failure).split())[:200] or type(failure).__name__
        raise QBEError(
            f"the chat template of {model} fails ({said}); give the prompt as plain text, or other messages"
        ) from failure

    def _rendered(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, variables: dict[str, Any],
        generation_prompt: bool,
    ) -> str:  # fmt: skip
        shaped = self._shaped(messages)
        prompt = self._apply(shaped, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **variables)
        if not isinstance(prompt, str):
            raise TypeError("it gives no text")
        return prompt

    def _candidates(self, messages: list[Message]) -> Iterable[list[Message]]:
        """The conversation as it is, and then changed step by step into what stricter templates take."""
        plain = folded(messages) if self.forms["system"] is None else messages
        plain = plain if self.later_system else folded(plain, keep=1)
        yield plain
        named = short_ids(plain)
        yield named
        yield merged(named)
        yield merged(folded(named))

    def _shaped(self, messages: list[Message]) -> list[Message]:
        """Messages with content and arguments in the form that the template reads."""
        return [self._message(m) for m in messages]

    def _message(self, message: Message) -> Message:
        shaped, content = dict(message), message.get("content")
        if content is None:
            if message.get("tool_calls"):
                shaped.pop("content", None)  # as transformers has it
            else:
                content = ""
        if content is not None:
            parts = self.forms.get(message["role"]) == "parts"
            if has_pictures(content):
                shaped["content"] = list(parts_of(content))
            else:
                shaped["content"] = [{"type": "text", "text": text_of(content)}] if parts else text_of(content)
        if calls := message.get("tool_calls"):
            shaped["tool_calls"] = [self._call(c) for c in calls]
        return shaped

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        given = function.get("arguments")
        if self.arguments == "text" and not isinstance(given, str):
            said = given.said if isinstance(given, CallArguments) else ""
            function["arguments"] = said or json.dumps(given, ensure_ascii=False)
        elif self.arguments == "object" and isinstance(given, str):
            function["arguments"] = _as_object(given)
        return {**call, "function": function}

    def _tried(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str | None:
        """What the template makes of it; None where it fails."""
        try:
            return str(self._apply(messages, tools=tools, tokenize=False, add_generation_prompt=True))
        except Exception:
            return None

    def _form(self, conversation: Callable[[Any], list[Message]]) -> Form | None:
        """The form in which a message's content comes out; None where the template works but leaves it out, or takes
        no such message; text where it fails whatever the conversation.
        """
        word, prompts = "qbeword", list[str | None]()
        for form, content in (("text", word), ("parts", [{"type": "text", "text": word}])):
            prompts.append(self._tried(conversation(content)))
            if word in (prompts[-1] or ""):
                return "text" if form == "text" else "parts"
        works = any(f is not None for f in prompts) or self._tried(self._shaped([_FIRST])) is not None
        return None if works else "text"

    def _called(self, content: Any, arguments: Any) -> list[Message]:
        """A conversation with a call and its result."""
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "qbecalled", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "qbecalled", "content": content}
        return [*self._first, {"role": "assistant", "tool_calls": [call]}, result]

    def _arguments(self) -> Literal["object", "text"]:
        as_object, as_text = (self._tried(self._called("qberesult", _ARGUMENTS[kind])) for kind in ("object", "text"))
        if as_text is None or '\\"qbename\\"' in as_text:  # which it would write as JSON a second time
            return "object"
        if as_object is None or "'qbename'" in as_object:  # which it writes as Python
            return "text"
        return "text" if "qbename" in as_text and "qbename" not in as_object else "object"

    def _knows_tools(self) -> bool:
        function = {"name": "qbefunction", "description": "qbedescribed",
                    "parameters": {"type": "object", "properties": {}}}  # fmt: skip
        plain = self._tried(self._first)
        told = self._tried(self._first, [{"type": "function", "function": function}])
        result: Any = [{"type": "text", "text": "qberesult"}] if self.forms["tool"] == "parts" else "qberesult"
        conversation = self._called(result, _ARGUMENTS[self.arguments])
        called = self._tried(conversation)
        silent = self._tried([{"role": m["role"], "content": m.get("content", "")} for m in conversation])
        return told not in (None, plain) and called not in (None, silent) and "qberesult" in (called or "")


_ARGUMENTS: dict[str, Any] = {"object": {"qbename": "qbevalue"}, "text": '{"qbename": "qbevalue"}'}
_known: weakref.WeakKeyDictionary[Any, tuple[Any, ChatTemplate]] = weakref.WeakKeyDictionary()


def chat_template(tokenizer: Any) -> ChatTemplate | None:
    """The chat template of a tokenizer; None where it has none."""
    given = getattr(tokenizer, "chat_template", None)
    if not given:
        return None
    known = _known.get(tokenizer)
    if known is None or known[0] != given:
        known = _known[tokenizer] = given, ChatTemplate(tokenizer)
    return known[1]


def text_of(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _as_object(said: str) -> Any:
    try:
        arguments = json.loads(said or "{}")
    except (ValueError, RecursionError):
        return said
    return arguments if isinstance(arguments, dict) else said


def short_ids(messages: list[Message]) -> list[Message]:
    """With ids of nine letters and digits for calls; the same ones get the same."""

    def short(given: Any) -> Any:
        if not isinstance(given, str) or (len(given) == 9 and given.isascii() and given.isalnum()):
            return given
        return sha256(given.encode("utf-8", "replace")).hexdigest()[:9]

    shortened = []
    for n, message in enumerate(messages):
        new = dict(message)
        if "tool_call_id" in new:
            new["tool_call_id"] = short(new["tool_call_id"])
        if new.get("tool_calls"):
            new["tool_calls"] = [{**c, "id": short(c.get("id") or f"{n}-{i}")} for i, c in enumerate(new["tool_calls"])]
            new["content"] = new.get("content") or ""
        shortened.append(new)
    return shortened


def merged(messages: list[Message]) -> list[Message]:
    """With messages of one role in a row as one."""
    kept: list[Message] = []
    for message in messages:
        last = kept[-1] if kept else {}
        plain = not message.get("tool_calls") and not last.get("tool_calls") and message["role"] != "tool"
        if plain and last.get("role") == message["role"]:
            kept[-1] = {**last, "content": joined([last.get("content"), message.get("content")], "\n")}
        else:
            kept.append(message)
    return kept


def folded(messages: list[Message], keep: int = 0) -> list[Message]:
    """With what system messages say at the beginning of the user's message that follows, but for those among the first
    `keep` messages.
    """
    kept = messages[:keep]
    said: list[str] = []
    for message in messages[keep:]:
        if message["role"] == "system":
            said.append(text_of(message.get("content")))
        elif said and message["role"] == "user":
            kept.append({**message, "content": joined([*said, message.get("content")], "\n\n")})
            said = []
        else:
            kept.append(message)
    if said:
        kept.append({"role": "user", "content": "\n\n".join(said)})
    return kept
