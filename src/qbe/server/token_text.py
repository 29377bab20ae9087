"""The text of single tokens, as logprobs show them."""

from __future__ import annotations

import codecs
import functools
from typing import Any

from llguidance import LLTokenizer

from qbe.engine.sampling.logprobs import Logprob
from qbe.engine.stop_tokens import special_tokens

_LEAST = -9999.0  # JSON has no infinity


class TextOffset:
    """How many characters of a choice's text come before its next token; several tokens may make one.

    Args:
        prompt: its text, where the choice begins with it.
        fresh: whether the first token begins a text; some tokenizers leave out a space there.
    """

    def __init__(self, prompt: str = "", fresh: bool = False) -> None:
        self._at, self._characters = 0, codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt, self.fresh = prompt, fresh

    def passed(self, token: bytes, special: bool = False, stripped: bool = False) -> int:
        """Where the token begins; the next one begins after it.

        Args:
            special: whether the text may be without it.
            stripped: whether the text is without its first space.
        """
        begin = self._at
        if special:
            name = token.decode("utf-8", "replace")
            self._at += len(name) if name and self._prompt.startswith(name, begin) else 0
            return begin
        piece = self._characters.decode(token)
        self._at += len(piece) - (stripped and piece.startswith(" ") and not self._prompt.startswith(piece, begin))
        self.fresh = False
        return begin

    def begin_answer(self) -> None:
        """The next token is the answer's first."""
        self._at = len(self._prompt)


class TokenText:
    """Text and bytes of tokens.

    Args:
        tokenizer: of transformers.
        exact: knows the bytes of tokens that are no whole characters; None where there is none.
        eos_ids: tokens that end an answer and are no part of it.
    """

    def __init__(self, tokenizer: Any, exact: LLTokenizer | None, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._exact, self._eos = tokenizer, exact, eos_ids
        self._special = special_tokens(tokenizer)
        self.bytes = functools.lru_cache(maxsize=65536)(self._bytes)

    def _bytes(self, token: int) -> bytes:
        """The token's bytes; of a special one, its name's."""
        if self._exact is None or self._exact.is_special_token(token):
            text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            return text.encode("utf-8", "replace")
        return self._exact.decode_bytes([token])

    def text(self, token: int) -> str:
        """The same as text."""
        return self.bytes(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether text is without it."""
        return token in self._special

    def _stripped(self, token: int) -> bool:
        """Whether a text that begins with this token is without its first space."""
        return self.bytes(token).startswith(b" ") and not self.decode([token]).startswith(" ")

    def decode(self, tokens: list[int]) -> str:
        """The text of a prompt that came as tokens."""
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text

    def within(self, tokens: list[Logprob]) -> list[Logprob]:
        """Without a token that ended the answer."""
        return [f for f in tokens if f.token not in self._eos]

    def for_chat(self, tokens: list[Logprob]) -> list[dict[str, Any]]:
        """As a chat answer has it: `choices[].logprobs.content`."""
        return [{**self._one(f.token, f.logprob), "top_logprobs": [self._one(t, p) for t, p in f.top]} for f in tokens]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(logprob, _LEAST), "bytes": list(self.bytes(token))}

    def for_completion(
        self, read: list[Logprob | int], written: list[Logprob | int], position: TextOffset, top: int
    ) -> dict[str, Any]:
        """As a completion has it: four lists.

        Args:
            read, written: of each token of the prompt and of the answer; a plain id for a prompt's first token, of
                which nothing is known.
            position: of the first one; it moves on.
            top: how many likely tokens were asked for; with 0 there are no `top_logprobs`.
        """
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for n, f in enumerate([*read, *written]):
            if read and n == len(read):
                position.begin_answer()
            token = f if isinstance(f, int) else f.token
            special = self.is_special(token)
            stripped = position.fresh and not special and self._stripped(token)
            text, offset = self.text(token), position.passed(self.bytes(token), special, stripped)
            likely: dict[str, float] | None = None
            if isinstance(f, Logprob):
                likely = {}
                for token_id, logprob in (*f.top, (f.token, f.logprob)):
                    likely.setdefault(self.text(token_id), max(logprob, _LEAST))
            values = text, max(f.logprob, _LEAST) if isinstance(f, Logprob) else None, likely, offset
            for name, value in zip(lists, values, strict=True):
                lists[name].append(value)
        return lists if top else {**lists, "top_logprobs": None}
