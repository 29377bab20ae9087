"""Token ids to text, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LONGEST_CHARACTER = 64  # tokens; more than that without a whole character is noise and is handed out as it is
_REPLACEMENT = "�"  # what a tokenizer writes for bytes that are not (yet) a character


class Detokenizer:
    """Streams one answer's text. Joined, the pieces are `tokenizer.decode` of its tokens up to the first stop string.

    Decoding is not additive: a character may take several tokens, and some tokenizers join tokens differently at the
    start of a text. So every piece is the difference of two decodings that share some tokens of context (the method of
    TGI and vLLM).

    Args:
        tokenizer: of transformers.
        stop: texts that end the answer; not part of the text.
        eos_ids: tokens that are not text.

    Attributes:
        text: everything handed out so far.
        stopped: the stop string that ended the answer, or None.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), eos_ids: Iterable[int] = ()) -> None:
        self.text = ""
        self.stopped: str | None = None
        self._tokenizer, self._stop, self._eos = tokenizer, stop, frozenset(eos_ids)
        self._ids: list[int] = []
        self._context = 0  # decoding starts here
        self._done = 0  # the text of the tokens before this one is in `text` or `_held`
        self._held = ""  # may be the beginning of a stop string

    def push(self, token: int) -> str:
        """Take one more token; returns the text that became certain, often one word, sometimes nothing."""
        if self.stopped is not None or token in self._eos:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._done])
        now = self._decode(self._ids[self._context :])
        unfinished = now.endswith(_REPLACEMENT) and len(self._ids) - self._done < _LONGEST_CHARACTER
        if unfinished or len(now) <= len(before):
            return ""  # the beginning of a character, or a token without text
        self._context, self._done = self._done, len(self._ids)
        return self._release(now[len(before) :], last=False)

    def finish(self) -> str:
        """The answer is over: returns what was held back."""
        if self.stopped is not None:
            return ""
        before = self._decode(self._ids[self._context : self._done])
        now = self._decode(self._ids[self._context :])
        self._context = self._done = len(self._ids)
        return self._release(now[len(before) :], last=True)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, piece: str, last: bool) -> str:
        """Add a piece to what is held, cut at a stop string, hand out all that cannot begin one."""
        held = self._held + piece
        found = [(held.find(s), s) for s in self._stop if s in held]
        if found:
            at, self.stopped = min(found)
            out, self._held = held[:at], ""
        else:
            keep = 0 if last else max((overlap(held, s) for s in self._stop), default=0)
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += out
        return out


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` (and not all of it)."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
