"""What quotas are over: class, language, structure and length of a passage."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from qbe.analysis.analyzer import Analyzer
from qbe.calibration.render import Rendered

STRUCTURES = ("text", "json", "xml", "tools")
UNDETERMINED = "und"  # as ISO 639 has it
_STEPS = (2048, 8192, 32768, 131072)
LENGTHS = ("up to 2k", "2k-8k", "8k-32k", "32k-128k", "from 128k")
_SURE = 0.8  # probability from which on a language is believed
_READ = 2000  # characters that say which language it is
_ELEMENT = re.compile(r"<([A-Za-z][\w:.-]*)(?:\s[^<>]*)?>.*?</\1\s*>", re.DOTALL)
_FENCED = re.compile(r"```(?:json|xml)?\s*(.*?)```", re.DOTALL)


class Labeller:
    """Tells class and language of passages; loads what it needs for that once."""

    def __init__(self) -> None:
        from py3langid import langid

        self._analyzer = Analyzer()
        self._languages: Any = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)

    def prompt_class(self, asked: str, token_ids: Sequence[int]) -> str:
        """Of `qbe.analysis.profile.CLASSES`, by the trained classifier."""
        return self._analyzer.analyze(asked, token_ids, tier=2).prompt_class

    def language(self, said: str) -> str:
        """ISO 639-1; `und` where it is not clear."""
        code, probability = self._languages.classify(said[:_READ])
        return str(code) if code and probability >= _SURE else UNDETERMINED


def structure(rendered: Rendered) -> str:
    """What form the answer has, or shall have; without an answer, whether the request is about such a form."""
    if rendered.uses_tools:
        return "tools"
    said = rendered.answer or rendered.asked
    for part in (said.strip(), *(m.strip() for m in _FENCED.findall(said))):
        if _is_json(part):
            return "json"
        if part.startswith("<") and _ELEMENT.search(part):
            return "xml"
    return "json" if rendered.wants_json else "text"


def _is_json(text: str) -> bool:
    if not text.startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def length(tokens: int) -> str:
    """The range that so many tokens are in."""
    return LENGTHS[bisect_right(_STEPS, tokens - 1)]


def lengths(context: int) -> tuple[str, ...]:
    """The ranges up to a model's context."""
    return LENGTHS[: LENGTHS.index(length(context)) + 1]
