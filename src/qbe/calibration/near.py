"""Texts that are nearly the same: duplicates within a log (MinHash), and passages that hold an item of a suite.

Both compare runs of three words, whatever their case and punctuation. Two passages are duplicates where they share most
of theirs. An item is short and a passage may be long, so that there it counts how much of the item the passage holds;
items are few, so that this is found exactly.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable

from datasketch import MinHash, MinHashLSH

SAME = 0.7  # share of the runs of both that near-duplicates have in common, about
HELD = 0.5  # share of an item's runs that a passage must not hold
_RUN = 3  # words
# Letters and digits; of scripts without spaces between words each character.
_words = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+").findall


def runs(text: str) -> set[str]:
    """All runs of three words; of a shorter text the whole."""
    words = _words(text.casefold())
    return {" ".join(words[at : at + _RUN]) for at in range(max(1, len(words) - _RUN + 1))} if words else set()


class Duplicates:
    """Passages that were kept so far."""

    def __init__(self) -> None:
        self._kept = MinHashLSH(threshold=SAME)
        self._sketches: dict[str, MinHash] = {}

    def is_new(self, name: str, found: set[str]) -> bool:
        """Keeps a passage of these runs under a name, unless one like it is there."""
        sketch = MinHash(hashfunc=zlib.crc32)
        sketch.update_batch([run.encode("utf-8", "replace") for run in sorted(found)])
        if any(sketch.jaccard(self._sketches[other]) >= SAME for other in self._kept.query(sketch)):
            return False
        self._kept.insert(name, sketch)
        self._sketches[name] = sketch
        return True


class Items:
    """The items of suites, that no set may hold: a store would be judged by what it was made on.

    Args:
        texts: of the items.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._of_run: dict[str, list[int]] = {}
        self._sizes: list[int] = []
        for number, text in enumerate(texts):
            found = runs(text)
            self._sizes.append(len(found))
            for run in found:
                self._of_run.setdefault(run, []).append(number)

    def near(self, found: set[str]) -> bool:
        """Whether a passage of these runs holds half of an item's."""
        shared = Counter(item for run in found for item in self._of_run.get(run, ()))
        return any(count >= HELD * self._sizes[item] for item, count in shared.items())
