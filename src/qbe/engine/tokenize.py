"""From a prompt to tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qbe.engine.chat_template import ChatTemplate, chat_template, text_of
from qbe.engine.context_limit import ContextLimit
from qbe.engine.prompt_pictures import has_pictures, parts_of, pictures_of
from qbe.engine.result import PromptInput
from qbe.engine.typed_text import typed_text
from qbe.errors import QBEError
from qbe.pictures.placed import spliced
from qbe.pictures.tower import PictureTower


def encode(
    prompt: PromptInput, tokenizer: Any, model: str, tools: list[dict[str, Any]] | None = None,
    context_limit: ContextLimit | None = None, variables: Mapping[str, Any] | None = None,
    tower: PictureTower | str = "",
) -> tuple[str, list[int], list[int]]:  # fmt: skip
    """The text to analyse (of a conversation: the last message that has some, else all that its template makes), its
    token ids, and those to run.

    Args:
        model: its name, for messages.
        tools: JSON descriptions of functions, for the chat template.
        context_limit: what it must fit into, looked at before anything that takes long; None: into anything.
        variables: more that the chat template may read.
        tower: what reads pictures, or why nothing does.

    Raises:
        QBEError: an empty or too long prompt, no valid UTF-8, no kind of prompt, a chat template that fails, or a
            picture that cannot be read.
    """
    try:
        if isinstance(prompt, str):
            text = prompt
            if context_limit is not None:
                context_limit.check_text(text)
            text_ids = ids = tokenizer(prompt)["input_ids"]
        elif isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
            tokens = [t for t in prompt if isinstance(t, int)]
            if context_limit is not None:
                context_limit.check(len(tokens))
            return tokenizer.decode(tokens), tokens, tokens
        else:
            if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
                raise QBEError("a prompt is text, token ids or a conversation: messages with 'role' and 'content'")
            messages = [m for m in prompt if isinstance(m, dict)]
            texts = (text_of(m.get("content")) for m in reversed(messages))
            ids = _conversation(messages, tokenizer, model, tools, context_limit, variables or {}, tower)
            text = next((t for t in texts if t.strip()), None) or tokenizer.decode(ids)
            text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except UnicodeEncodeError as error:
        raise QBEError(f"the prompt is not valid UTF-8 (character {error.start}); convert it first") from None
    except (TypeError, ValueError) as error:  # what tokenizers raise for lone surrogates and odd types
        raise QBEError(f"the prompt cannot be tokenised ({error}); give valid UTF-8 text") from None
    if not text or not ids:
        raise QBEError("the prompt is empty; give some text")
    if context_limit is not None:
        context_limit.check(len(ids))
    return text, list(text_ids), list(ids)


def _conversation(
    messages: list[dict[str, Any]], tokenizer: Any, model: str, tools: list[dict[str, Any]] | None,
    context_limit: ContextLimit | None, variables: Mapping[str, Any], tower: PictureTower | str,
) -> list[int]:  # fmt: skip
    pictures = pictures_of(messages)
    if pictures and not isinstance(tower, PictureTower):
        raise QBEError(f"{tower}: leave them out")
    template, typed = check_chat(tokenizer, model), typed_text(tokenizer)
    # Joined before names of tokens are looked for: two parts may make one together.
    messages = [{**m, "content": _joined(m["content"])} if m.get("content") is not None else m for m in messages]
    try:
        (messages, tools, more), mark = typed.mark([messages, tools, dict(variables)])
    except RecursionError:
        raise QBEError("the conversation is nested too deeply: make it simpler") from None
    whole = template.render(messages, tools, more, model)
    if context_limit is not None:
        context_limit.check_text(whole if mark is None else whole.replace(mark, ""))
    ids = typed.encode(whole, mark)
    if pictures and isinstance(tower, PictureTower):
        ids = spliced(ids, pictures, tower, model)
    if context_limit is not None:
        context_limit.check(len(ids))
    return ids


def _joined(content: Any) -> Any:
    return list(parts_of(content)) if has_pictures(content) else text_of(content)


def check_chat(tokenizer: Any, model: str) -> ChatTemplate:
    """Its chat template. Raises QBEError where there is none, so that conversations cannot be made a prompt."""
    template = chat_template(tokenizer)
    if template is None:
        raise QBEError(f"{model} has no chat template; give the prompt as plain text")
    return template


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if content is None:
        return bool(value.get("tool_calls"))
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_text, content)))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and (
        part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))
    )
