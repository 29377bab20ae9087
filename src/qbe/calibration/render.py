"""An exchange as the model reads it: through the reading of requests that the server has, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from qbe.calibration.log import Exchange
from qbe.engine.chat_template import ChatTemplate
from qbe.engine.tokenize import check_chat
from qbe.errors import QBEError
from qbe.server import tools
from qbe.server.errors import APIError
from qbe.server.messages import Message
from qbe.server.protocol import ChatRequest
from qbe.server.requests import variables

_READ = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")  # of what becomes a prompt


@dataclass(frozen=True)
class Rendered:
    """An exchange as text.

    Attributes:
        text: prompt and answer.
        asked: what the analysis reads of it: the last message, as in the engine.
        said: what users and assistants wrote, without what every conversation of an application begins with.
        answer: the answer alone; empty where the log has none.
        uses_tools: whether functions are offered or called.
        wants_json: whether the request asks for JSON.
    """

    text: str
    asked: str
    said: str
    answer: str
    uses_tools: bool
    wants_json: bool


def render(exchange: Exchange, tokenizer: Any, model: str) -> Rendered:
    """Puts an exchange into the form of a model.

    Args:
        model: its name, for messages.

    Raises:
        QBEError: it is no request that could be served, or the model has no chat template.
    """
    if "messages" not in exchange.request:
        return _completion(exchange, tokenizer)
    try:
        body = ChatRequest.model_validate(_fields(exchange.request))
        messages = list(body.messages)
        answer = _answer(exchange)
        offered, known = tools.told(body), tools.knows_tools(tokenizer)
        conversation = tools.conversation([*messages, *([answer] if answer else [])], offered, known)
        described = [tools.described(tool) for tool in offered] if offered and known else None
        template: ChatTemplate = check_chat(tokenizer, model)
        text = template.render(conversation, described, variables(body), model, generation_prompt=answer is None)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise QBEError(f"{exchange.place}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
    except (APIError, QBEError) as error:
        raise QBEError(f"{exchange.place}: {error}") from None
    every = [*messages, *([answer] if answer else [])]
    texts = [m.text() for m in messages if m.text().strip()]
    return Rendered(
        text, texts[-1] if texts else text, "\n".join(m.text() for m in every if m.role not in ("system", "developer")),
        answer.text() if answer else "", bool(offered) or any(m.calls() for m in every), _wants_json(exchange.request),
    )  # fmt: skip


def _fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Those that become a prompt; functions of the old form as tools."""
    fields = {name: request[name] for name in _READ if request.get(name) is not None}
    if not fields.get("tools") and isinstance(request.get("functions"), list):
        fields["tools"] = [{"type": "function", "function": function} for function in request["functions"]]
    if not fields.get("tools"):
        fields.pop("tool_choice", None)
    return fields


def _answer(exchange: Exchange) -> Message | None:
    if not isinstance(exchange.answer, dict):
        return None
    found = Message.model_validate({"role": "assistant", **exchange.answer})
    return found if found.text() or found.calls() else None


def _wants_json(request: Mapping[str, Any]) -> bool:
    wanted = request.get("response_format")
    return isinstance(wanted, dict) and wanted.get("type") in ("json_object", "json_schema")


def _completion(exchange: Exchange, tokenizer: Any) -> Rendered:
    prompt, answer = exchange.request["prompt"], exchange.answer if isinstance(exchange.answer, str) else ""
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        if not 0 <= min(prompt) <= max(prompt) < len(tokenizer):
            raise QBEError(f"{exchange.place}: prompt: it has tokens that the model does not know")
        prompt = tokenizer.decode(prompt)
    if not isinstance(prompt, str):
        raise QBEError(f"{exchange.place}: prompt: it is neither text nor a list of tokens")
    text = prompt + answer
    return Rendered(text, prompt, text, answer, False, _wants_json(exchange.request))
