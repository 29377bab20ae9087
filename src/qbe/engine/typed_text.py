"""Special tokens in what people write are text: only those that the chat template writes itself are tokens.

Where somebody has typed the name of one, it is marked with a character that no text has before the template sees it.
Then the prompt is cut at the template's own special tokens, as a tokenizer does it, and what is between them is
tokenized without any.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from qbe.engine.stop_tokens import eos_ids, special_tokens

_PRIVATE = range(0xE000, 0xF8FF)  # characters for private use


class CallArguments(dict[str, Any]):
    """Those of a call, and how they were written: some chat templates want an object, some the text.

    Args:
        value: of JSON.
        said: the JSON.
    """

    def __init__(self, value: dict[str, Any], said: str) -> None:
        super().__init__(value)
        self.said = said


class TypedText:
    """Marks the names of special tokens in messages, and tokenizes prompts that have such marks.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {int(i): token for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        special = special_tokens(tokenizer)
        ends = {i: str(added[i]) for i in eos_ids(None, tokenizer) if i in added}
        self._ids = {name: i for i, name in (special | ends).items() if name}
        self._sides = {name: (getattr(added.get(i), "lstrip", False), getattr(added.get(i), "rstrip", False))
                       for name, i in self._ids.items()}  # fmt: skip
        names = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._middle: Tokenizer | None = None

    def mark(self, value: Any) -> tuple[Any, str | None]:
        """Messages and tools with the names of special tokens marked, and the mark; None where there are none."""
        texts = list(_texts(value))
        if self._names is None or not any(self._names.search(text) for text in texts):
            return value, None
        used = set("".join(texts))
        mark = next((chr(code) for code in _PRIVATE if chr(code) not in used), None)
        if mark is None:
            raise ValueError("the conversation has every character for private use")
        return self._marked(value, mark), mark

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._names is not None
            return self._names.sub(lambda name: f"{name[0][0]}{mark}{name[0][1:]}", value)
        if isinstance(value, CallArguments):
            return CallArguments(self._marked(dict(value), mark), self._marked(value.said, mark))
        if isinstance(value, dict):
            return {self._marked(k, mark): self._marked(v, mark) for k, v in value.items()}
        return [self._marked(v, mark) for v in value] if isinstance(value, list) else value

    def encode(self, prompt: str, mark: str | None) -> list[int]:
        """Token ids of what a template made of marked messages."""
        if mark is None or self._names is None:
            ids: list[int] = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
            return ids
        prompt = prompt.replace(f"\\u{ord(mark):04x}", mark)  # as JSON in ASCII has it
        marked = re.compile("|".join(f"{re.escape(n[0])}(?!{mark}){re.escape(n[1:])}"
                                  for n in sorted(self._ids, key=len, reverse=True)))  # fmt: skip
        encoded: list[int] = []
        begin, strip = 0, False
        for match in marked.finditer(prompt):
            before, after = self._sides[match[0]]
            piece = prompt[begin : match.start()]
            encoded += self._plain(self._stripped(piece, strip, before), mark, first=begin == 0)
            encoded.append(self._ids[match[0]])
            begin, strip = match.end(), after
        return encoded + self._plain(self._stripped(prompt[begin:], strip, False), mark, first=begin == 0)

    @staticmethod
    def _stripped(piece: str, left: bool, right: bool) -> str:
        piece = piece.lstrip() if left else piece
        return piece.rstrip() if right else piece

    def _plain(self, piece: str, mark: str, first: bool) -> list[int]:
        """Tokens of a text without special ones."""
        text = piece.replace(mark, "")
        if not text:
            return []
        ids = self._without_special(text, first)
        if mark in piece and any(self._ids[n] in ids for n in set(self._names.findall(text))):  # type: ignore[union-attr]
            # The tokenizer makes the token of its name all the same: cut the name in two.
            parts = [p for p in piece.split(mark) if p]
            return [i for n, p in enumerate(parts) for i in self._without_special(p, first and n == 0)]
        return ids

    def _without_special(self, text: str, first: bool) -> list[int]:
        if not first and (middle := self._in_the_middle()) is not None:
            ids: list[int] = middle.encode(text, add_special_tokens=False).ids
            return ids
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def _in_the_middle(self) -> Tokenizer | None:
        """The tokenizer for text that begins no prompt; None where it is the same."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        before = getattr(backend, "pre_tokenizer", None)
        if not isinstance(before, pre_tokenizers.Metaspace) or before.prepend_scheme != "first":
            return None
        if self._middle is None:
            copy = Tokenizer.from_str(backend.to_str())
            copy.pre_tokenizer = pre_tokenizers.Metaspace(before.replacement, "never", before.split)
            copy.encode_special_tokens = True
            copy.no_truncation()
            copy.no_padding()
            self._middle = copy
        return self._middle


_known: weakref.WeakKeyDictionary[Any, TypedText] = weakref.WeakKeyDictionary()


def typed_text(tokenizer: Any) -> TypedText:
    """That of a tokenizer, made once."""
    if tokenizer not in _known:
        _known[tokenizer] = TypedText(tokenizer)
    return _known[tokenizer]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if isinstance(value, CallArguments):
            yield value.said
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
