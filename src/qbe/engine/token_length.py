"""How many characters a token can stand for, so that a text that cannot fit is known before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import models

_NFC = 4  # characters of a text for one of its composed form: no character is decomposed into more


@dataclass(frozen=True)
class TokenLengthBound:
    """What one token can stand for.

    Attributes:
        size: the most characters of a text, or bytes of it where some are dropped.
        dropped: bytes that become no token.
    """

    size: int
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        """As many tokens as this text has at least. Raises UnicodeEncodeError."""
        kept = len(text.encode().translate(None, self.dropped)) if self.dropped else len(text)
        return -(-kept // self.size)


def token_length_bound(tokenizer: Any) -> TokenLengthBound | None:
    """What a tokenizer's tokens can stand for; None where that is not known for sure.

    It is known where tokens are pieces of the text itself: byte pairs over all bytes, and nothing in front of them that
    takes characters away.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if backend is None or not isinstance(model, models.BPE):
        return None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    before, dropped = list(_parts(backend.pre_tokenizer, "pretokenizers")), b""
    if any(part["type"] == "ByteLevel" for part in before):
        if model.unk_token is not None or model.byte_fallback:
            return None
        dropped = bytes(byte for byte, letter in _LETTERS.items() if letter not in vocabulary)
    elif not model.byte_fallback or not {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary.keys():
        return None
    added = backend.get_added_tokens_decoder().values()
    # One that strips takes the spaces beside it with it.
    if not all(map(_keeps, before)) or any(token.lstrip or token.rstrip for token in added):
        return None
    factor = 1
    for part in _parts(backend.normalizer, "normalizers"):
        if part["type"] == "NFC":
            factor *= _NFC
            if dropped:
                return None
        elif not _lengthens(part):
            return None
    sizes = [*map(len, vocabulary), *(len(token.content.encode()) for token in added)]
    return TokenLengthBound(factor * max(sizes), dropped)


def _letters() -> dict[int, str]:
    """Byte -> the letter that stands for it in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_LETTERS = _letters()


def _parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """What a normalizer or pre-tokenizer consists of."""
    queue = [] if component is None else [json.loads(component.__getstate__())]
    while queue:
        part = queue.pop()
        if part["type"] == "Sequence":
            queue += part[name]
        else:
            yield part


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    kind = part["type"]
    return kind in ("ByteLevel", "Digits", "Metaspace") or (kind == "Split" and part["behavior"] != "Removed")


def _lengthens(part: dict[str, Any]) -> bool:
    """Whether a normalizer leaves no text shorter than it was."""
    if part["type"] == "Replace":
        return len(part["content"]) >= len(part["pattern"].get("String", part["content"] + "?"))
    return bool(part["type"] == "Prepend")
