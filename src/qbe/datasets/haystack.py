"""Long text with a sentence hidden in it: needle in a haystack, after Kamradt (2023)."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any

from qbe.errors import QBEError

ESSAYS = "paul_graham_essays"
DATA = "../shared/data"  # where --data and $QBE_DATA say nothing


def read_essays(data: Path | None) -> str:
    """All essays, in the order of their files' names.

    Args:
        data: the folder that holds the folder `paul_graham_essays`; None takes $QBE_DATA, else ../shared/data.

    Raises:
        QBEError: there are none.
    """
    folder = (data or Path(os.environ.get("QBE_DATA") or DATA)) / ESSAYS
    try:
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    except (OSError, UnicodeDecodeError) as error:
        raise QBEError(f"the essays in '{folder}' cannot be read ({error}); give --data others") from None
    text = "\n\n".join(t.strip() for t in texts if t.strip())
    if not text:
        raise QBEError(
            f"there are no essays in '{folder}'; give --data the folder that holds '{ESSAYS}' with *.txt in it"
        )
    return text


class Haystack:
    """Sentences of a text and how many tokens each has; the text begins again where it ends.

    Args:
        text: of at least one sentence.
        tokenizer: of the model.
        tokens: that are needed at most.
    """

    def __init__(self, text: str, tokenizer: Any, tokens: int) -> None:
        sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if s]
        counts = [len(ids) for ids in tokenizer([s + " " for s in sentences], add_special_tokens=False)["input_ids"]]
        times = 1 + tokens // max(1, sum(counts))
        self.sentences = list(chain.from_iterable(repeat(sentences, times)))
        self._ends = list(accumulate(chain.from_iterable(repeat(counts, times))))

    def hide(self, needle: str, depth: float, tokens: int) -> str:
        """A text of about so many tokens with the needle between two sentences.

        Args:
            depth: share of the text before the needle, 0 to 1.
        """
        count = bisect_left(self._ends, tokens)
        before = bisect_left(self._ends, depth * self._ends[count - 1]) if count else 0
        before = count if depth == 1 else min(before, count)
        return " ".join([*self.sentences[:before], needle, *self.sentences[before:count]])

    def fitting(self, needle: str, depth: float, tokens: int, count: Callable[[str], int]) -> str | None:
        """`hide` with as many sentences as let `count` of the text be at most `tokens`; None if not even one does."""
        wanted = tokens
        while wanted > 0:
            text = self.hide(needle, depth, wanted)
            excess = count(text) - tokens
            if excess <= 0:
                return text
            wanted -= excess
        return None
