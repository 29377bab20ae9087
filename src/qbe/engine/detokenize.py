"""Token ids to text, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qbe.engine.stop_tokens import special_tokens

_LONGEST_CHARACTER = 64  # tokens; more than that without a whole character is noise and is handed out as it is
_REPLACEMENT = "�"  # what a tokenizer writes for bytes that are not (yet) a character
_CONTEXT = 8  # tokens of the prompt that its continuation is decoded after
_MARKS = 0x100000  # the last plane of characters for private use: no text has them


class Detokenizer:
    """Streams one answer's text. Joined, the pieces are what `tokenizer.decode` adds to the prompt's text for the
    answer's tokens, up to the first stop string.

    Decoding is not additive: a character may take several tokens, and some tokenizers join tokens differently at the
    start of a text. So every piece is the difference of two decodings that share some tokens of context (the method of
    TGI and vLLM).

    Args:
        tokenizer: of transformers.
        stop: texts that end the answer; not part of the text. They may have special tokens by name, which are no text.
        eos_ids: tokens that are not text.
        prompt: tokens that the answer continues; none where it is a text of its own, as a message is.
        special: `special_tokens` of the tokenizer, where the caller has them.

    Attributes:
        text: everything handed out so far.
        stopped: the stop string that ended the answer, or None.
        shown: how many of the tokens belong to `text`; those of a stop string, or what may become one, do not.
    """

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...] = (), eos_ids: Iterable[int] = (), prompt: Sequence[int] = (),
        special: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        self.text = ""
        self.stopped: str | None = None
        self.shown = 0
        special = special_tokens(tokenizer) if special is None else special
        self._tokenizer, self._eos = tokenizer, frozenset(eos_ids)
        self._marks, self._stop = _marked(stop, special)
        self._unmark = dict.fromkeys(map(ord, self._marks.values()))
        self._ids = [t for t in prompt if t not in special][-_CONTEXT:]
        if self._decode(self._ids).endswith(_REPLACEMENT):
            self._ids = []  # it ends within a character
        self._context = 0  # decoding starts here
        self._done = len(self._ids)  # the text of the tokens before this one is in `text` or `_held`
        self._held = ""  # may be the beginning of a stop string
        self._passed = 0  # characters before those held, marks included
        self._starts: list[int] = []  # where each token's text begins, likewise

    def push(self, token: int) -> str:
        """Take one more token; returns the text that became certain, often one word, sometimes nothing."""
        if self.stopped is not None:
            return ""
        self._starts.append(self._passed + len(self._held))
        if token in self._marks:
            return self._release(self._rest() + self._marks[token], last=False)
        if token in self._eos:
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
        piece = self._release(self._rest(), last=True)
        if self.stopped is None:
            self.shown = len(self._starts)
        return piece

    def _rest(self) -> str:
        """The text of tokens that may be the beginning of a character."""
        before = self._decode(self._ids[self._context : self._done])
        now = self._decode(self._ids[self._context :])
        if len(self._ids) > self._done:
            self._context, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, piece: str, last: bool) -> str:
        """Add a piece to what is held, cut at a stop string, hand out all that cannot begin one."""
        held = self._held + piece
        stops = [(held.find(s), s) for s in self._stop if s in held]
        if stops:
            end, stop = min(stops)
            self.stopped = self._stop[stop]
            out, self._held = held[:end], ""
        else:
            keep = 0 if last else max((overlap(held, s) for s in self._stop), default=0)
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._passed += len(out)
        while self.shown < len(self._starts) and self._starts[self.shown] < self._passed:
            self.shown += 1
        out = out.translate(self._unmark) if self._unmark else out
        self.text += out
        return out


def _marked(stop: tuple[str, ...], special: Mapping[int, str]) -> tuple[dict[int, str], dict[str, str]]:
    """Special tokens that stop strings name, each with a character that stands for it; and what to look for, with the
    stop string that it means: the names as tokens, and as plain text.
    """
    named = sorted((i for i, name in special.items() if name and any(name in s for s in stop)),
                   key=lambda i: -len(special[i]))  # fmt: skip
    marks = {token: chr(_MARKS + n) for n, token in enumerate(named)}
    wanted = {s: s for s in stop}
    for s in stop:
        with_tokens = s
        for token, mark in marks.items():
            with_tokens = with_tokens.replace(special[token], mark)
        wanted.setdefault(with_tokens, s)
    return marks, wanted


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` (and not all of it)."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
