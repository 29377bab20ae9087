"""From a prompt to tokens, and which tokens end an answer."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from qbe.engine.context_limit import ContextLimit
from qbe.engine.result import PromptInput
from qbe.errors import QBEError


def encode(
    prompt: PromptInput,
    tokenizer: Any,
    model: str,
    tools: list[dict[str, Any]] | None = None,
    context_limit: ContextLimit | None = None,
) -> tuple[str, list[int], list[int]]:
    """The text to analyse (of a conversation: the last message that has some), its token ids, and those to run.

    Args:
        model: its name, for messages.
        tools: JSON descriptions of functions, for the chat template.
        context_limit: what it must fit into, looked at before anything that takes long; None: into anything.

    Raises:
        QBEError: an empty or too long prompt, no valid UTF-8, no kind of prompt, or a chat template that fails.
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
            check_chat(tokenizer, model)
            messages = [m for m in prompt if isinstance(m, dict)]
            text = next((m["content"] for m in reversed(messages) if m["content"].strip()), "")
            whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            if context_limit is not None:
                context_limit.check_text(whole)
            ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
            if context_limit is not None:
                context_limit.check(len(ids))
            text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except TemplateError as error:  # a damaged template, or one that refuses these roles
        said = " ".join(str(error).split())[:200]
        raise QBEError(f"the chat template of {model} fails ({said}); give the prompt as plain text") from error
    except UnicodeEncodeError as error:
        raise QBEError(f"the prompt is not valid UTF-8 (character {error.start}); convert it first") from None
    except (TypeError, ValueError) as error:  # what tokenizers raise for lone surrogates and odd types
        raise QBEError(f"the prompt cannot be tokenised ({error}); give valid UTF-8 text") from None
    if not text.strip() or not ids:
        raise QBEError("the prompt is empty; give some text")
    if context_limit is not None:
        context_limit.check(len(ids))
    return text, list(text_ids), list(ids)


def check_chat(tokenizer: Any, model: str) -> None:
    """Raises QBEError where conversations cannot be made a prompt."""
    if not getattr(tokenizer, "chat_template", None):
        raise QBEError(f"{model} has no chat template; give the prompt as plain text")


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, as transformers' `generate` takes them."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        ids = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str) and isinstance(value.get("role"), str)
