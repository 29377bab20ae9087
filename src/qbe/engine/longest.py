"""How many characters a token can stand for, so that a text that cannot fit is known before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import models, pre_tokenizers

_NFC = 4  # characters of a text for one of its composed form: no character is decomposed into more


def most_characters(tokenizer: Any) -> int | None:
    """The most characters of a text that one token of it can stand for; None where that is not known for sure.

    It is known where tokens are pieces of the text itself: byte pairs over all bytes, and nothing in front of them that
    takes characters away.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if backend is None or not isinstance(model, models.BPE):
        return None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    before = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    alphabet: Any = pre_tokenizers.ByteLevel.alphabet()
    if any(part["type"] == "ByteLevel" for part in before):
        whole = set(alphabet) <= vocabulary.keys()
    else:
        whole = bool(model.byte_fallback) and {f"<0x{b:02X}>" for b in range(256)} <= vocabulary.keys()
    if not whole or not all(map(_keeps, before)):
        return None
    # Such a token takes the spaces beside it with it.
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    factor = 1
    for part in _parts(backend.normalizer, "normalizers"):
        if part["type"] == "NFC":
            factor *= _NFC
        elif not _lengthens(part):
            return None
    return factor * max(map(len, vocabulary))


def _parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """What a normalizer or pre-tokenizer consists of."""
    found = [] if component is None else [json.loads(component.__getstate__())]
    while found:
        part = found.pop()
        if part["type"] == "Sequence":
            found += part[name]
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
