"""What a candidate must share with its baseline whatever its precision: tokenizer, template, stop tokens, defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qbe.engine.stop_tokens import eos_ids
from qbe.models import load_config_and_tokenizer
from qbe.models.load import quiet
from qbe.regress.passages import passages

_TEXTS = (
    "Hello, world!", "  two  spaces\tand\ttabs\n\n", "naïve façade, Zürich, Ærø", "你好，世界", "Привет, мир", "🙂👩‍🚀",
    "def f(x):\n    return x ** 2  # square\n", '{"a": [1, 2.5, null], "b": "c"}', "1234567890 3.14159 -7e-3",
    "<|im_start|>user\nHi<|im_end|>\n", "<s>[INST] Hi [/INST]</s>",
    "https://example.org/a?b=c&d=e#f", "CamelCase snake_case",
)  # fmt: skip
_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 plus 2?"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}],
)
DEFAULTS = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """One property of the two.

    Attributes:
        name: of the property. found: how they differ; "" where they do not.
    """

    name: str
    found: str


def differences(baseline: Path, candidate: Path) -> list[Difference]:
    """The four properties of two local models. Raises QBEError for what `load_config_and_tokenizer` does."""
    (config, before), (config_now, now) = map(load_config_and_tokenizer, (baseline, candidate))
    with quiet():
        return [
            Difference("tokenizer", _tokenizer(before, now)),
            Difference("chat template", _template(before, now)),
            Difference("stop tokens", _stops(_ends(baseline, config, before), _ends(candidate, config_now, now))),
            Difference("sampler defaults", _defaults(_generation(baseline), _generation(candidate))),
        ]


def _tokenizer(before: Any, now: Any) -> str:
    for text in (*_TEXTS, *passages(4)):
        a, b = (list(t(text, add_special_tokens=True)["input_ids"]) for t in (before, now))
        if a != b:
            return f"{_short(text)} is {_few(a)} for the baseline and {_few(b)} for the candidate"
        texts = [t.decode(a, skip_special_tokens=False) for t in (before, now)]
        if texts[0] != texts[1]:
            return f"{_few(a)} reads {_short(texts[0])} for the baseline and {_short(texts[1])} for the candidate"
    a_words, b_words = before.get_vocab(), now.get_vocab()
    if a_words != b_words:
        word = min(w for w in a_words.keys() | b_words.keys() if a_words.get(w) != b_words.get(w))
        return f"the token {word!r} is {a_words.get(word)} for the baseline and {b_words.get(word)} for the candidate"
    return ""


def _template(before: Any, now: Any) -> str:
    for conversation in _CONVERSATIONS:
        a, b = (_rendered(t, conversation) for t in (before, now))
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            shown = f"the baseline has {_short(a[at:])}, the candidate {_short(b[at:])}"
            return f"after {at} characters of a conversation {shown}"
    return ""


def _rendered(tokenizer: Any, conversation: list[dict[str, str]]) -> str:
    """A conversation as the model is given it; why not, where the template refuses."""
    if not getattr(tokenizer, "chat_template", None):
        return "(no chat template)"
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template may raise anything
        return f"({type(error).__name__}: {error})"


def _ends(path: Path, config: Any, tokenizer: Any) -> dict[int, str]:
    """Tokens that end an answer, as the engine takes them, with their text."""
    ids = eos_ids(SimpleNamespace(config=config, generation_config=SimpleNamespace(**_generation(path))), tokenizer)
    return {i: str(tokenizer.convert_ids_to_tokens(i)) for i in ids}


def _stops(before: dict[int, str], now: dict[int, str]) -> str:
    if before == now:
        return ""
    return f"the baseline ends at {sorted(before.items())}, the candidate at {sorted(now.items())}"


def _generation(path: Path) -> dict[str, Any]:
    """`generation_config.json`; {} where there is none."""
    file = path / "generation_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if path.is_dir() and file.is_file() else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _defaults(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Engines that read these fields (vLLM does) answer requests that say nothing by them."""
    changed = [name for name in DEFAULTS if before.get(name) != now.get(name)]
    shown = ", ".join(f"{name} {before.get(name)} and {now.get(name)}" for name in changed)
    return f"baseline and candidate have {shown}" if changed else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _few(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}]"
